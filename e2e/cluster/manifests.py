"""Applies every manifest of `envoy-config/` as it is, and waits until what can run here runs and answers."""

import base64
import json

import chat
import credentials
import engines
import ext_proc_gateway
import kube
from paths import ETC, NODE_NAME, ROOT, SCHEMAS, Skipped

ENVOY_CONFIG = ROOT / "envoy-config"
NAMESPACES = ("switchpoint", "inference", "istio-system", "envoy-gateway-system")
# The files that are no manifests: Envoy's configurations, and the values of another project's chart.
NOT_MANIFESTS = {"standalone.yaml", "ext_proc.yaml", "h2c.yaml", "mtls.yaml", "tracing.yaml", "gateway-values.yaml"}
GPUS = 8
# The files that need another namespace than the namespace in the file.
TARGETS = {"rbac.yaml": "default", "bootstrap.yaml": "istio-system", "envoyfilter.yaml": "istio-system", "wasmplugin.yaml": "istio-system"}


def install_schemas() -> None:
    """Installs the published CRDs of the Gateway API, the Inference Extension, Istio and Envoy Gateway."""
    files = sorted(file for file in SCHEMAS.glob("*.yaml") if "_vap_" not in file.name)
    if not files:
        raise Skipped("no published schemas in .tools/schemas (.ci/cluster_tools.py schemas)")
    for file in files:
        kube.apply(file.read_text())
    kube.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")


def namespace(name: str) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})


def tls_secret(name: str, stem: str, ca: str) -> str:
    """Returns a Secret with the certificate STEM.pem of the authority CA.pem."""
    files = {"tls.crt": f"{stem}.pem", "tls.key": f"{stem}.key", "ca.crt": f"{ca}.pem"}
    data = {key: base64.b64encode((ETC / file).read_bytes()).decode() for key, file in files.items()}
    return json.dumps({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data})


def config_map(name: str, files: dict[str, str]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": files})


def prepare() -> None:
    """Creates what the manifests' comments require: namespaces, certificates, ConfigMaps, model servers, GPUs."""
    for name in NAMESPACES:
        kube.apply(namespace(name))
    credentials.authority("state-ca", "switchpoint")
    credentials.certificate("daemon", "state-ca", "DNS:switchpointd.switchpoint.svc.cluster.local", "serverAuth")
    kube.apply(tls_secret("switchpointd-tls", "daemon", "state-ca"), "switchpoint")
    # Makes the two edits that sidecar.yaml describes.
    standalone = (ENVOY_CONFIG / "standalone.yaml").read_text().replace("address: 127.0.0.1, port_value: 8080", "address: 0.0.0.0, port_value: 8080")
    kube.apply(config_map("envoy", {"standalone.yaml": standalone, "start.sh": (ENVOY_CONFIG / "start.sh").read_text()}), "switchpoint")
    pool = json.loads(engines.manifests())
    for item in pool["items"]:
        item["metadata"]["name"] = {"Deployment": "model-servers", "InferencePool": "inference"}[item["kind"]]
    kube.apply(json.dumps(pool), "default")
    gpus = json.dumps({"status": {"capacity": {"nvidia.com/gpu": str(GPUS)}}})
    kube.kubectl("patch", "node", NODE_NAME, "--subresource=status", "--type=merge", "-p", gpus)


def files() -> list[str]:
    """Returns every manifest, in an order in which namespaces come first."""
    found = [file for file in sorted(ENVOY_CONFIG.rglob("*.yaml")) if file.name not in NOT_MANIFESTS]
    return [str(file) for file in sorted(found, key=lambda file: file.name not in ("daemon.yaml", "inference-pool.yaml"))]


def apply_all() -> int:
    """Applies the files and returns their number. Validation is strict: an unknown field fails."""
    for file in files():
        namespace_arguments = ["-n", TARGETS[file.rpartition("/")[2]]] if file.rpartition("/")[2] in TARGETS else []
        kube.kubectl("apply", "--validate=strict", *namespace_arguments, "-f", file)
    return len(files())


def run() -> str:
    """Applies all manifests, and waits until what can run here answers. Returns a text on what ran."""
    prepare()
    number = apply_all()
    for name, where in (("model-servers", "default"), ("switchpointd", "switchpoint"), ("inference-gateway", "switchpoint"), ("switchpointd", "inference"), ("llama", "inference")):
        kube.rolled_out(name, where)
    filtered = chat.until_answered(kube.service_address("inference-gateway", "switchpoint"))
    ext_proc_gateway.install("llama", "inference")
    external = chat.until_answered(kube.service_address(ext_proc_gateway.NAME, "inference"))
    return f"{number} files applied; chats answered by the filter ({filtered['served_by']}) and by ext_proc through an InferencePool ({external['served_by']})"


def remove() -> None:
    for file in reversed(files()):
        kube.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", file)
    kube.kubectl("delete", "deployment,inferencepool", "--all", "-n", "default", "--wait=false")
    for name in NAMESPACES:
        kube.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")
    kube.wait_until("the manifests' namespaces end", lambda: not any(name in kube.kubectl("get", "namespaces", "-o", "name") for name in NAMESPACES))
