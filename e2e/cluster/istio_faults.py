"""Shows what a real Istio refused in the files of earlier releases, and that it accepts the present files."""

import json
import sys
import textwrap
import time
from typing import Callable

import chat
import images
import istio
import istio_steps as steps
import kube
import node
from istio_steps import LOADED_SECONDS, Failed, Outcome, Run
from paths import HERE

REFUSED_CLUSTER = "ApiConfigSource must have a statically defined non-EDS cluster"
REFUSED_IMAGE = "plugin.wasm not found"
REFUSED_CHECKSUM = "does not match"
FILE = "envoyfilter.yaml"
# An image whose module has the name of an earlier release.
UNNAMED_TAG = "unnamed"
# The time after which a pod that is not ready will not become ready, because a pod with state is ready within 5 s.
UNREADY_SECONDS = 15
# The time in which the daemon must not end. The daemon of an earlier release ended immediately.
DAEMON_SECONDS = 5
# The values of an earlier release: certificates, but no bootstrap and no probe.
MOUNTED = {
    "volumes": [{"name": "switchpoint-tls", "secret": {"secretName": "switchpoint-proxy-tls"}}],
    "volumeMounts": [{"name": "switchpoint-tls", "mountPath": "/etc/switchpoint-tls", "readOnly": True}],
}
# Removes the probe from the shipped values.
WITHOUT_PROBE = {"readinessProbe": None}


def shown() -> Outcome:
    began = time.monotonic()
    istio.install()
    istio.install_daemon()
    try:
        remarks = [cluster_from_istiod(), *module_and_probe(), daemon_without_authorities()]
        run = fetch_fails()
    finally:
        kube.kubectl("delete", "envoyfilter", "old-state", "-n", istio.NAMESPACE, "--ignore-not-found")
        istio.remove_shipped(FILE)
    return steps.outcome(began, [run], *remarks)


def status() -> int:
    """Returns the status of a chat at the gateway; 0 without an answer."""
    return json.loads(node.run(sys.executable, str(HERE / "chat.py"), istio.address()))["status"]


def restart_gateway() -> None:
    kube.kubectl("rollout", "restart", f"deployment/{istio.GATEWAY}", "-n", istio.NAMESPACE)


def gateway_pods() -> dict[str, dict]:
    return {pod["metadata"]["name"]: pod for pod in kube.pods(istio.NAMESPACE, istio.GATEWAY_LABELS)}


def new_pod(change: Callable[[], None]) -> str:
    """Makes a change that replaces the gateway's pods. Returns the name of the new pod."""
    before = gateway_pods()
    change()
    kube.wait_until("a new pod", lambda: bool(gateway_pods().keys() - before.keys()))
    return next(iter(gateway_pods().keys() - before.keys()))


def expect_reason(pod: str, reason: str) -> None:
    kube.wait_until(f"a log with `{reason}`", lambda: reason in kube.kubectl("logs", "-n", istio.NAMESPACE, pod, "--tail=-1"), 60)


def expect_unready(pod: str, reason: str) -> None:
    """Expects that a pod gives the reason in its log and does not become ready."""
    expect_reason(pod, reason)
    time.sleep(UNREADY_SECONDS)
    if kube.is_ready(gateway_pods()[pod]):
        raise Failed(f"{pod} is ready, although its log says `{reason}`")


def old_state_cluster() -> str:
    """Returns the daemon's cluster as an earlier release had it: in an EnvoyFilter, so that istiod delivers it."""
    text = (istio.CONFIG / "bootstrap.yaml").read_text()
    cluster = textwrap.dedent(text.partition("      clusters:\n")[2]).replace("- name: switchpoint-state", "  name: switchpoint-state", 1)
    patch = f"applyTo: CLUSTER\nmatch: {{context: GATEWAY}}\npatch:\n  operation: ADD\n  value:\n{textwrap.indent(textwrap.dedent(cluster), '    ')}"
    head = "apiVersion: networking.istio.io/v1alpha3\nkind: EnvoyFilter\nmetadata: {name: old-state}\nspec:\n  configPatches:\n  -\n"
    return head + textwrap.indent(patch, "    ")


def cluster_from_istiod() -> str:
    """Shows bug 1: Envoy refuses endpoints whose source is no cluster of the bootstrap."""
    istio.install_gateway(values=istio.write_values("mounted", MOUNTED))
    kube.rolled_out(istio.GATEWAY, istio.NAMESPACE)
    kube.apply(old_state_cluster(), istio.NAMESPACE)
    istio.apply_shipped(FILE)
    [running] = gateway_pods()
    expect_reason(running, REFUSED_CLUSTER)
    kube.wait_until("a running gateway answers 503", lambda: status() == 503, 60)
    expect_unready(new_pod(restart_gateway), REFUSED_CLUSTER)
    kube.kubectl("delete", "envoyfilter", "old-state", "-n", istio.NAMESPACE)
    istio.remove_gateway()
    return "1 was: the daemon's cluster by istiod is refused, a running gateway answers 503, a new pod is not ready"


def module_and_probe() -> list[str]:
    """Shows bugs 2 to 4: the module's file in the image, the checksum, and the readiness of a gateway without a module."""
    kube.kubectl("apply", "-n", istio.NAMESPACE, "-f", str(istio.CONFIG / "bootstrap.yaml"))
    unnamed = istio.push_module(UNNAMED_TAG, ("switchpoint.wasm",), images.WASM.read_bytes())
    istio.apply_shipped(FILE, unnamed)
    without_probe = new_pod(lambda: istio.install_gateway("-f", str(istio.write_values("without-probe", WITHOUT_PROBE))))
    expect_reason(without_probe, REFUSED_IMAGE)
    kube.wait_until("without our probe the pod is ready", lambda: kube.is_ready(gateway_pods()[without_probe]), 60)
    kube.wait_until("a gateway without a module answers 500", lambda: status() == 500, 60)
    remarks = ["2 was: an image without plugin.wasm is refused", "4 was: the pod is then ready and answers 500"]
    expect_unready(new_pod(istio.install_gateway), REFUSED_IMAGE)
    remarks.append("4 is: with the probe it is not ready")
    apply_checksum(istio.module_checksum())
    expect_unready(new_pod(restart_gateway), REFUSED_CHECKSUM)
    own = istio.shipped_image()
    apply_checksum(istio.digest(own).removeprefix("sha256:"))
    restart_gateway()
    kube.rolled_out(istio.GATEWAY, istio.NAMESPACE)
    chat.until_answered(istio.address())
    return [*remarks, "3 was: the module's SHA-256 is refused", "1 to 4 are: the shipped files and image, with the manifest's digest, answer"]


def fetch_fails() -> Run:
    """Gives a running gateway an image that it cannot use, and then a good image."""
    target = steps.shipped_target()
    other = istio.push_other_module()
    before = istio.modules()

    def work() -> str:
        istio.apply_shipped(FILE, f"switchpoint:{UNNAMED_TAG}")
        expect_reason(istio.gateway_pod()["metadata"]["name"], REFUSED_IMAGE)
        time.sleep(LOADED_SECONDS)
        if istio.modules() != before:
            raise Failed(f"the modules were {before}, and are {istio.modules()} after a failed fetch")
        istio.apply_shipped(FILE, other)
        seconds = kube.wait_until("Envoy has the next module", lambda: istio.modules() not in (before, set()), 90)
        time.sleep(LOADED_SECONDS)
        return f"4 is: a running gateway goes on with its module when a fetch fails, and takes the next good one within {seconds:.0f} s"

    return steps.under_load(target, work)


def apply_checksum(checksum: str) -> None:
    """Applies the shipped file with a checksum in place of `nil`."""
    text = istio.shipped(FILE)
    if text.count("sha256: nil") != 1:
        raise Failed("the shipped file has no `sha256: nil`")
    kube.kubectl("apply", "-n", istio.NAMESPACE, "-f", "-", stdin=text.replace("sha256: nil", f"sha256: {checksum}"))


def daemon_without_authorities() -> str:
    """Shows that bug 5 is gone: a daemon whose image has no CA certificates must start, because plain HTTP needs no CA certificates."""
    bare = {path: content for path, content in images.base().items() if "ca-certificates" not in path}
    images.push(images.Image("switchpointd:bare", [bare, {"/switchpointd": images.RELEASE / "switchpointd"}], "/switchpointd"))
    container = {"name": "switchpointd", "image": "registry.example.com/switchpointd:bare", "args": ["serve", "--endpoint=127.0.0.1:1"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bare"}, "spec": {"containers": [container]}}
    kube.apply(json.dumps(pod))
    running: Callable[[], bool] = lambda: pod_state()["state"].get("running") is not None
    try:
        kube.wait_until("the daemon runs", running, 30)
        time.sleep(DAEMON_SECONDS)
        if not running() or pod_state()["restartCount"]:
            raise Failed(f"a daemon without CA certificates: {pod_state()}")
    finally:
        kube.kubectl("delete", "pod", "bare", "-n", "default", "--now")
    return "5 is: a daemon starts without CA certificates"


def pod_state() -> dict:
    pod = json.loads(kube.kubectl("get", "pod", "bare", "-n", "default", "-o", "json"))
    return pod["status"].get("containerStatuses", [{"state": {}, "restartCount": 0}])[0]
