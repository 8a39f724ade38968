"""Istio on the node: istiod, and its gateway chart, whose pods istiod's webhook completes with the agent and Envoy.

The proxy is the stock Envoy, because Istio's own build is not published for package registries. What only Istio's build has (its
metrics, the exchange of metadata and the ALPN filter) is switched off in VALUES."""

import hashlib
import json
import pathlib
import re
import subprocess

import chat
import credentials
import engines
import images
import kube
import manifests
import node
import release
from paths import BIN, DEB, DEB_LIBRARIES, REGISTRY, ROOT, RUN, TOOLS, Skipped

NAMESPACE = "istio-system"
GATEWAY = "istio-ingressgateway"
GATEWAY_LABELS = "istio=ingressgateway"
FILES = TOOLS / "istio"
CHARTS = FILES / "charts"
CONFIG = ROOT / "envoy-config/istio"
TAG = "1.31"
# The registry in the image names of the shipped files, which the tests replace by the node's registry. Istio's agent uses plain HTTP for a
# private address only.
SHIPPED_REGISTRY = "registry.example.com"
# A tag of the module's image with other bytes.
OTHER_TAG = "other"
# The file that the agent makes of a module.
MODULE_FILE = re.compile(r"/var/lib/istio/data/[^\"\s]+\.wasm")
VALUES = {
    "global": {
        # Uses nftables, because the node has no iptables.
        "nativeNftables": True,
        "hub": f"{REGISTRY}/istio",
        "tag": TAG,
        "proxy": {"resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"cpu": "2", "memory": "1Gi"}}, "readinessPeriodSeconds": 2},
    },
    "autoscaleEnabled": False,
    "resources": {"requests": {"cpu": "10m", "memory": "128Mi"}},
    "telemetry": {"enabled": False},
    # Adds the counter of repeated requests, which the drills read and which Istio's Envoy does not count by default.
    "meshConfig": {"defaultConfig": {"proxyStatsMatcher": {"inclusionRegexps": [".*upstream_rq_retry$"]}}},
    "env": {
        "PILOT_ENABLE_METADATA_EXCHANGE": "false",
        "PILOT_ENABLE_ALPN_FILTER": "false",
        "ENABLE_GATEWAY_API_INFERENCE_EXTENSION": "true",
    },
}
GATEWAY_VALUES = {"service": {"type": "ClusterIP"}, "autoscaling": {"enabled": False}, "replicaCount": 1}
GATEWAY_OBJECT = {
    "apiVersion": "networking.istio.io/v1",
    "kind": "Gateway",
    "metadata": {"name": "inference"},
    "spec": {"selector": {"istio": "ingressgateway"}, "servers": [{"port": {"number": 80, "name": "http", "protocol": "HTTP"}, "hosts": ["*"]}]},
}


def write_values(name: str, values: dict) -> pathlib.Path:
    file = RUN / f"{name}.json"
    file.write_text(json.dumps(values))
    return file


def push_images() -> None:
    """Pushes istiod's image and that of the proxy: the agent, and Envoy where the agent looks for it."""
    if not (BIN / "pilot-discovery").exists() or not CHARTS.exists():
        raise Skipped("Istio is not built into .tools (.ci/cluster_tools.py istio)")
    images.push(images.Image(f"istio/pilot:{TAG}", [images.base(), {"/usr/local/bin/pilot-discovery": BIN / "pilot-discovery"}], "/usr/local/bin/pilot-discovery"))
    agent = {
        "/usr/local/bin/pilot-agent": BIN / "pilot-agent",
        "/var/lib/istio/envoy/envoy_bootstrap_tmpl.json": FILES / "envoy_bootstrap.json",
    }
    layers = [nft() | images.base(), {"/usr/local/bin/envoy": images.envoy()}, agent]
    images.push(images.Image(f"istio/proxyv2:{TAG}", layers, "/usr/local/bin/pilot-agent"))


def nft() -> images.Layer:
    """Returns Debian's nft with its libraries. With nft, istio-init sends the traffic of a pod to the pod's sidecar."""
    program = DEB / "usr/sbin/nft"
    search = {"LD_LIBRARY_PATH": f"{DEB_LIBRARIES}:{DEB / 'lib/x86_64-linux-gnu'}"}
    found = subprocess.run(["ldd", str(program)], env=search, capture_output=True, text=True, check=True).stdout
    libraries = dict(re.findall(r"(\S+\.so\S*) => (\S+)", found))
    return {"usr/sbin/nft": program} | {f"lib/x86_64-linux-gnu/{name}": pathlib.Path(path) for name, path in libraries.items()}


def install() -> None:
    """Installs istiod, unless it is there. The CRDs of Istio are those of `.tools/schemas`."""
    kube.apply(manifests.namespace(NAMESPACE))
    if kube.get("deployments", NAMESPACE, "app=istiod"):
        return
    push_images()
    kube.helm(
        "upgrade", "--install", "istiod", str(CHARTS / "istio-control/istio-discovery"), "-n", NAMESPACE,
        "-f", str(write_values("istiod", VALUES)), "--wait", "--timeout", "120s",
    )  # fmt: skip


def install_gateway(*arguments: str, values: pathlib.Path | None = CONFIG / "gateway-values.yaml") -> None:
    """Installs or upgrades the gateway, by default with the shipped values. The function does not wait until the pods are ready, because
    a pod is ready only when the picker has state."""
    kube.helm(
        "upgrade", "--install", GATEWAY, str(CHARTS / "gateway"), "-n", NAMESPACE, *(["-f", str(values)] if values else []),
        "-f", str(write_values("gateway", GATEWAY_VALUES)), *arguments,
    )  # fmt: skip
    kube.apply(json.dumps(GATEWAY_OBJECT), NAMESPACE)


def remove_gateway() -> None:
    kube.helm("uninstall", GATEWAY, "-n", NAMESPACE, "--wait")


def install_daemon() -> None:
    """Installs the shipped daemon with its certificates, the model servers in `default`, and the Service that the VirtualService names."""
    replace_engines()
    manifests.prepare()
    credentials.certificate("proxy", "state-ca", "DNS:inference-gateway", "clientAuth")
    kube.apply(manifests.tls_secret("switchpoint-proxy-tls", "proxy", "state-ca"), NAMESPACE)
    service = {"selector": {"app": "llama"}, "ports": [{"name": "http", "port": 8000}]}
    kube.apply(json.dumps({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "model-servers"}, "spec": service}))
    apply_daemon()
    kube.kubectl("apply", "-n", "default", "-f", str(ROOT / "envoy-config/kubernetes/rbac.yaml"))
    kube.rolled_out("model-servers", "default")
    kube.rolled_out("switchpointd", "switchpoint")


def replace_engines() -> None:
    """Replaces the engines of an earlier drill, because the picker has learned how fast each one was."""
    if kube.get("deployments", "switchpoint", "app=switchpointd"):
        kube.kubectl("delete", "pods", "-n", "default", "-l", engines.SELECTOR, "--grace-period=1")
        kube.rolled_out("model-servers", "default")


def apply_daemon() -> None:
    kube.kubectl("apply", "-f", str(ROOT / "envoy-config/kubernetes/daemon.yaml"))


def restart_daemon() -> None:
    kube.kubectl("rollout", "restart", "deployment/switchpointd", "-n", "switchpoint")
    kube.rolled_out("switchpointd", "switchpoint")


def shipped_image() -> str:
    return f"switchpoint:{release.version()}"


def shipped(name: str, image: str = "") -> str:
    """Returns a file of `envoy-config/istio`, with the image in the node's registry, or with another image there."""
    return (CONFIG / name).read_text().replace(f"{SHIPPED_REGISTRY}/{shipped_image()}", f"{REGISTRY}/{image or shipped_image()}")


def apply_shipped(name: str, image: str = "") -> None:
    kube.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=shipped(name, image))


def install_shipped(name: str) -> None:
    """Runs the commands of docs/how-to/istio.md, with one of the two files."""
    install()
    install_daemon()
    kube.kubectl("apply", "-n", NAMESPACE, "-f", str(CONFIG / "bootstrap.yaml"))
    install_gateway()
    apply_shipped(name)
    kube.rolled_out(GATEWAY, NAMESPACE)
    chat.until_answered(address())


def remove_shipped(name: str) -> None:
    kube.kubectl("delete", "--ignore-not-found", "-n", NAMESPACE, "-f", "-", stdin=shipped(name))
    remove_gateway()
    # Deletes the object, because the chart makes an object of the same name in another drill.
    kube.kubectl("delete", "--ignore-not-found", "-n", NAMESPACE, "-f", str(CONFIG / "bootstrap.yaml"))


def objects(name: str) -> list[dict]:
    """Returns the objects of a shipped file."""
    return several(kube.kubectl("create", "--dry-run=client", "-o", "json", "-n", NAMESPACE, "-f", "-", stdin=shipped(name)))


def several(text: str) -> list[dict]:
    """Returns the JSON documents of a text, one after another, as `kubectl create` prints them."""
    found, rest = [], text.strip()
    while rest:
        document, end = json.JSONDecoder().raw_decode(rest)
        found.append(document)
        rest = rest[end:].lstrip()
    return found


# === The module's images ===


def push_module(tag: str, files: tuple[str, ...], content: bytes) -> str:
    """Pushes an image with the module's bytes under these names. Returns its name."""
    image = images.Image(f"switchpoint:{tag}", [{"/bin/busybox": DEB / "bin/busybox"}, {f"/{file}": content for file in files}])
    images.push(image)
    return image.name


def push_other_module() -> str:
    """Pushes an image with the module and a custom section, so that the bytes differ from the module's."""
    section = b"\x05drill"
    return push_module(OTHER_TAG, images.MODULE_NAMES, images.WASM.read_bytes() + b"\x00" + bytes([len(section)]) + section)


def digest(image: str) -> str:
    """Returns the digest of an image's manifest in the node's registry."""
    return node.run("crane", "digest", "--insecure", f"{REGISTRY}/{image}").strip()


def module_checksum() -> str:
    return hashlib.sha256(images.WASM.read_bytes()).hexdigest()


# === The gateway ===


def gateway_pods() -> list[dict]:
    return kube.pods(NAMESPACE, GATEWAY_LABELS)


def gateway_pod() -> dict:
    return gateway_pods()[-1]


def gateway_request(path: str) -> str:
    """Sends a request to the admin interface of the gateway's Envoy, and returns the answer."""
    return admin(gateway_pod(), path)


def admin(pod: dict, path: str) -> str:
    """Sends a request from a pod's agent to the admin interface of the pod's Envoy, and returns the answer."""
    name, namespace = (pod["metadata"][field] for field in ("name", "namespace"))
    return kube.kubectl("exec", "-n", namespace, name, "-c", "istio-proxy", "--", "pilot-agent", "request", "GET", path)


def filters() -> list[str]:
    """Returns the names of the HTTP filters in the gateway's listener, in order."""
    dump = json.loads(gateway_request("config_dump?resource=dynamic_listeners"))
    for entry in dump["configs"]:
        listener = entry.get("active_state", {}).get("listener", {})
        for chain in listener.get("filter_chains", []):
            for one in chain["filters"]:
                if "http_filters" in one.get("typed_config", {}):
                    return [found["name"] for found in one["typed_config"]["http_filters"]]
    raise node.NodeError(f"no HTTP filters in the gateway: {str(dump)[:300]}")


def modules() -> set[str]:
    """Returns the files of the modules that the gateway's Envoy runs."""
    return set(MODULE_FILE.findall(gateway_request("config_dump")))


def logs() -> str:
    return kube.kubectl("logs", "-n", NAMESPACE, gateway_pod()["metadata"]["name"], "--tail=-1")


def address() -> str:
    return service_address(GATEWAY, NAMESPACE)


def service_address(name: str, namespace: str) -> str:
    """Returns the address of a Service. The Service of a gateway has the status port first."""
    service = json.loads(kube.kubectl("get", "service", name, "-n", namespace, "-o", "json"))
    return f"{service['spec']['clusterIP']}:80"
