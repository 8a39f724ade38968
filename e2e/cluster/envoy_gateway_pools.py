"""Two pools behind one Envoy Gateway: by the chart, whose picker has both pools and finds the pool of a request by the request's route;
and by `extension-policy.yaml`, where each route has a separate picker with separate settings."""

import json
import signal
import time
from typing import Callable, NamedTuple

import chat
import engines
import envoy_gateway
import istio
import kube
import processes
import release
from istio_body import SESSION_HEADER
from istio_steps import STAYED_SHARE_MIN, Failed, Outcome, Run, Target, converse, described, kill_engine, outcome, stayed, under_load, used

SECOND = "qwen"
HOST = "second.example.com"
SECOND_SERVERS = "second-servers"
CHART_RELEASE = "eg-pools"
FILE = "extension-policy.yaml"
# The second pool's scheduling configuration, which knows sessions and no prefixes.
SESSIONS = {
    "apiVersion": "llm-d.ai/v1alpha1",
    "kind": "EndpointPickerConfig",
    "plugins": [{"type": "session-affinity-scorer", "parameters": {"strategy": "session_id"}}, {"type": "max-score-picker"}],
}
DAEMON_NAMESPACE, DAEMON_LABELS = "switchpoint", "app=switchpointd"


class Survivors(Target):
    """The same pool. No metrics are requested from its first engine, because it was killed."""

    def engines(self) -> str:
        return ",".join(f"{pod['status']['podIP']}:8000" for pod in self.pods()[1:])


class Pools(NamedTuple):
    """The two pools behind one gateway. The first has all hosts but `HOST`, and takes the load."""

    first: Target
    second: Target

    def converse(self, *headers: str) -> dict:
        """Runs conversations with the second pool. No conversation may leave this pool."""
        return self.converse_with(self.second, *headers)

    def converse_with(self, engines_of: Target, *headers: str) -> dict:
        return within(self.second, converse(engines_of, f"host: {HOST}", *headers))


def within(pool: Target, found: dict) -> dict:
    """Raises Failed if an endpoint of another pool has served."""
    own = set(pool.engines().split(","))
    if not used(found) <= own:
        raise Failed(f"{used(found)} have served, and the pool has {own}")
    return found


def behind(address: str, namespace: str) -> Pools:
    return Pools(Target(address, namespace, admin=envoy_gateway.admin), Target(address, namespace, f"app={SECOND}"))


def install_second_engines(namespace: str) -> None:
    kube.apply(engines.manifests().replace(engines.NAME, SECOND), namespace)
    kube.rolled_out(SECOND, namespace)


def remove_second_engines(namespace: str) -> None:
    kube.kubectl("delete", f"deployment/{SECOND}", f"inferencepools.inference.networking.k8s.io/{SECOND}", "-n", namespace, "--ignore-not-found")


def faults(pools: Pools, namespace: str, labels: str) -> list[Run]:
    """Causes faults in one pool while clients use both pools."""

    def second_loses_an_engine() -> str:
        victim = pools.second.pods()[0]["metadata"]["name"]
        processes.kill(processes.container_pid(victim, pools.second.namespace), signal.SIGKILL)
        pools.converse_with(Survivors(*pools.second))
        kube.wait_until("its engines are ready", lambda: all(map(kube.is_ready, pools.second.pods())))
        return "an engine of the second pool killed, and its conversations went on"

    def no_daemon() -> str:
        for pod in kube.pods(namespace, labels):
            processes.kill(processes.container_pid(pod["metadata"]["name"], namespace), signal.SIGKILL)
        pools.converse()
        kube.wait_until("the daemons are ready", lambda: all(map(kube.is_ready, kube.pods(namespace, labels))))
        return "all daemons killed, and conversations with the second pool went on"

    return [kill_engine(pools.first), under_load(pools.first, second_loses_an_engine), under_load(pools.first, no_daemon)]


# === The chart ===


def chart_pools() -> Outcome:
    """Drills one picker with two pools, each with its own scheduling configuration."""
    began = time.monotonic()
    envoy_gateway.install()
    engines.install()
    install_second_engines(engines.NAMESPACE)
    second = {"name": SECOND, "namespace": engines.NAMESPACE, "hosts": [HOST], "inferencePool": {"name": SECOND}, "config": SESSIONS}
    values = istio.write_values("two-pools", {"pools": [*release.VALUES["pools"], second]})
    namespace = envoy_gateway.GATEWAY_NAMESPACE
    kube.helm(
        "upgrade", "--install", CHART_RELEASE, str(release.package(release.version())), "-n", namespace, "-f", str(release.values_file()), "-f", str(values),
        "--set", "gateway.enabled=false", "--set", "envoyGateway.enabled=true", "--set", f"image.registry={envoy_gateway.REGISTRY}",
        "--wait", "--timeout", release.HELM_TIMEOUT,
    )  # fmt: skip
    try:
        envoy_gateway.ready()
        pools = behind(envoy_gateway.address(), engines.NAMESPACE)
        chat.until_answered(pools.first.address)
        remarks = [by_prefix(pools), by_session(pools)]
        runs = faults(pools, namespace, release.DAEMON_LABELS)
    finally:
        kube.helm("uninstall", CHART_RELEASE, "-n", namespace, "--wait")
        envoy_gateway.ended()
        remove_second_engines(engines.NAMESPACE)
    return outcome(began, runs, *remarks)


def by_prefix(pools: Pools) -> str:
    found = within(pools.first, converse(pools.first))
    if stayed(found) < STAYED_SHARE_MIN:
        raise Failed(f"conversations do not stay in the first pool: {described(found)}")
    return f"first pool, by prefix: {described(found)}"


def by_session(pools: Pools) -> str:
    """Checks that the second pool picks by session, because its configuration knows sessions and no prefixes."""
    with_session, without = pools.converse(SESSION_HEADER), pools.converse()
    if stayed(with_session) < STAYED_SHARE_MIN or stayed(without) >= STAYED_SHARE_MIN:
        raise Failed(f"the second pool: {stayed(with_session):.0%} stayed with a session id, {stayed(without):.0%} without")
    return f"second pool, by session: {stayed(with_session):.0%} of turns stayed with a session id, {stayed(without):.0%} without"


# === The file without patches ===


def changed(item: dict) -> dict:
    """Returns the object of the second route: another name, route and pool."""
    item["metadata"]["name"] = SECOND
    spec = item["spec"]
    if item["kind"] == "HTTPRoute":
        # The second route leaves out the picker's health, which clients reach by the first route.
        rule = spec["rules"][0]
        rule["backendRefs"] = [{"name": SECOND_SERVERS, "port": 8000}]
        spec["hostnames"] = [HOST]
    else:
        spec["targetRefs"][0]["name"] = SECOND
    for wasm in spec.get("wasm", []):
        wasm["config"]["pools"] = [{"name": SECOND}]
    return item


def two_routes() -> str:
    """Returns `extension-policy.yaml`, and a second route with its own policies."""
    text = envoy_gateway.shipped(FILE)
    items = istio.several(kube.kubectl("create", "--dry-run=client", "-o", "json", "-f", "-", stdin=text))
    second = [changed(item) for item in items if item["kind"] in ("HTTPRoute", "BackendTrafficPolicy", "EnvoyExtensionPolicy")]
    service = {"selector": {"app": SECOND}, "ports": [{"name": "http", "port": 8000}]}
    second.append({"apiVersion": "v1", "kind": "Service", "metadata": {"name": SECOND_SERVERS, "namespace": envoy_gateway.GATEWAY_NAMESPACE}, "spec": service})
    return text + "".join(f"\n---\n{json.dumps(item)}" for item in second)


def two_pools_in_the_daemon(text: str) -> None:
    kube.kubectl("patch", "configmap", "switchpointd", "-n", DAEMON_NAMESPACE, "--type=merge", "-p", json.dumps({"data": {"pools.yaml": text}}))
    istio.restart_daemon()


def two_policies() -> Outcome:
    """Drills two routes, each with its own Service, policy and picker. Both pickers decide by load, as in the file."""
    began = time.monotonic()
    envoy_gateway.install()
    envoy_gateway.install_daemon()
    namespace = envoy_gateway.GATEWAY_NAMESPACE
    install_second_engines(namespace)
    shipped = json.loads(kube.kubectl("get", "configmap", "switchpointd", "-n", DAEMON_NAMESPACE, "-o", "json"))["data"]["pools.yaml"]
    two_pools_in_the_daemon(f"{shipped}- name: {SECOND}\n  inferencePool: {{namespace: {namespace}, name: {SECOND}}}\n")
    text = two_routes()
    try:
        envoy_gateway.apply(text)
        envoy_gateway.ready()
        for policy in ("switchpoint", SECOND):
            envoy_gateway.wait_for_condition("envoyextensionpolicy", policy, "Accepted")
        pools = behind(envoy_gateway.address(), namespace)
        chat.until_answered(pools.first.address)
        remarks = ["first pool, by load: " + described(within(pools.first, converse(pools.first))), "second pool, by load: " + described(pools.converse())]
        runs = faults(pools, DAEMON_NAMESPACE, DAEMON_LABELS)
    finally:
        envoy_gateway.remove(text)
        remove_second_engines(namespace)
        two_pools_in_the_daemon(shipped)
    return outcome(began, runs, *remarks)


DRILLS: dict[str, Callable[[], Outcome]] = {"eg-pools": chart_pools, "eg-pools-policies": two_policies}
