"""Checks of a gateway for the drills of Istio, which work for every way to load the picker into the gateway."""

import json
import re
import signal
import statistics
import sys
import time
from typing import Callable, Iterable, NamedTuple

import engines
import istio
import kube
import node
import processes
from arrivals import Report, added
from loading import loading
from paths import HERE

# The minimum share of turns that stay at the endpoint of the turn before. By chance a third of the turns would stay, because there are
# three engines. One conversation runs at a time, so no load moves a conversation.
STAYED_SHARE_MIN = 0.9
# The time for which the load continues after a step, or without a step.
LOADED_SECONDS = 10
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
# A filter before the picker that writes a subset hint, as an operator's own filter does. Clients cannot set a subset hint, because the
# shipped files remove the header. SELECTED stands for the labels of the gateway's pods.
SUBSET_FILTER = f"""
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {{name: subset}}
spec:
  workloadSelector: {{labels: {{SELECTED}}}}
  configPatches:
  - applyTo: HTTP_FILTER
    match:
      context: GATEWAY
      listener: {{filterChain: {{filter: {{name: envoy.filters.network.http_connection_manager}}}}}}
    patch:
      operation: INSERT_FIRST
      value:
        name: subset
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config
          request_rules:
          - header: x-drill-subset
            on_header_present: {{metadata_namespace: envoy.lb.subset_hint, key: {SUBSET_KEY}, type: STRING}}
            remove: true
"""


# The module's counter of failed attempts, and the counter of Envoy's retries, which the drills read where there is no module.
FAILED_ATTEMPTS = re.compile(r"^wasmcustom\.switchpoint_failed_attempts_total: (\d+)$", re.MULTILINE)
REPEATED = re.compile(r"^cluster\.(.+)\.upstream_rq_retry: (\d+)$", re.MULTILINE)
# Parts of the names of clusters that belong to control planes and not to engines.
CONTROL_CLUSTERS = ("xds", "switchpoint", "picker")


class Failed(Exception):
    """The drill did not show what it must show."""


class Outcome(tuple):
    """`drills.Outcome`, which the drills of Istio cannot import: report, seconds, remarks."""

    report = property(lambda self: self[0])
    seconds = property(lambda self: self[1])
    remarks = property(lambda self: self[2])


class Target(NamedTuple):
    """A gateway's address, the namespace and the labels of the engines behind it, the gateway's Deployment with its namespace, the
    labels of its pods, and two functions: the first lists its pods, the other asks the admin interface of its Envoy."""

    address: str
    namespace: str
    labels: str = engines.SELECTOR
    gateway: tuple[str, str] = (istio.GATEWAY, istio.NAMESPACE)
    gateway_labels: str = istio.GATEWAY_LABELS
    proxies: Callable[[], list[dict]] = istio.gateway_pods
    admin: Callable[[str], str] = istio.gateway_request

    def pods(self) -> list[dict]:
        return kube.pods(self.namespace, self.labels)

    def engines(self) -> str:
        """Returns the addresses of the engines, comma-separated."""
        return ",".join(f"{pod['status']['podIP']}:8000" for pod in self.pods())


def shipped_target() -> Target:
    """Returns the gateway of the shipped files, which choose among the model servers in `default`."""
    return Target(istio.address(), "default")


# === Conversations ===


def converse(target: Target, *arguments: str) -> dict:
    """Runs the conversations, and raises Failed if a chat was not answered."""
    found = json.loads(node.run(sys.executable, str(HERE / "conversations.py"), target.address, target.engines(), *arguments))
    refused = [turn for turns in found["conversations"] for turn in turns if turn["status"] != 200]
    if refused:
        raise Failed(f"{len(refused)} chats were refused: {refused[:2]}")
    return found


def stayed(found: dict) -> float:
    """Returns the share of turns that went to the endpoint of the turn before."""
    pairs = [(a["served_by"], b["served_by"]) for turns in found["conversations"] for a, b in zip(turns, turns[1:])]
    return sum(a == b for a, b in pairs) / len(pairs)


def described(found: dict) -> str:
    first = [turn["first"] * 1000 for turns in found["conversations"] for turn in turns[1:]]
    return f"{stayed(found):.0%} of turns stayed, {found['hit_rate']:.0%} of prompt tokens cached, first token {statistics.median(first):.0f} ms (median)"


def used(found: dict) -> set[str]:
    return {turn["served_by"] for turns in found["conversations"] for turn in turns}


def routes_by_prefix(target: Target) -> str:
    found = converse(target)
    if stayed(found) < STAYED_SHARE_MIN or len(used(found)) < 2:
        raise Failed(f"conversations do not stay: {described(found)}; endpoints {used(found)}")
    return described(found)


def obeys_subset(target: Target) -> str:
    namespace = target.gateway[1]
    kube.apply(SUBSET_FILTER.replace("SELECTED", target.gateway_labels.replace("=", ": ")), namespace)
    wanted = f"{target.pods()[-1]['status']['podIP']}:8000"
    header = f"x-drill-subset: {wanted}"
    try:
        kube.wait_until("the subset is obeyed", lambda: used(converse(target, header, "2")) == {wanted}, 60)
    finally:
        kube.kubectl("delete", "envoyfilter", "subset", "-n", namespace)
    return "a subset of one endpoint is obeyed"


def walks_down_the_list(target: Target) -> str:
    """Makes an engine refuse only the gateway while the gateway's conversations continue. The gateway must repeat the requests at
    another engine."""
    kube.wait_until("all engines are ready", lambda: all(map(kube.is_ready, target.pods())))
    pids = [f"{pod['status']['podIP']}:8000={processes.container_pid(pod['metadata']['name'], target.namespace)}" for pod in target.pods()]
    gateways = ",".join(pod["status"]["podIP"] for pod in target.proxies())
    before = failed_attempts(target)
    found = json.loads(node.run(sys.executable, str(HERE / "refused.py"), target.address, gateways, *pids))
    return walked(found, failed_attempts(target) - before)


def walked(found: dict, repeated_count: int) -> str:
    """Returns the outcome of the requests. Raises Failed if a request failed, if no request was repeated, or if the engine did not serve
    again."""
    refused = [turn for part in ("before", "meanwhile", "after") for turn in found[part] if turn["status"] != 200]
    engine, meanwhile = found["engine"], found["meanwhile"]
    if refused or any(turn["served_by"] == engine for turn in meanwhile):
        raise Failed(f"{engine} refused the gateway, and {len(refused)} chats failed: {refused[:2]}; meanwhile {meanwhile}")
    if not repeated_count or not found["packets"]:
        raise Failed(f"{engine} refused {found['packets']} packets, and {repeated_count} of {len(meanwhile)} requests were repeated at another")
    if found["after"][-1]["served_by"] != engine:
        raise Failed(f"{engine} does not serve {found['return_seconds']:.0f} s after it accepts connections again")
    told = f"an engine refused the gateway: {repeated_count} of {len(meanwhile)} requests repeated at another, none failed"
    return f"{told}, and it served again after {found['return_seconds']:.1f} s"


# === Work under load ===

Run = tuple[Report, str]


def under_load(target: Target, work: Callable[[], str], broken_by: str = "") -> Run:
    """Does the work under load to the gateway. Streams that the endpoint `broken_by` had begun may break, if it is killed."""
    with loading(target.address) as load:
        remarks = work()
    report = load.report
    lost = [failure for failure in report.failures if broken_by and failure["began"] and failure["served_by"].startswith(broken_by)]
    if lost and len(lost) == report.failed:
        remarks += f" ({report.failed} streams that it had begun broke, as expected)"
        report.failed, report.failures = 0, []
    elif report.failed:
        remarks += f" ({report.failed} requests FAILED)"
    return report, remarks


def only_load(target: Target, remark: str) -> Run:
    def work() -> str:
        time.sleep(LOADED_SECONDS)
        return f"{LOADED_SECONDS} s of load, {remark}"

    return under_load(target, work)


def failed_attempts(target: Target) -> int:
    """Returns how many attempts the gateway has repeated at the next endpoint since the gateway's Envoy started."""
    counted = FAILED_ATTEMPTS.search(target.admin("stats?filter=failed_attempts"))
    return int(counted[1]) if counted else repeated(target.admin("stats?filter=upstream_rq_retry"))


def repeated(page: str) -> int:
    """Returns the number of retries in the clusters of engines, from Envoy's statistics."""
    return sum(int(number) for cluster, number in REPEATED.findall(page) if not any(part in cluster for part in CONTROL_CLUSTERS))


def kill_engine(target: Target) -> Run:
    """Kills an engine, whose endpoint then refuses connections until its container runs again. The requests go down the ranked list."""
    victim = target.pods()[0]
    before = failed_attempts(target)

    def work() -> str:
        processes.kill(processes.container_pid(victim["metadata"]["name"], target.namespace), signal.SIGKILL)
        time.sleep(LOADED_SECONDS)
        return f"an engine killed, {failed_attempts(target) - before} attempts repeated at another"

    run = under_load(target, work, victim["status"]["podIP"])
    kube.wait_until("all engines are ready", lambda: all(map(kube.is_ready, target.pods())))
    return run


def kill_daemons(target: Target, namespace: str, labels: str) -> Run:
    def work() -> str:
        for pod in kube.pods(namespace, labels):
            processes.kill(processes.container_pid(pod["metadata"]["name"], namespace), signal.SIGKILL)
        time.sleep(LOADED_SECONDS)
        return "all daemons killed"

    run = under_load(target, work)
    kube.wait_until("the daemons are ready", lambda: all(map(kube.is_ready, kube.pods(namespace, labels))))
    return run


def replace_module(target: Target, apply: Callable[[], object], how: str) -> Run:
    """Gives the gateway another module under load, and waits until Envoy runs it."""
    before = istio.modules()

    def work() -> str:
        apply()
        seconds = kube.wait_until("Envoy has another module", lambda: istio.modules() not in (before, set()), 90)
        time.sleep(LOADED_SECONDS)
        return f"module replaced {how} in {seconds:.0f} s"

    return under_load(target, work)


def replace_gateway(target: Target) -> Run:
    def work() -> str:
        name, namespace = target.gateway
        kube.kubectl("rollout", "restart", f"deployment/{name}", "-n", namespace)
        kube.rolled_out(name, namespace)
        return "gateway replaced"

    return under_load(target, work)


# === The outcome of a drill ===


def outcome(began: float, runs: Iterable[Run], *remarks: str) -> Outcome:
    reports, told = zip(*runs)
    return Outcome((added(reports), time.monotonic() - began, "; ".join([*remarks, *told])))
