"""The drills of Istio. Each installs what it needs, so each runs alone; none needs the chart's own gateway."""

import json
import signal
import statistics
import sys
import time
from typing import Callable, NamedTuple

import chat
import engines
import images
import istio
import kube
import node
import processes
import release
from arrivals import Report
from loading import loading
from paths import HERE, REGISTRY

REFUSED = "ApiConfigSource must have a statically defined non-EDS cluster"
# Another name than that of the other drills' release, whose Role is in the same namespace of engines.
CHART_RELEASE = "istio"
POOL_GATEWAY = "inference"
# By chance a third of the turns would stay, as there are three engines. One conversation runs at a time, so no load moves it.
STAYED_SHARE_MIN = 0.9
# Another tag of the module's image.
OTHER_TAG = "other"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
# A filter before the picker that writes a subset hint, as an operator's own filter does. Clients cannot set one: the shipped files
# remove the header.
SUBSET_FILTER = f"""
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {{name: subset}}
spec:
  workloadSelector: {{labels: {{istio: ingressgateway}}}}
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


class Failed(Exception):
    """The drill did not show what it must show."""


class Outcome(tuple):
    """`drills.Outcome`, which this module cannot import: report, seconds, remarks."""

    report = property(lambda self: self[0])
    seconds = property(lambda self: self[1])
    remarks = property(lambda self: self[2])


class Target(NamedTuple):
    """A gateway's address, and the namespace and the labels of the engines behind it."""

    address: str
    namespace: str
    labels: str = engines.SELECTOR

    def pods(self) -> list[dict]:
        return kube.pods(self.namespace, self.labels)


def shipped_target() -> Target:
    """The gateway of the shipped files, which choose among the model servers in `default`."""
    return Target(istio.address(), "default")


def converse(target: Target, *headers: str) -> dict:
    """Runs the conversations, and raises Failed if a chat was not answered."""
    addresses = ",".join(f"{pod['status']['podIP']}:8000" for pod in target.pods())
    found = json.loads(node.run(sys.executable, str(HERE / "conversations.py"), target.address, addresses, *headers))
    refused = [turn for turns in found["conversations"] for turn in turns if turn["status"] != 200]
    if refused:
        raise Failed(f"{len(refused)} chats were refused: {refused[:2]}")
    return found


def stayed(found: dict) -> float:
    """The share of turns that went to the endpoint of the turn before."""
    pairs = [(a["served_by"], b["served_by"]) for turns in found["conversations"] for a, b in zip(turns, turns[1:])]
    return sum(a == b for a, b in pairs) / len(pairs)


def described(found: dict) -> str:
    first = [turn["first"] * 1000 for turns in found["conversations"] for turn in turns[1:]]
    return f"{stayed(found):.0%} of turns stayed, {found['hit_rate']:.0%} of prompt tokens cached, first token {statistics.median(first):.0f} ms (median)"


def routes_by_prefix(target: Target) -> str:
    found = converse(target)
    used = {turn["served_by"] for turns in found["conversations"] for turn in turns}
    if stayed(found) < STAYED_SHARE_MIN or len(used) < 2:
        raise Failed(f"conversations do not stay: {described(found)}; endpoints {used}")
    return described(found)


def obeys_subset(target: Target) -> str:
    kube.apply(SUBSET_FILTER, istio.NAMESPACE)
    wanted = f"{target.pods()[-1]['status']['podIP']}:8000"
    header = f"x-drill-subset: {wanted}"
    try:
        kube.wait_until("the subset is obeyed", lambda: served_by(target, header) == {wanted}, 30)
    finally:
        kube.kubectl("delete", "envoyfilter", "subset", "-n", istio.NAMESPACE)
    return f"a subset of one endpoint is obeyed ({wanted})"


def served_by(target: Target, *headers: str) -> set[str]:
    return {turn["served_by"] for turns in converse(target, *headers)["conversations"] for turn in turns}


def under_load(target: Target, work: Callable[[], str], broken_by: str = "") -> tuple[Report, str]:
    """Does the work under load to the gateway. Streams that the endpoint `broken_by` had begun may break, if it is killed."""
    with loading(target.address) as load:
        remarks = work()
    report = load.report
    lost = [failure for failure in report.failures if broken_by and failure["began"] and failure["served_by"].startswith(broken_by)]
    if lost and len(lost) == report.failed:
        remarks += f" ({report.failed} streams that it had begun broke, as expected)"
        report.failed, report.failures = 0, []
    return report, remarks


def kill_engine(target: Target) -> tuple[Report, str]:
    """An endpoint refuses connections until its container runs again. The requests go down the ranked list."""
    victim = target.pods()[0]

    def work() -> str:
        processes.kill(processes.container_pid(victim["metadata"]["name"], target.namespace), signal.SIGKILL)
        time.sleep(8)
        return "an engine killed"

    outcome = under_load(target, work, victim["status"]["podIP"])
    kube.wait_until("all engines are ready", lambda: all(map(kube.is_ready, target.pods())))
    return outcome


def kill_daemon(target: Target, namespace: str, labels: str) -> tuple[Report, str]:
    def work() -> str:
        for pod in kube.pods(namespace, labels):
            processes.kill(processes.container_pid(pod["metadata"]["name"], namespace), signal.SIGKILL)
        time.sleep(10)
        return "all daemons killed"

    outcome = under_load(target, work)
    kube.wait_until("the daemons are ready", lambda: all(map(kube.is_ready, kube.pods(namespace, labels))))
    return outcome


def added(runs: list[tuple[Report, str]]) -> tuple[Report, str]:
    """One report of several loads."""
    total = Report()
    for report, _ in runs:
        for field in ("requests", "failed", "failed_begun", "streams"):
            setattr(total, field, getattr(total, field) + getattr(report, field))
        total.failures = [*total.failures, *report.failures]
        total.longest_gap = max(total.longest_gap, report.longest_gap)
    return total, "; ".join(remarks for _, remarks in runs)


def outcome(began: float, runs: list[tuple[Report, str]], *remarks: str) -> Outcome:
    report, told = added(runs)
    return Outcome((report, time.monotonic() - began, "; ".join([*remarks, told])))


def install_shipped(name: str) -> None:
    """The commands of docs/how-to/istio.md, with one of the two files."""
    istio.install()
    istio.install_daemon()
    kube.kubectl("apply", "-n", istio.NAMESPACE, "-f", str(istio.CONFIG / "bootstrap.yaml"))
    istio.install_gateway()
    kube.kubectl("apply", "-n", istio.NAMESPACE, "-f", "-", stdin=istio.shipped(name))
    kube.rolled_out(istio.GATEWAY, istio.NAMESPACE)
    chat.until_answered(istio.address())


def remove_shipped(name: str) -> None:
    kube.kubectl("delete", "--ignore-not-found", "-n", istio.NAMESPACE, "-f", "-", stdin=istio.shipped(name))
    istio.remove_gateway()


def filters() -> list[str]:
    """The names of the HTTP filters in the gateway's listener, in order."""
    dump = json.loads(istio.gateway_request("config_dump?resource=dynamic_listeners"))
    for entry in dump["configs"]:
        for chain in entry["active_state"]["listener"].get("filterChains", entry["active_state"]["listener"].get("filter_chains", [])):
            for one in chain["filters"]:
                if "http_filters" in one.get("typed_config", {}):
                    return [found["name"] for found in one["typed_config"]["http_filters"]]
    raise Failed(f"no HTTP filters in the gateway: {str(dump)[:300]}")


def envoyfilter() -> Outcome:
    """`envoyfilter.yaml` as shipped."""
    began = time.monotonic()
    install_shipped("envoyfilter.yaml")
    try:
        target = shipped_target()
        remarks = [f"filters {', '.join(filters())}", routes_by_prefix(target), obeys_subset(target)]
        runs = [kill_engine(target), kill_daemon(target, "switchpoint", "app=switchpointd"), under_load(target, restart_gateway)]
    finally:
        remove_shipped("envoyfilter.yaml")
    return outcome(began, runs, *remarks)


def restart_gateway() -> str:
    kube.kubectl("rollout", "restart", f"deployment/{istio.GATEWAY}", "-n", istio.NAMESPACE)
    kube.rolled_out(istio.GATEWAY, istio.NAMESPACE)
    return "gateway replaced"


def digest(image: str) -> str:
    return node.run("crane", "digest", "--insecure", f"{REGISTRY}/{image}").strip()


def wasmplugin() -> Outcome:
    """`wasmplugin.yaml` as shipped: by tag, then by digest, and another module in place of the first under load."""
    began = time.monotonic()
    install_shipped("wasmplugin.yaml")
    try:
        target = shipped_target()
        kinds = kube.kubectl("api-resources", "--api-group=extensions.istio.io", "-o", "name").split()
        remarks = [f"{', '.join(kinds)} in this Istio", f"filters {', '.join(filters())}", "by load alone: " + described(converse(target))]
        own = f"switchpoint:{release.version()}"
        images.crane("tag", f"{REGISTRY}/{own}", OTHER_TAG)
        runs = [
            under_load(target, lambda: replace_module(f"switchpoint@{digest(own)}", "by digest")),
            under_load(target, lambda: replace_module(f"switchpoint:{OTHER_TAG}", "by another tag")),
            kill_engine(target),
            kill_daemon(target, "switchpoint", "app=switchpointd"),
        ]
    finally:
        remove_shipped("wasmplugin.yaml")
    return outcome(began, runs, *remarks)


def replace_module(image: str, how: str) -> str:
    """Changes the plugin's address, and waits until the gateway has the configuration."""
    kube.kubectl("apply", "-n", istio.NAMESPACE, "-f", "-", stdin=istio.shipped("wasmplugin.yaml", image))
    time.sleep(10)
    return f"module replaced {how}"


def waited() -> str:
    time.sleep(10)
    return "10 s of load"


def traffic_extension() -> Outcome:
    """The plugin as a TrafficExtension, the successor of WasmPlugin."""
    began = time.monotonic()
    name = "wasmplugin.yaml"
    install_shipped(name)
    try:
        kube.kubectl("delete", "wasmplugin", "switchpoint", "-n", istio.NAMESPACE)
        kube.apply(json.dumps(as_traffic_extension()), istio.NAMESPACE)
        time.sleep(5)
        chat.until_answered(istio.address())
        runs = [under_load(shipped_target(), waited)]
        remarks = f"filters {', '.join(filters())}"
    finally:
        kube.kubectl("delete", "trafficextension", "switchpoint", "-n", istio.NAMESPACE, "--ignore-not-found")
        remove_shipped(name)
    return outcome(began, runs, remarks)


def as_traffic_extension() -> dict:
    config = {
        "state": {"cluster": "switchpoint-state"},
        "pools": [{"name": "default", "clusters": ["inference-pool"]}],
        "decide_at": "headers",
        "model_header": "x-gateway-model-name",
    }
    plugin = {"url": f"oci://{REGISTRY}/switchpoint:{release.version()}", "pluginName": "switchpoint", "failStrategy": "FAIL_RELOAD", "pluginConfig": config}
    spec = {"selector": {"matchLabels": {"istio": "ingressgateway"}}, "wasm": plugin}
    return {"apiVersion": "extensions.istio.io/v1alpha1", "kind": "TrafficExtension", "metadata": {"name": "switchpoint"}, "spec": spec}


def old_form_refused() -> Outcome:
    """The form of an earlier release, with the daemon's cluster from istiod in place of the bootstrap: Envoy refuses it."""
    began = time.monotonic()
    istio.install()
    istio.install_daemon()
    istio.install_gateway("--set", "podAnnotations=null", "--set", "readinessProbe=null")
    kube.kubectl("apply", "-n", istio.NAMESPACE, "-f", "-", stdin=istio.shipped("envoyfilter.yaml"))
    try:
        kube.wait_until("Envoy refuses the cluster", lambda: REFUSED in logs(), 60)
        pod = istio.gateway_pod()
        if kube.is_ready(pod):
            raise Failed("the gateway is ready without the daemon's cluster")
    finally:
        remove_shipped("envoyfilter.yaml")
    return Outcome((None, time.monotonic() - began, f"without bootstrap.yaml: {REFUSED}; the pod is not ready"))


def logs() -> str:
    return kube.kubectl("logs", "-n", istio.NAMESPACE, istio.gateway_pod()["metadata"]["name"], "--tail=-1")


def chart() -> Outcome:
    """The chart's Istio mode in place of the files."""
    began = time.monotonic()
    istio.install()
    engines.install()
    kube.helm(
        "upgrade", "--install", CHART_RELEASE, str(release.package(release.version())), "-n", istio.NAMESPACE, "-f", str(release.values_file()),
        "--set", "gateway.enabled=false", "--set", "istio.enabled=true", "--set", f"image.registry={REGISTRY}",
        "--wait", "--timeout", release.HELM_TIMEOUT,
    )  # fmt: skip
    # As the notes of the chart say.
    istio.install_gateway("--set", f"volumes[0].name=switchpoint-tls,volumes[0].secret.secretName={CHART_RELEASE}-proxy-tls")
    try:
        kube.rolled_out(istio.GATEWAY, istio.NAMESPACE)
        target = Target(istio.address(), engines.NAMESPACE)
        chat.until_answered(target.address)
        remarks = [f"filters {', '.join(filters())}", routes_by_prefix(target), obeys_subset(target)]
        runs = [kill_engine(target), kill_daemon(target, istio.NAMESPACE, release.DAEMON_LABELS)]
    finally:
        istio.remove_gateway()
        kube.helm("uninstall", CHART_RELEASE, "-n", istio.NAMESPACE, "--wait")
    return outcome(began, runs, *remarks)


def gateway_api() -> str:
    """A Gateway of Istio's class, for which istiod makes a Deployment and a Service, and a route to the InferencePool."""
    group = "inference.networking.k8s.io"
    gateway = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "Gateway",
        "metadata": {"name": POOL_GATEWAY, "annotations": {"networking.istio.io/service-type": "ClusterIP"}},
        "spec": {"gatewayClassName": "istio", "listeners": [{"name": "http", "port": 80, "protocol": "HTTP"}]},
    }
    rule = {"backendRefs": [{"group": group, "kind": "InferencePool", "name": engines.NAME}]}
    route = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": POOL_GATEWAY},
        "spec": {"parentRefs": [{"name": POOL_GATEWAY}], "rules": [rule]},
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [gateway, route]})


def inference_pool() -> Outcome:
    """An HTTPRoute to an InferencePool, whose picker is the ext_proc server."""
    began = time.monotonic()
    istio.install()
    engines.install()
    release.install_ext_proc("--set", "extProc.istio.enabled=true")
    kube.apply(gateway_api(), engines.NAMESPACE)
    name = f"{POOL_GATEWAY}-istio"
    try:
        kube.wait_until("istiod makes the gateway", lambda: any(d["metadata"]["name"] == name for d in kube.get("deployments", engines.NAMESPACE)))
        kube.rolled_out(name, engines.NAMESPACE)
        service = json.loads(kube.kubectl("get", "service", name, "-n", engines.NAMESPACE, "-o", "json"))
        target = Target(f"{service['spec']['clusterIP']}:80", engines.NAMESPACE)
        chat.until_answered(target.address)
        remarks = routes_by_prefix(target)
        runs = [under_load(target, waited), kill_engine(target)]
    finally:
        kube.kubectl("delete", "gateway,httproute", POOL_GATEWAY, "-n", engines.NAMESPACE)
        kube.helm("uninstall", release.EXT_PROC_NAME, "-n", engines.NAMESPACE)
    return outcome(began, runs, remarks)


DRILLS: dict[str, Callable[[], Outcome]] = {
    "istio-refused": old_form_refused,
    "istio-envoyfilter": envoyfilter,
    "istio-chart": chart,
    "istio-wasmplugin": wasmplugin,
    "istio-trafficextension": traffic_extension,
    "istio-inference-pool": inference_pool,
}
