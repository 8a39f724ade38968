"""Istio's own way to an InferencePool: a Gateway and an HTTPRoute, from which istiod makes an ext_proc filter."""

import json
import signal
import time

import chat
import engines
import istio
import istio_steps as steps
import kube
import processes
import release
from istio_steps import LOADED_SECONDS, Failed, Run, Target, under_load
from paths import ROOT

NAME = "inference"
# The ConfigMap with the settings of the gateway's pods.
OPTIONS = ROOT / "envoy-config/kubernetes/gateway-istio.yaml"
OPTIONS_NAME = "inference-gateway"
LABELS = f"gateway.networking.k8s.io/gateway-name={NAME}"
# The page that says how to forward a subset hint to the picker.
PAGE = ROOT / "docs/how-to/istio.md"
FORWARDING = "forwarding"
# The time after the end of the only daemon in which requests may fail although the pool fails open.
KILLED_SECONDS_MAX = 2


def gateway_api() -> str:
    """Returns a Gateway of Istio's class, for which istiod makes a Deployment and a Service, and a route to the InferencePool."""
    group = "inference.networking.k8s.io"
    gateway = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "Gateway",
        "metadata": {"name": NAME, "annotations": {"networking.istio.io/service-type": "ClusterIP"}},
        "spec": {
            "gatewayClassName": "istio",
            "infrastructure": {"parametersRef": {"group": "", "kind": "ConfigMap", "name": OPTIONS_NAME}},
            "listeners": [{"name": "http", "port": 80, "protocol": "HTTP"}],
        },
    }
    rule = {"backendRefs": [{"group": group, "kind": "InferencePool", "name": engines.NAME}]}
    route = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": NAME},
        "spec": {"parentRefs": [{"name": NAME}], "rules": [rule]},
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [gateway, route]})


def install() -> Target:
    """Installs the chart's ext_proc release as the picker of the InferencePool, and a Gateway in front of the pool. The release has one
    daemon, because Istio spreads streams over the pods of a Service, and daemons do not share their picks."""
    istio.install()
    engines.install()
    release.install_ext_proc("--set", "extProc.istio.enabled=true,daemon.replicas=1")
    kube.kubectl("apply", "-f", "-", stdin=OPTIONS.read_text().replace("namespace: inference}", f"namespace: {engines.NAMESPACE}}}"))
    kube.apply(gateway_api(), engines.NAMESPACE)
    name = f"{NAME}-istio"
    kube.wait_until("istiod makes the gateway", lambda: any(d["metadata"]["name"] == name for d in kube.get("deployments", engines.NAMESPACE)))
    kube.rolled_out(name, engines.NAMESPACE)
    target = Target(
        istio.service_address(name, engines.NAMESPACE), engines.NAMESPACE, gateway=(name, engines.NAMESPACE), gateway_labels=LABELS, proxies=proxies,
        admin=admin,
    )  # fmt: skip
    chat.until_answered(target.address)
    return target


def proxies() -> list[dict]:
    return kube.pods(engines.NAMESPACE, LABELS)


def admin(path: str) -> str:
    return istio.admin(proxies()[-1], path)


def forwarding() -> str:
    """Returns an EnvoyFilter with the patch that the page shows."""
    [patch] = [block for block in PAGE.read_text().split("```") if block.startswith("yaml\n") and "forwarding_namespaces" in block]
    head = f"apiVersion: networking.istio.io/v1alpha3\nkind: EnvoyFilter\nmetadata: {{name: {FORWARDING}}}\nspec:\n  configPatches:\n"
    return head + patch.removeprefix("yaml\n")


def obeys_subset(target: Target) -> str:
    """Checks that the picker obeys the subset hint. Istio sends the picker no metadata but `envoy.lb`, unless an EnvoyFilter adds the
    subset hint."""
    kube.apply(forwarding(), engines.NAMESPACE)
    try:
        return f"{steps.obeys_subset(target)} that an EnvoyFilter forwards"
    finally:
        kube.kubectl("delete", "envoyfilter", FORWARDING, "-n", engines.NAMESPACE)


def replace_daemon(target: Target) -> Run:
    """Replaces the daemon under load: a new daemon starts before the old daemon stops. No daemon has a sidecar, even where the namespace
    requests a sidecar for each pod."""

    def work() -> str:
        release.restart_ext_proc()
        for pod in release.EXT_PROC_DAEMONS.pods():
            if len(pod["spec"]["containers"] + pod["spec"].get("initContainers", [])) != 1:
                raise Failed(f"the daemon has a sidecar: {[one['name'] for one in pod['spec']['containers']]}")
        return "daemon replaced"

    return under_load(target, work)


def fail_open() -> None:
    """Lets the gateway send requests to any pod while the daemon is away."""
    spec = {"spec": {"endpointPickerRef": {"failureMode": "FailOpen"}}}
    kube.kubectl("patch", "inferencepool", engines.NAME, "-n", engines.NAMESPACE, "--type=merge", "-p", json.dumps(spec))
    # istiod pushes the change within a second.
    time.sleep(LOADED_SECONDS)


def kill_daemon(target: Target) -> Run:
    """Kills the only daemon of a pool that fails open, and waits until it runs again. Forgives failures within KILLED_SECONDS_MAX,
    because a request whose body Envoy has sent to the picker cannot continue without the picker."""
    killed = []

    def work() -> str:
        killed.append(time.monotonic())
        for pod in release.EXT_PROC_DAEMONS.pods():
            processes.kill(processes.container_pid(pod["metadata"]["name"], engines.NAMESPACE), signal.SIGKILL)
        time.sleep(LOADED_SECONDS)
        return "FailOpen: the only daemon killed"

    report, remarks = under_load(target, work)
    kube.wait_until("the daemon is ready", lambda: all(map(kube.is_ready, release.EXT_PROC_DAEMONS.pods())))
    last = killed[0] - report.started + KILLED_SECONDS_MAX
    if report.failed and report.failed == len(report.failures) and all(failure["ended"] <= last for failure in report.failures):
        remarks = f"FailOpen: the only daemon killed, {report.failed} requests failed within {KILLED_SECONDS_MAX} s, and none later"
        report.failed, report.failures = 0, []
    return report, remarks


def remove() -> None:
    kube.kubectl("delete", "gateway,httproute", NAME, "-n", engines.NAMESPACE, "--ignore-not-found")
    kube.helm("uninstall", release.EXT_PROC_NAME, "-n", engines.NAMESPACE, "--ignore-not-found")
