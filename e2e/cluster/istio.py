"""Istio on the node: istiod, and its gateway chart, whose pods istiod's webhook completes with the agent and Envoy.

The proxy is the stock Envoy, because Istio's own build is not published for package registries. What only Istio's build has (its
metrics, the exchange of metadata and the ALPN filter) is switched off in VALUES."""

import json
import pathlib

import credentials
import images
import kube
import manifests
import release
from paths import BIN, REGISTRY, ROOT, RUN, TOOLS, Skipped

NAMESPACE = "istio-system"
GATEWAY = "istio-ingressgateway"
GATEWAY_LABELS = "istio=ingressgateway"
FILES = TOOLS / "istio"
CHARTS = FILES / "charts"
CONFIG = ROOT / "envoy-config/istio"
TAG = "1.31"
# The image name of the shipped files, and the one in the node's registry. The agent uses plain HTTP for a private address only.
SHIPPED_REGISTRY = "registry.example.com"
VALUES = {
    "global": {
        "hub": f"{REGISTRY}/istio",
        "tag": TAG,
        "proxy": {"resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"cpu": "2", "memory": "1Gi"}}, "readinessPeriodSeconds": 2},
    },
    "autoscaleEnabled": False,
    "resources": {"requests": {"cpu": "10m", "memory": "128Mi"}},
    "telemetry": {"enabled": False},
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
    images.push(images.Image(f"istio/proxyv2:{TAG}", [images.base(), {"/usr/local/bin/envoy": images.envoy()}, agent], "/usr/local/bin/pilot-agent"))


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


def install_gateway(*arguments: str) -> None:
    """Installs or upgrades the gateway with the shipped values. It does not wait: a pod is ready when the picker has state."""
    kube.helm(
        "upgrade", "--install", GATEWAY, str(CHARTS / "gateway"), "-n", NAMESPACE, "-f", str(CONFIG / "gateway-values.yaml"),
        "-f", str(write_values("gateway", GATEWAY_VALUES)), *arguments,
    )  # fmt: skip
    kube.apply(json.dumps(GATEWAY_OBJECT), NAMESPACE)


def remove_gateway() -> None:
    kube.helm("uninstall", GATEWAY, "-n", NAMESPACE, "--wait")


def install_daemon() -> None:
    """The shipped daemon with its certificates, the model servers in `default`, and the Service that the VirtualService names."""
    manifests.prepare()
    credentials.certificate("proxy", "state-ca", "DNS:proxy", "clientAuth")
    kube.apply(manifests.tls_secret("switchpoint-proxy-tls", "proxy", "state-ca"), NAMESPACE)
    service = {"selector": {"app": "llama"}, "ports": [{"name": "http", "port": 8000}]}
    kube.apply(json.dumps({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "model-servers"}, "spec": service}))
    kube.kubectl("apply", "-f", str(ROOT / "envoy-config/kubernetes/daemon.yaml"))
    kube.kubectl("apply", "-n", "default", "-f", str(ROOT / "envoy-config/kubernetes/rbac.yaml"))
    kube.rolled_out("model-servers", "default")
    kube.rolled_out("switchpointd", "switchpoint")


def shipped(name: str, image: str = "") -> str:
    """A file of `envoy-config/istio`, with the image in the node's registry, or with another image there."""
    own = f"switchpoint:{release.version()}"
    return (CONFIG / name).read_text().replace(f"{SHIPPED_REGISTRY}/{own}", f"{REGISTRY}/{image or own}")


def gateway_pod() -> dict:
    return kube.pods(NAMESPACE, GATEWAY_LABELS)[-1]


def gateway_request(path: str) -> str:
    """A request of the gateway's agent to its Envoy's admin interface."""
    return kube.kubectl("exec", "-n", NAMESPACE, gateway_pod()["metadata"]["name"], "--", "pilot-agent", "request", "GET", path)


def address() -> str:
    """The gateway's Service has the status port first."""
    service = json.loads(kube.kubectl("get", "service", GATEWAY, "-n", NAMESPACE, "-o", "json"))
    return f"{service['spec']['clusterIP']}:80"
