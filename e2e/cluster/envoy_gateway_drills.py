"""The drills of Envoy Gateway. Each drill installs what the drill needs, so each drill runs alone; no drill needs the chart's own
gateway."""

import hashlib
import json
import time
from typing import Callable

import chat
import engines
import envoy_gateway
import envoy_gateway_pools
import images
import istio_steps
import kube
import node
import release
from arrivals import Report
from istio import OTHER_TAG
from istio_faults import REFUSED_CLUSTER
from istio_steps import (
    SUBSET_KEY, Failed, Outcome, Target, converse, described, kill_engine, outcome, routes_by_prefix, under_load, used, walks_down_the_list,
)  # fmt: skip

# The time for a change of a policy to reach Envoy and for Envoy's listener to change.
UPDATE_SECONDS = 10
# The name of the release. It differs from the name of the other drills' release, whose Role is in the same namespace of engines.
CHART_RELEASE = "eg-picker"
DAEMON_NAMESPACE, DAEMON_LABELS = "switchpoint", "app=switchpointd"
LISTENER = f"{envoy_gateway.GATEWAY_NAMESPACE}/{envoy_gateway.GATEWAY}/http"
SUBSET_HEADER = "x-drill-subset"
# A filter before the picker that writes a subset hint, as an operator's own filter does. Clients cannot set a subset hint, because the
# shipped files remove the header.
SUBSET_POLICY = {
    "apiVersion": "gateway.envoyproxy.io/v1alpha1",
    "kind": "EnvoyPatchPolicy",
    "metadata": {"name": "subset", "namespace": envoy_gateway.GATEWAY_NAMESPACE},
    "spec": {
        "targetRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": envoy_gateway.GATEWAY},
        "type": "JSONPatch",
        # This policy applies after the patches of the shipped policy, so that the filter of this policy is the first filter.
        "priority": 1,
        "jsonPatches": [
            {
                "type": "type.googleapis.com/envoy.config.listener.v3.Listener",
                "name": LISTENER,
                "operation": {
                    "op": "add",
                    "path": "/default_filter_chain/filters/0/typed_config/http_filters/0",
                    "value": {
                        "name": "subset",
                        "typed_config": {
                            "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
                            "request_rules": [
                                {
                                    "header": SUBSET_HEADER,
                                    "on_header_present": {"metadata_namespace": "envoy.lb.subset_hint", "key": SUBSET_KEY, "type": "STRING"},
                                    "remove": True,
                                }
                            ],
                        },
                    },
                },
            }
        ],
    },
}


def target() -> Target:
    """Returns the gateway of the shipped files, which choose among the model servers in `default`."""
    return Target(envoy_gateway.address(), "default", proxies=envoy_gateway.proxies, admin=envoy_gateway.admin)


def install(name: str) -> Target:
    """Runs the commands of docs/how-to/envoy-gateway.md, with one of the files."""
    envoy_gateway.install()
    envoy_gateway.install_daemon()
    envoy_gateway.apply(envoy_gateway.shipped(name))
    envoy_gateway.ready()
    found = target()
    chat.until_answered(found.address)
    return found


def listeners() -> dict:
    return json.loads(envoy_gateway.admin("config_dump?resource=dynamic_listeners"))


def filters() -> list[str]:
    """Returns the names of the HTTP filters in the gateway's listener, in order."""
    return [found["name"] for found in filters_of(listeners())]


def filters_of(dump: dict) -> list[dict]:
    """Returns the HTTP filters of the gateway's listener in Envoy's dump. The controller makes other listeners too, for probes and
    metrics."""
    for entry in dump["configs"]:
        listener = entry.get("active_state", {}).get("listener", {})
        if entry["name"] == LISTENER:
            for one in listener.get("default_filter_chain", {}).get("filters", []):
                if "http_filters" in one.get("typed_config", {}):
                    return one["typed_config"]["http_filters"]
    # A listener that still waits for its module is not active.
    raise node.NodeError(f"no HTTP filters in the gateway: {str(dump)[:300]}")


def module() -> dict:
    return module_of(listeners())


def module_of(dump: dict) -> dict:
    """Returns the source from which Envoy has the module."""
    for one in filters_of(dump):
        config = one.get("typed_config", {}).get("config", {})
        if "vm_config" in config:
            return config["vm_config"]["code"]
    raise Failed("no module in the gateway")


def obeys_subset(found: Target) -> str:
    envoy_gateway.apply(json.dumps(SUBSET_POLICY))
    wanted = f"{found.pods()[-1]['status']['podIP']}:8000"
    try:
        kube.wait_until("the filter of the subset is there", lambda: filters()[0] == "subset", 30)
        # Waits, because the old listener may still take connections for a moment.
        kube.wait_until("the subset is obeyed", lambda: used(converse(found, f"{SUBSET_HEADER}: {wanted}", "2")) == {wanted}, 30)
    finally:
        kube.kubectl("delete", "envoypatchpolicy", "subset", "-n", envoy_gateway.GATEWAY_NAMESPACE)
    return f"a subset of one endpoint is obeyed ({wanted})"


def roll_gateway() -> str:
    kube.kubectl("rollout", "restart", f"deployment/{envoy_gateway.proxy_name()}", "-n", envoy_gateway.NAMESPACE)
    envoy_gateway.ready()
    return "gateway replaced"


def kill_daemons(found: Target) -> tuple[Report, str]:
    return istio_steps.kill_daemons(found, DAEMON_NAMESPACE, DAEMON_LABELS)


def without_bootstrap(text: str) -> str:
    """Returns the manifest in the form of an earlier release: the daemon's cluster comes by the EnvoyPatchPolicy instead of the
    bootstrap."""
    head, bootstrap = text.split("  bootstrap:\n")
    block, tail = bootstrap.split("  provider:\n", 1)
    cluster = block.split("      value:\n")[1]
    patch = "  - type: type.googleapis.com/envoy.config.cluster.v3.Cluster\n    name: switchpoint-state\n    operation:\n      op: add\n      path: \"\"\n      value:\n" + cluster
    return head + "  provider:\n" + tail.rstrip("\n") + "\n" + patch


def old_form_refused() -> Outcome:
    """Checks that Envoy refuses the form of an earlier release, and accepts the shipped form."""
    began = time.monotonic()
    envoy_gateway.install()
    envoy_gateway.install_daemon()
    text = envoy_gateway.shipped("gateway.yaml")
    envoy_gateway.apply(without_bootstrap(text))
    try:
        address = envoy_gateway.address()
        kube.wait_until("a proxy starts", lambda: bool(envoy_gateway.proxies()), 60)
        kube.wait_until("Envoy refuses the cluster", lambda: REFUSED_CLUSTER in envoy_gateway.logs(), 90)
        time.sleep(UPDATE_SECONDS)
        refused = refusal(address)
        programmed = envoy_gateway.condition("envoypatchpolicy", "switchpoint", "Programmed").get("status")
        envoy_gateway.apply(text)
        envoy_gateway.ready()
        answered = chat.until_answered(address)
    finally:
        envoy_gateway.remove(text)
    old = f"the daemon's cluster by a patch: {REFUSED_CLUSTER}; {refused}, though the policy says Programmed={programmed}"
    return Outcome((None, time.monotonic() - began, f"{old}; in the bootstrap: a chat is answered by {answered['served_by']}"))


def refusal(address: str) -> str:
    """Returns the answer that clients get from a gateway without the cluster."""
    ready = sum(map(kube.is_ready, envoy_gateway.proxies()))
    try:
        answered = chat.once(address)
    except chat.Refused as why:
        return f"{ready} of {len(envoy_gateway.proxies())} pods ready, a chat is refused ({str(why)[:120]})"
    raise Failed(f"a chat is answered without the daemon's cluster: {answered}")


def patch_policy() -> Outcome:
    """Drills `gateway.yaml` as shipped."""
    began = time.monotonic()
    name = "gateway.yaml"
    found = install(name)
    try:
        envoy_gateway.wait_for_condition("envoypatchpolicy", "switchpoint", "Programmed")
        remarks = [f"filters {', '.join(filters())}", routes_by_prefix(found), obeys_subset(found), walks_down_the_list(found)]
        envoy_gateway.push_other_module(OTHER_TAG)
        runs = [
            kill_engine(found),
            kill_daemons(found),
            under_load(found, roll_gateway),
            under_load(found, lambda: replace_image(name, f"switchpoint:{OTHER_TAG}")),
        ]
    finally:
        envoy_gateway.remove(envoy_gateway.shipped(name))
    return outcome(began, runs, *remarks)


def replace_image(name: str, image: str) -> str:
    """Replaces the module by another image of the init container, which makes new pods."""
    before = {pod["metadata"]["name"] for pod in envoy_gateway.proxies()}
    envoy_gateway.apply(envoy_gateway.shipped(name, image))
    kube.wait_until("new proxies start", lambda: bool({pod["metadata"]["name"] for pod in envoy_gateway.proxies()} - before), 60)
    envoy_gateway.ready()
    return f"module replaced by {image} in new pods"


def extension_policy() -> Outcome:
    """Drills `extension-policy.yaml` as shipped: by tag, then by digest, and another module in place of the first under load."""
    began = time.monotonic()
    name = "extension-policy.yaml"
    found = install(name)
    try:
        own = f"switchpoint:{release.version()}"
        remarks = [f"filters {', '.join(filters())}", "by load alone: " + described(converse(found)), obeys_subset(found), walks_down_the_list(found), refuses_wrong_digest(name)]
        envoy_gateway.push_other_module(OTHER_TAG)
        runs = [
            under_load(found, lambda: replace_module(name, f"switchpoint@{envoy_gateway.digest(own)}", "by digest", other=False)),
            under_load(found, lambda: replace_module(name, f"switchpoint:{OTHER_TAG}", "by another tag", other=True)),
            kill_engine(found),
            kill_daemons(found),
            under_load(found, roll_gateway),
        ]
    finally:
        envoy_gateway.remove(envoy_gateway.shipped(name))
    return outcome(began, runs, *remarks)


def with_sha256(text: str, sha256: str) -> str:
    return text.replace("{url: " + f"{envoy_gateway.REGISTRY}/", f"{{sha256: {sha256}, url: {envoy_gateway.REGISTRY}/")


def refuses_wrong_digest(name: str) -> str:
    """Checks that the controller refuses the module's SHA-256, which is not the digest of the image's manifest. Afterwards the file
    names the right digest."""
    text = envoy_gateway.shipped(name)
    envoy_gateway.apply(with_sha256(text, hashlib.sha256(images.WASM.read_bytes()).hexdigest()))
    kube.wait_until("the controller refuses the digest", lambda: envoy_gateway.condition("envoyextensionpolicy", "switchpoint", "Accepted").get("status") == "False", 60)
    message = envoy_gateway.condition("envoyextensionpolicy", "switchpoint", "Accepted")["message"]
    right = envoy_gateway.digest(f"switchpoint:{release.version()}").removeprefix("sha256:")
    envoy_gateway.apply(with_sha256(text, right))
    envoy_gateway.wait_for_condition("envoyextensionpolicy", "switchpoint", "Accepted")
    chat.until_answered(envoy_gateway.address())
    if "does not match" not in message:
        raise Failed(f"another reason than the digest: {message}")
    return "the module's sha256 is refused, the manifest's is accepted"


def replace_module(name: str, image: str, how: str, other: bool) -> str:
    """Changes the module's address, which changes the listener in Envoy, also if the bytes of the module are the same."""
    before = module()
    envoy_gateway.apply(envoy_gateway.shipped(name, image))
    kube.wait_until("Envoy has the module by its other address", lambda: module() != before, 60)
    time.sleep(UPDATE_SECONDS)
    if other != (module()["remote"]["sha256"] != before["remote"]["sha256"]):
        raise Failed(f"{image}: {module()} after {before}")
    return f"module replaced {how}"


def ext_proc() -> Outcome:
    """Drills `ext-proc.yaml` as shipped."""
    began = time.monotonic()
    name = "ext-proc.yaml"
    envoy_gateway.install()
    envoy_gateway.install_daemon()
    # The head of the file says to set this variable.
    daemon = ("-n", DAEMON_NAMESPACE, "deployment/switchpointd")
    kube.kubectl("set", "env", *daemon, "SWITCHPOINT_EXT_PROC_DESTINATION_FORMAT=list")
    kube.rolled_out("switchpointd", DAEMON_NAMESPACE)
    found = install(name)
    try:
        remarks = [f"filters {', '.join(filters())}", routes_by_prefix(found), obeys_subset(found), walks_down_the_list(found)]
        runs = [kill_engine(found), kill_daemons(found), under_load(found, restart_daemon), under_load(found, roll_gateway)]
    finally:
        envoy_gateway.remove(envoy_gateway.shipped(name))
        kube.kubectl("set", "env", *daemon, "SWITCHPOINT_EXT_PROC_DESTINATION_FORMAT-")
    return outcome(began, runs, *remarks)


def restart_daemon() -> str:
    kube.kubectl("rollout", "restart", "deployment/switchpointd", "-n", DAEMON_NAMESPACE)
    kube.rolled_out("switchpointd", DAEMON_NAMESPACE)
    return "daemon replaced"


def chart() -> Outcome:
    """Drills the chart's Envoy Gateway mode in place of the files, by the commands of docs/how-to/install.md."""
    began = time.monotonic()
    envoy_gateway.install()
    engines.install()
    namespace = envoy_gateway.GATEWAY_NAMESPACE
    kube.helm(
        "upgrade", "--install", CHART_RELEASE, str(release.package(release.version())), "-n", namespace, "-f", str(release.values_file()),
        "--set", "gateway.enabled=false", "--set", "envoyGateway.enabled=true", "--set", f"image.registry={envoy_gateway.REGISTRY}",
        "--wait", "--timeout", release.HELM_TIMEOUT,
    )  # fmt: skip
    try:
        envoy_gateway.ready()
        found = Target(envoy_gateway.address(), engines.NAMESPACE, proxies=envoy_gateway.proxies, admin=envoy_gateway.admin)
        chat.until_answered(found.address)
        remarks = [f"filters {', '.join(filters())}", routes_by_prefix(found), obeys_subset(found), walks_down_the_list(found)]
        runs = [kill_engine(found), istio_steps.kill_daemons(found, namespace, release.DAEMON_LABELS), under_load(found, roll_gateway)]
    finally:
        kube.helm("uninstall", CHART_RELEASE, "-n", namespace, "--wait")
        envoy_gateway.ended()
    return outcome(began, runs, *remarks)


DRILLS: dict[str, Callable[[], Outcome]] = {
    "eg-refused": old_form_refused,
    "eg-patch-policy": patch_policy,
    "eg-extension-policy": extension_policy,
    "eg-ext-proc": ext_proc,
    "eg-chart": chart,
} | envoy_gateway_pools.DRILLS
