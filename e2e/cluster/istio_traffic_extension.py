"""The plugin of `wasmplugin.yaml` as a TrafficExtension, the successor of WasmPlugin."""

import json

import chat
import istio
import istio_steps as steps
import kube
from istio_steps import Target
from paths import REGISTRY

# The shipped file, whose objects other than the WasmPlugin are used unchanged.
FILE = "wasmplugin.yaml"
NAME = "switchpoint"


def install() -> Target:
    """Installs the file, and puts the extension in the place of the file's plugin."""
    istio.install_shipped(FILE)
    kube.kubectl("delete", "wasmplugin", NAME, "-n", istio.NAMESPACE)
    apply(istio.shipped_image())
    chat.until_answered(istio.address())
    return steps.shipped_target()


def remove() -> None:
    kube.kubectl("delete", "trafficextension", NAME, "-n", istio.NAMESPACE, "--ignore-not-found")
    istio.remove_shipped(FILE)


def apply(image: str) -> None:
    """Gives the gateway an image of the module."""
    kube.apply(json.dumps(manifest(image)), istio.NAMESPACE)


def manifest(image: str) -> dict:
    """Returns the WasmPlugin of the file in the terms of a TrafficExtension."""
    spec = next(item for item in istio.objects(FILE) if item["kind"] == "WasmPlugin")["spec"]
    wasm = {field: spec[field] for field in ("pluginName", "failStrategy", "pluginConfig")} | {"url": f"oci://{REGISTRY}/{image}"}
    return {
        "apiVersion": "extensions.istio.io/v1alpha1",
        "kind": "TrafficExtension",
        "metadata": {"name": NAME},
        "spec": {"selector": spec["selector"], "wasm": wasm},
    }
