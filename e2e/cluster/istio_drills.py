"""The drills of Istio. Each drill installs what the drill needs, so each drill runs alone; no drill needs the chart's own gateway."""

import time
from typing import Callable

import chat
import engines
import istio
import istio_body
import istio_conformance
import istio_faults
import istio_mesh
import istio_pool
import istio_steps as steps
import istio_traffic_extension
import kube
import release
from istio_steps import Failed, Outcome, Target
from paths import REGISTRY

# The name of the release. It differs from the name of the other drills' release, whose Role is in the same namespace of engines.
CHART_RELEASE = "istio"
PICKER = "switchpoint"
# The order that the shipped files promise. A name stands for each filter whose name ends in it.
WHOLE_ORDER = ("fault", "cors", "gunzip", PICKER, "header_to_metadata", "router")
# The suffix that Istio 1.31 adds to the filter's name when it makes a TrafficExtension of a WasmPlugin.
TRANSLATED = "~istio-translated-wasmplugin"
PLUGIN_ORDER = ("gunzip", PICKER, "fault", "cors", "hold", "header_to_metadata", "router")


def in_order(wanted: tuple[str, ...]) -> str:
    """Raises Failed if the gateway's filters are not in this order."""
    found = istio.filters()
    names = [name.removesuffix(TRANSLATED) for name in found]
    places = [next((place for place, name in enumerate(names) if name.endswith(end)), None) for end in wanted]
    if None in places or places != sorted(places, key=lambda place: place or 0):
        raise Failed(f"the filters are {found}, and should be in the order {wanted}")
    return f"filters {', '.join(found)}"


def by_digest(image: str) -> str:
    return f"{image.partition(':')[0]}@{istio.digest(image)}"


def shipped_gateway(order: tuple[str, ...], apply: Callable[[str], None]) -> Outcome:
    """Runs the checks that every way of loading the module must pass. `apply` gives the gateway an image of the module."""
    began = time.monotonic()
    target = steps.shipped_target()
    remarks = [in_order(order), steps.routes_by_prefix(target), steps.obeys_subset(target), steps.walks_down_the_list(target)]
    other = istio.push_other_module()
    runs = [
        steps.replace_module(target, lambda: apply(by_digest(other)), "by digest"),
        steps.replace_module(target, lambda: apply(istio.shipped_image()), "by tag"),
        steps.kill_engine(target),
        steps.kill_daemons(target, "switchpoint", "app=switchpointd"),
        steps.replace_gateway(target),
    ]
    return steps.outcome(began, runs, *remarks)


def shipped(name: str, order: tuple[str, ...]) -> Outcome:
    """Drills a shipped file without changes."""
    istio.install_shipped(name)
    try:
        return shipped_gateway(order, lambda image: istio.apply_shipped(name, image))
    finally:
        istio.remove_shipped(name)


def envoyfilter() -> Outcome:
    return shipped("envoyfilter.yaml", WHOLE_ORDER)


def wasmplugin() -> Outcome:
    return shipped("wasmplugin.yaml", PLUGIN_ORDER)


def traffic_extension() -> Outcome:
    try:
        istio_traffic_extension.install()
        return shipped_gateway(PLUGIN_ORDER, istio_traffic_extension.apply)
    finally:
        istio_traffic_extension.remove()


def chart() -> Outcome:
    """Drills the chart's Istio mode in place of the files."""
    began = time.monotonic()
    istio.install()
    engines.install()
    kube.helm(
        "upgrade", "--install", CHART_RELEASE, str(release.package(release.version())), "-n", istio.NAMESPACE, "-f", str(release.values_file()),
        "--set", "gateway.enabled=false", "--set", "istio.enabled=true", "--set", f"image.registry={REGISTRY}",
        "--wait", "--timeout", release.HELM_TIMEOUT,
    )  # fmt: skip
    # The notes of the chart say to mount this Secret.
    istio.install_gateway("--set", f"volumes[0].name=switchpoint-tls,volumes[0].secret.secretName={CHART_RELEASE}-proxy-tls")
    try:
        kube.rolled_out(istio.GATEWAY, istio.NAMESPACE)
        target = Target(istio.address(), engines.NAMESPACE)
        chat.until_answered(target.address)
        remarks = [in_order(WHOLE_ORDER), steps.routes_by_prefix(target), steps.obeys_subset(target), steps.walks_down_the_list(target)]
        runs = [steps.kill_engine(target), steps.kill_daemons(target, istio.NAMESPACE, release.DAEMON_LABELS), steps.replace_gateway(target)]
    finally:
        istio.remove_gateway()
        kube.helm("uninstall", CHART_RELEASE, "-n", istio.NAMESPACE, "--wait")
    return steps.outcome(began, runs, *remarks)


def inference_pool() -> Outcome:
    """Drills an HTTPRoute to an InferencePool, whose picker is the ext_proc server."""
    began = time.monotonic()
    try:
        target = istio_pool.install()
        remarks = [steps.routes_by_prefix(target), istio_pool.obeys_subset(target), steps.walks_down_the_list(target)]
        runs = [steps.only_load(target, "streams among it"), steps.kill_engine(target), istio_pool.replace_daemon(target), steps.replace_gateway(target)]
        istio_pool.fail_open()
        runs.append(istio_pool.kill_daemon(target))
    finally:
        istio_pool.remove()
    return steps.outcome(began, runs, *remarks)


def body() -> Outcome:
    """Measures the hit rate and the time to the first token of each way to let the picker know the prompt."""
    began = time.monotonic()
    remarks = istio_body.measured()
    return Outcome((None, time.monotonic() - began, remarks))


DRILLS: dict[str, Callable[[], Outcome]] = {
    "istio-refused": istio_faults.shown,
    "istio-envoyfilter": envoyfilter,
    "istio-chart": chart,
    "istio-wasmplugin": wasmplugin,
    "istio-trafficextension": traffic_extension,
    "istio-inference-pool": inference_pool,
    "istio-body": body,
    "istio-conformance": istio_conformance.conformance,
} | {f"istio-mutual-tls-{way}": istio_mesh.drill(way) for way in istio_mesh.WAYS}
