"""The drills: each changes something in the cluster while clients send requests."""

import contextlib
import datetime
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Callable, NamedTuple

import chat
import engines
import envoy_gateway_drills
import ext_proc_gateway
import istio_drills
import kube
import manifests
import node
import policy
import pages
import previous
import processes
import release
from arrivals import Report
from loading import loading
from paths import HERE, NODE_NAME

API_AWAY_SECONDS = 60
# The time after the return of the API server during which the node controller may still declare pods unready.
API_SETTLE_SECONDS = 110
API_DECLARED_SECONDS = 15
# The time for which the API server is away: longer than a leader leads without the API server, and shorter than the node's grace period.
EXT_PROC_API_AWAY_SECONDS = 30
HANDOVER_SECONDS_MAX = 3.0
# The time after SIGKILL during which a process may still hold its sockets.
KILLED_SECONDS_MAX = 0.1
LEASE_SECONDS = 15
TAKEOVER_SECONDS_MAX = LEASE_SECONDS + 2.0
# The Envoy cluster of the engines, as the gateways name it.
CLUSTER = f"inference-pool-{engines.NAME}"
# A kubelet updates mounted Secrets within its synchronisation period.
SECRET_SECONDS = 30


class Failed(Exception):
    """The drill did not show what the drill must show."""


class Outcome(NamedTuple):
    """`report` is None if the drill has no load. `seconds`: what the drill's work took."""

    report: Report | None
    seconds: float
    remarks: str


def under_load(work: Callable[[], str], address: str = "") -> Outcome:
    """Does the work under load to the gateways' Service, or to an address. Every failed request fails the drill."""
    with loading(address or release.address()) as load:
        began = time.monotonic()
        remarks = work()
        seconds = time.monotonic() - began
    return Outcome(load.report, seconds, remarks)


def manifests_applied() -> Outcome:
    began = time.monotonic()
    try:
        remarks = manifests.run()
        seconds = time.monotonic() - began
    finally:
        manifests.remove()
    return Outcome(None, seconds, remarks)


def pages_followed() -> Outcome:
    """Runs the commands of the pages on installation and upgrades."""
    began = time.monotonic()
    remarks = pages.run()
    return Outcome(None, time.monotonic() - began, remarks)


def installed() -> Outcome:
    """Installs the model servers and the chart, and counts the time to the first answered chat."""
    began = time.monotonic()
    engines.install()
    release.upgrade(release.package(release.version()))
    answered = chat.until_answered(release.address())
    seconds = time.monotonic() - began
    kube.helm("test", release.NAME, "-n", release.NAMESPACE, "--timeout", release.HELM_TIMEOUT)
    return Outcome(None, seconds, f"chart {release.version()}; first chat by {answered['served_by']}; helm test passed")


def by_ext_proc(work: Callable[[], str]) -> Outcome:
    """Does the work under load to a gateway without the module. The chart's second release picks for this gateway, by an InferencePool
    that names the release."""
    release.install_ext_proc()
    ext_proc_gateway.install(engines.NAME, engines.NAMESPACE)
    # Clients connect to the pod and not to its Service, because the API server may be away.
    address = f"{kube.pods(engines.NAMESPACE, f'app={ext_proc_gateway.NAME}')[0]['status']['podIP']}:{ext_proc_gateway.PORT}"
    chat.until_answered(address)
    try:
        return under_load(work, address)
    finally:
        kube.helm("uninstall", release.EXT_PROC_NAME, "-n", engines.NAMESPACE, "--wait")
        kube.kubectl("delete", "deployment", ext_proc_gateway.NAME, "-n", engines.NAMESPACE)


def ext_proc() -> str:
    time.sleep(10)
    return "through an InferencePool"


def ext_proc_rolled() -> str:
    release.restart_ext_proc()
    return "2 daemons replaced"


def in_flight_at(failure: dict, seconds: float) -> bool:
    """Whether a request that was answered 503 was in flight when a daemon was killed, `seconds` after the start of the load."""
    return failure["status"] == 503 and failure["arrival"][0] <= seconds + KILLED_SECONDS_MAX and failure["ended"] >= seconds


def picks_begun(outcome: Outcome, killed: float) -> Outcome:
    """Forgives requests that were in flight when a daemon was killed, at `killed` on the monotonic clock: Envoy opens no stream again
    that a daemon has accepted."""
    report = outcome.report
    if report is None or report.failed == 0:
        return outcome
    begun = [failure for failure in report.failures if in_flight_at(failure, killed - report.started)]
    if len(begun) != report.failed:
        return outcome
    report.failed, report.failures = 0, []
    return outcome._replace(remarks=f"{outcome.remarks}; {len(begun)} in flight at the SIGKILL were answered 503, and nothing else failed")


def ext_proc_leader() -> Outcome:
    """Checks that no request at a gateway fails because of the leader, except requests in flight when the leader is killed."""
    killed: list[float] = []
    outcome = by_ext_proc(lambda: leader_stopped_killed_and_cut_off(killed))
    return picks_begun(outcome, *killed)


def leader_stopped_killed_and_cut_off(killed: list[float]) -> str:
    """Stops the leader, then kills the leader, then stops the API server for a while. Every daemon must pick meanwhile. Adds the moment
    of SIGKILL to `killed`."""
    daemons, told = release.EXT_PROC_DAEMONS, []
    for number, seconds_max in ((signal.SIGTERM, HANDOVER_SECONDS_MAX), (signal.SIGKILL, TAKEOVER_SECONDS_MAX)):
        before = kube.containers(daemons.pods())
        takeover = lead_again(number, daemons)
        seconds = takeover.seconds
        if number == signal.SIGKILL:
            killed.append(takeover.signalled)
        if seconds > seconds_max:
            raise Failed(f"{number.name}: another daemon led after {seconds:.1f} s, more than {seconds_max} s")
        told.append(f"{number.name}: another daemon leads after {seconds:.1f} s")
        kube.wait_until("the old leader runs again", lambda old=before: kube.containers(daemons.pods()) != old and all(map(kube.is_ready, daemons.pods())))
    before, holder, away = kube.containers(daemons.pods()), daemons.lease_holder(), time.time()
    node.stop_component("kube-apiserver")
    time.sleep(EXT_PROC_API_AWAY_SECONDS)
    node.start_component("kube-apiserver")
    kube.wait_until("a daemon holds the Lease since then", lambda: daemons.lease_holder() != "")
    if kube.containers(daemons.pods()) != before:
        raise Failed("a daemon was restarted while the API server was away")
    again = "the same daemon" if daemons.lease_holder() == holder else "the other daemon"
    told.append(f"API server away for {EXT_PROC_API_AWAY_SECONDS} s: no daemon restarted, then {again} leads")
    pods_ready_again()  # on a busy machine the API server is away for longer than the grace period; the next drill needs the Service
    # Reports whether pods became unready, because Services have no endpoints while pods are unready, and so the gateway has no endpoints.
    if any(became_ready(pod) > away for pod in [*engines.pods(), *daemons.pods()]):
        told.append("it was away for longer than the node's grace period: the node controller declared pods unready")
    return "; ".join(told)


def became_ready(pod: dict) -> float:
    """Returns the last change of a pod's condition Ready, in seconds since 1970."""
    condition = next(one for one in pod["status"]["conditions"] if one["type"] == "Ready")
    return datetime.datetime.fromisoformat(condition["lastTransitionTime"]).timestamp()


def engines_rolled() -> str:
    engines.restart()
    return f"{engines.REPLICAS} engines replaced, each after {engines.PRE_STOP_SECONDS} s of preStop"


def daemons_rolled() -> str:
    release.restart(release.DAEMON)
    return f"2 daemons replaced; {state_flows()}"


def state_flows() -> str:
    """Adds an engine and removes it: the gateways must learn both from the present leader, over new connections."""
    waits = []
    for replicas in (engines.REPLICAS + 1, engines.REPLICAS):
        kube.kubectl("scale", f"deployment/{engines.NAME}", "-n", engines.NAMESPACE, f"--replicas={replicas}")
        waits.append(kube.wait_until(f"the gateways have {replicas} endpoints", lambda wanted=replicas: gateway_endpoints() == {wanted}))
    return f"gateways learned a new engine in {waits[0]:.0f} s and its end in {waits[1]:.0f} s"


def gateway_addresses() -> list[str]:
    return [f"{pod['status']['podIP']}:{release.GATEWAY_METRICS_PORT}" for pod in kube.pods(release.NAMESPACE, release.GATEWAY_LABELS)]


def gateway_endpoints() -> set[int]:
    """Returns the different numbers of endpoints that the gateways have."""
    seen = json.loads(node.run(sys.executable, str(HERE / "members.py"), "0", CLUSTER, *gateway_addresses()))
    return {seen["fewest"], seen["most"]}


def gateways_rolled() -> str:
    release.restart(release.GATEWAY)
    return "2 proxies replaced"


def chart_upgraded() -> Outcome:
    """Upgrades from the release before to this tree, and rolls back, under load. Afterwards this tree is installed again."""
    old, new = previous.prepare(release.version()), release.version()
    release.upgrade(release.package(old, previous.CHART))
    before = json.loads(kube.helm("history", release.NAME, "-n", release.NAMESPACE, "-o", "json"))[-1]["revision"]

    def there_and_back() -> str:
        began = time.monotonic()
        with watched_pairs() as pairs:
            release.upgrade(release.package(new))
            upgraded = time.monotonic() - began
            release.rollback(before)
        missing = [pair for pair in ((old, new), (new, old)) if pair not in pairs]
        if missing:
            raise Failed(f"no gateway was ready beside a leading daemon of the other version: {missing}, only {sorted(pairs)}")
        return f"{old} to {new} in {upgraded:.0f} s, and back; seen: daemon {old} with module {new}, daemon {new} with module {old}"

    try:
        return under_load(there_and_back)
    finally:
        release.upgrade(release.package(new))


@contextlib.contextmanager
def watched_pairs() -> Iterator[set[tuple[str, str]]]:
    """Collects the versions of leading daemon and ready gateways while the context lasts."""
    pairs: set[tuple[str, str]] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            # A pod or the Lease may disappear while this function reads them.
            with contextlib.suppress(node.NodeError, KeyError):
                pairs.update(release.version_pairs())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield pairs
    finally:
        ended.set()
        watcher.join()


def scaled() -> str:
    for replicas in (8, 2):
        engines.scale(replicas)
    engines.scale(engines.REPLICAS)
    return f"{engines.REPLICAS}, 8, 2, {engines.REPLICAS} engines"


def certificates_rotated() -> str:
    """Makes new certificates, then a new CA and certificates of it, without a restart."""
    chart = release.package(release.version())
    daemons, gateways = (kube.containers(kube.pods(release.NAMESPACE, labels)) for labels in (release.DAEMON_LABELS, release.GATEWAY_LABELS))
    before = secret_certificate()
    settings: list[str] = []
    for name, value in (("generation", "2"), ("caGeneration", "2"), ("generation", "3")):
        settings += ["--set", f"tls.{name}={value}"]
        release.upgrade(chart, *settings)
        time.sleep(SECRET_SECONDS)
    if secret_certificate() == before:
        raise Failed("the certificate is the same as before")
    after = [kube.containers(kube.pods(release.NAMESPACE, labels)) for labels in (release.DAEMON_LABELS, release.GATEWAY_LABELS)]
    if after != [daemons, gateways]:
        raise Failed(f"containers restarted: {after} instead of {[daemons, gateways]}")
    # New connections use the new certificates: the daemon that leads now has no connections yet.
    lead_again(signal.SIGTERM)
    release.restart(release.DAEMON)
    return f"new certificates, new CA, new certificates of it; no container restarted; then new daemons; {state_flows()}"


def secret_certificate() -> str:
    secrets = kube.get("secrets", release.NAMESPACE, "app.kubernetes.io/part-of=switchpoint")
    return json.dumps([secret["data"].get("tls.crt") for secret in secrets if secret["type"] == "kubernetes.io/tls"])


def gateway_pod() -> str:
    """Returns the address of one gateway's pod, to bypass the Service. When the node is declared unready, the Service has no endpoints,
    whatever the gateways do."""
    return f"{kube.pods(release.NAMESPACE, release.GATEWAY_LABELS)[0]['status']['podIP']}:8080"


def pods_ready_again() -> float:
    """After an outage of the API server: waits until the kubelet reports again and engines and gateways are Ready and stay so, and
    returns the seconds."""
    began = time.monotonic()
    renewed = node_lease()
    kube.wait_until("the kubelet renews its Lease", lambda: node_lease() != renewed)
    # The node controller needs some seconds to declare the pods unready.
    time.sleep(API_DECLARED_SECONDS)

    def ready() -> bool:
        return all(kube.is_ready(pod) for pod in [*engines.pods(), *kube.pods(release.NAMESPACE, release.GATEWAY_LABELS)])

    kube.wait_until("engines and gateways are ready", ready)
    return time.monotonic() - began


def node_lease() -> str:
    """Returns the time when the kubelet last reported."""
    return kube.kubectl("get", "lease", NODE_NAME, "-n", "kube-node-lease", "-o", "jsonpath={.spec.renewTime}")


def api_server_away() -> str:
    """Stops the API server for longer than the node's grace period of 50 s. When the API server returns, the node controller declares
    the node and all its pods unready, although every engine answers."""
    watched_seconds = API_AWAY_SECONDS + API_SETTLE_SECONDS
    command = node.command(sys.executable, str(HERE / "members.py"), str(watched_seconds), CLUSTER, *gateway_addresses())
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        node.stop_component("kube-apiserver")
        time.sleep(API_AWAY_SECONDS)
        node.start_component("kube-apiserver")
        back = kube.wait_until("the API server is back", lambda: kube.kubectl("get", "--raw", "/readyz") == "ok")
        unready = pods_ready_again()
        output, _ = watch.communicate(timeout=watched_seconds + 30)
    kube.wait_until("a daemon leads", lambda: release.DAEMONS.leader() != "")
    seen = json.loads(output)
    return (
        f"away for {API_AWAY_SECONDS} s, back after {back:.0f} s; pods Ready again {unready:.0f} s later; gateways had at least {seen['fewest']} of {engines.REPLICAS} endpoints, "
        f"none for {seen['empty_seconds']:.1f} s"
    )


def containerd_restarted() -> str:
    labelled = ((release.NAMESPACE, release.DAEMON_LABELS), (release.NAMESPACE, release.GATEWAY_LABELS), (engines.NAMESPACE, engines.SELECTOR))
    before = [kube.containers(kube.pods(*where)) for where in labelled]
    node.stop_component("containerd", signal.SIGTERM)
    time.sleep(3)
    node.start_component("containerd")
    time.sleep(20)
    if [kube.containers(kube.pods(*where)) for where in labelled] != before:
        raise Failed("a container was replaced")
    return f"{sum(map(len, before))} containers kept"


def engine_killed(kill: Callable[[int], None], reason: str) -> Outcome:
    """Kills an engine, and checks that only streams that the engine had begun fail."""
    victim = engines.pods()[0]
    name, address = victim["metadata"]["name"], victim["status"]["podIP"]
    pid = processes.container_pid(name, engines.NAMESPACE)
    restarts = victim["status"]["containerStatuses"][0]["restartCount"]

    def restarted() -> bool:
        pod = next(pod for pod in engines.pods() if pod["metadata"]["name"] == name)
        return pod["status"]["containerStatuses"][0]["restartCount"] > restarts and kube.is_ready(pod)

    with loading(release.address()) as load:
        time.sleep(8)
        began = time.monotonic()
        kill(pid)
        kube.wait_until("the engine runs again", restarted)
        seconds = time.monotonic() - began
    pod = next(pod for pod in engines.pods() if pod["metadata"]["name"] == name)
    ended = pod["status"]["containerStatuses"][0]["lastState"]["terminated"]
    if ended["reason"] != reason:
        raise Failed(f"the container ended as {ended}")
    report = load.report
    others = [failure for failure in report.failures if not failure["began"] or not failure["served_by"].startswith(address)]
    if others:
        raise Failed(f"{report.failed} of {report.requests} failed, and not only streams of {address}: {others[:3]}")
    begun, report.failed, report.failures = report.failed, 0, []
    cause = "SIGKILL" if reason == "Error" else reason
    return Outcome(report, seconds, f"{cause}: {begun} streams that it had begun broke, as expected, and nothing else")


class Takeover(NamedTuple):
    """`seconds` until a daemon took the Lease. `old` and `new` are the pods of the leaders; they may be the same pod, because the
    kubelet starts a daemon again within a second. `signalled` is the moment of the signal on the monotonic clock."""

    seconds: float
    old: str
    new: str
    signalled: float


def lead_again(number: signal.Signals, daemons: release.Daemons = release.DAEMONS) -> Takeover:
    """Signals the leading daemon and waits until a daemon has taken the Lease."""
    # Waits for a leader, because an old Lease names a holder that no longer exists until the Lease expires.
    kube.wait_until("a daemon leads", lambda: daemons.leader() != "")
    old, holder = daemons.leader(), daemons.lease_holder()
    pid = processes.container_pid(old, daemons.namespace)
    began, signalled = time.time(), time.monotonic()
    processes.kill(pid, number)
    kube.wait_until("another daemon leads", lambda: daemons.lease_holder() not in ("", holder), TAKEOVER_SECONDS_MAX + 10)
    return Takeover(daemons.lease_acquired() - began, old, daemons.leader(), signalled)


def leader_lost(number: signal.Signals, seconds_max: float) -> str:
    before = kube.containers(kube.pods(release.NAMESPACE, release.DAEMON_LABELS))
    seconds, old, new, _ = lead_again(number)
    if seconds > seconds_max:
        raise Failed(f"{number.name}: another daemon led after {seconds:.1f} s, more than {seconds_max} s")
    after = kube.containers(kube.pods(release.NAMESPACE, release.DAEMON_LABELS))
    if any(before[name] != after.get(name) for name in before if not name.startswith(old)):
        raise Failed("the standby was restarted")
    flows = state_flows()
    release.settled()
    who = "the same pod, restarted," if new == old else "the standby"
    return f"{who} leads after {seconds:.1f} s (at most {seconds_max:.0f}); the standby was alive throughout; {flows}"


def prepare() -> None:
    """Prepares what all drills need."""
    manifests.install_schemas()
    policy.install()


class Drill(NamedTuple):
    """`needs_release`: whether the chart must be installed."""

    run: Callable[[], Outcome]
    needs_release: bool = True


def loaded(work: Callable[[], str]) -> Drill:
    return Drill(lambda: under_load(work))


DRILLS: dict[str, Drill] = {
    "manifests": Drill(manifests_applied, needs_release=False),
    "pages": Drill(pages_followed, needs_release=False),
    "install": Drill(installed, needs_release=False),
    "ext-proc": Drill(lambda: by_ext_proc(ext_proc)),
    "ext-proc-rolled": Drill(lambda: by_ext_proc(ext_proc_rolled)),
    "ext-proc-leader": Drill(ext_proc_leader),
    "engines-rolled": loaded(engines_rolled),
    "daemons-rolled": loaded(daemons_rolled),
    "gateways-rolled": loaded(gateways_rolled),
    "chart-upgraded": Drill(chart_upgraded),
    "scaled": loaded(scaled),
    "certificates": loaded(certificates_rotated),
    "leader-terminated": loaded(lambda: leader_lost(signal.SIGTERM, HANDOVER_SECONDS_MAX)),
    "leader-killed": loaded(lambda: leader_lost(signal.SIGKILL, TAKEOVER_SECONDS_MAX)),
    "engine-killed": Drill(lambda: engine_killed(lambda pid: processes.kill(pid, signal.SIGKILL), "Error")),
    "engine-oom": Drill(lambda: engine_killed(processes.kill_by_oom, "OOMKilled")),
    "containerd": loaded(containerd_restarted),
    "api-server": Drill(lambda: under_load(api_server_away, gateway_pod())),
}
# These drills run only when named, because these drills need tools that take minutes to build.
NAMED_ONLY = istio_drills.DRILLS | envoy_gateway_drills.DRILLS
DRILLS |= {name: Drill(run, needs_release=False) for name, run in NAMED_ONLY.items()}
