"""Envoy Gateway on the node: its controller, installed by its own chart, which makes a proxy of each Gateway.

The proxy is the stock Envoy of PyPI in place of the image that Envoy Gateway names, because images cannot be fetched here."""

import json
import shutil
import string

import images
import istio
import kube
import manifests
import node
import release
from paths import BIN, REGISTRY, ROOT, RUN, TOOLS, Skipped

NAMESPACE = "envoy-gateway-system"
RELEASE = "eg"
CONTROLLER = "envoy-gateway"
CHART = TOOLS / "envoy-gateway-controller/gateway-helm"
CONFIG = ROOT / "envoy-config/envoy-gateway"
IMAGE = "envoyproxy/gateway:v1.9.1"
ENVOY_IMAGE = "envoyproxy/envoy:v1.40.0"
# The namespace and the name of the Gateway in the shipped files.
GATEWAY_NAMESPACE, GATEWAY = "default", "inference"
PROXY_LABELS = f"gateway.envoyproxy.io/owning-gateway-namespace={GATEWAY_NAMESPACE},gateway.envoyproxy.io/owning-gateway-name={GATEWAY}"
ADMIN = "http://127.0.0.1:19000"
SHIPPED_IMAGE = "registry.example.com/switchpoint"
# A custom section of a wasm module, which a VM ignores: id 0, 6 bytes, a name of 5 bytes.
CUSTOM_SECTION = b"\x00\x06\x05drill"
VALUES = {
    # The CRDs of `.tools/schemas` are installed already.
    "crds": {"enabled": False},
    "global": {"images": {"envoyProxy": {"image": f"docker.io/{ENVOY_IMAGE}"}}},
    "config": {"envoyGateway": {"extensionApis": {"enableEnvoyPatchPolicy": True}}},
}


def push_image() -> None:
    if not (BIN / "envoy-gateway").exists() or not CHART.exists():
        raise Skipped("Envoy Gateway is not built into .tools (.ci/cluster_tools.py envoy-gateway-controller)")
    program = "/usr/local/bin/envoy-gateway"
    images.push(images.Image(IMAGE, [images.base(), {program: BIN / "envoy-gateway"}], program))


def packaged_chart() -> str:
    """Returns a copy of the chart, with the values that a release of Envoy Gateway makes of its template."""
    folder = RUN / "gateway-helm"
    shutil.copytree(CHART, folder, dirs_exist_ok=True)
    template = string.Template((folder / "values.tmpl.yaml").read_text())
    filled = template.safe_substitute(GatewayImage=f"docker.io/{IMAGE}", GatewayImagePullPolicy="IfNotPresent")
    (folder / "values.yaml").write_text(filled)
    return str(folder)


def install() -> None:
    """Installs the controller, unless it is there."""
    kube.apply(manifests.namespace(NAMESPACE))
    if kube.get("deployments", NAMESPACE, "control-plane=envoy-gateway"):
        return
    push_image()
    kube.helm(
        "upgrade", "--install", RELEASE, packaged_chart(), "-n", NAMESPACE, "--skip-crds",
        "-f", str(istio.write_values("envoy-gateway", VALUES)), "--wait", "--timeout", "120s",
    )  # fmt: skip


def install_daemon() -> None:
    """Installs the shipped daemon, the model servers in `default`, and the Secret of the proxies. A second call keeps the certificates."""
    if kube.get("deployments", "switchpoint", "app=switchpointd"):
        istio.replace_engines()
    else:
        istio.install_daemon()
    kube.apply(manifests.tls_secret("switchpoint-proxy-tls", "proxy", "state-ca"), NAMESPACE)


def shipped(name: str, image: str = "") -> str:
    """Returns a file of `envoy-config/envoy-gateway`, with the image in the node's registry, or with another image there. The controller
    uses plain HTTP for a private address only."""
    own = f"{SHIPPED_IMAGE}:{release.version()}"
    return (CONFIG / name).read_text().replace(own, f"{REGISTRY}/{image or f'switchpoint:{release.version()}'}")


def apply(text: str) -> None:
    kube.kubectl("apply", "-f", "-", stdin=text)


def remove(text: str) -> None:
    """Deletes the objects, and waits until the proxies are gone."""
    kube.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=text)
    ended()


def ended() -> None:
    kube.wait_until("the proxies end", lambda: not kube.get("deployments", NAMESPACE, PROXY_LABELS) and not proxies())


def proxies() -> list[dict]:
    return kube.pods(NAMESPACE, PROXY_LABELS)


def proxy_name() -> str:
    """Returns the name of the Deployment and of the Service that the controller made of the Gateway."""
    kube.wait_until("the controller makes the proxy", lambda: bool(kube.get("deployments", NAMESPACE, PROXY_LABELS)), 60)
    return kube.get("deployments", NAMESPACE, PROXY_LABELS)[0]["metadata"]["name"]


def address() -> str:
    return kube.service_address(proxy_name(), NAMESPACE)


def ready() -> None:
    kube.rolled_out(proxy_name(), NAMESPACE)


def logs() -> str:
    return kube.kubectl("logs", "-n", NAMESPACE, proxies()[-1]["metadata"]["name"], "-c", "envoy", "--tail=-1")


def admin(path: str) -> str:
    """Returns an answer of the admin interface of the newest proxy."""
    pod = max(proxies(), key=lambda found: found["metadata"]["creationTimestamp"])["metadata"]["name"]
    return kube.kubectl("exec", "-n", NAMESPACE, pod, "-c", "envoy", "--", "/bin/busybox", "wget", "-qO-", f"{ADMIN}/{path}")


def condition(kind: str, name: str, wanted: str) -> dict:
    """Returns a condition of a policy, as the controller reports the condition for the policy's first ancestor. Returns an empty dict if
    the controller has reported none yet."""
    found = json.loads(kube.kubectl("get", kind, name, "-n", GATEWAY_NAMESPACE, "-o", "json"))
    ancestors = found.get("status", {}).get("ancestors") or [{}]
    return next((one for one in ancestors[0].get("conditions", []) if one["type"] == wanted), {})


def wait_for_condition(kind: str, name: str, wanted: str) -> None:
    kube.wait_until(f"{kind} {name} is {wanted}", lambda: condition(kind, name, wanted).get("status") == "True", 60)


def push_other_module(tag: str) -> None:
    """Pushes an image of the module with other bytes of the same program, because an equal module would change nothing in Envoy."""
    module = images.WASM.read_bytes() + CUSTOM_SECTION
    cp = {"/bin/busybox": images.DEB / "bin/busybox", "/bin/cp": "busybox"}
    images.push(images.Image(f"switchpoint:{tag}", [cp, {f"/{name}": module for name in images.MODULE_NAMES}]))


def digest(image: str) -> str:
    """Returns the digest of an image's manifest."""
    return node.run("crane", "digest", "--insecure", f"{REGISTRY}/{image}").strip()
