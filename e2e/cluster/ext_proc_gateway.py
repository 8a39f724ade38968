"""A gateway without the picker's module, as a gateway that reads InferencePools makes it: the gateway calls the Service of
`endpointPickerRef` by ext_proc and sends requests to the pods that the pool selects. The gateway's configuration is
`envoy-config/ext_proc.yaml`."""

import json
import re

import kube
from paths import ROOT

NAME = "ext-proc-gateway"
PODS = f"{NAME}-pods"
PORT = 8080
CLUSTER_DOMAIN = ".cluster.local"


def configuration(picker: str, picker_port: int, pods: str, pod_port: int) -> str:
    """Returns the shipped file, with the addresses of the cluster. The pods come from a headless Service in place of EDS."""
    text = (ROOT / "envoy-config/ext_proc.yaml").read_text()
    text = text.replace("address: 127.0.0.1, port_value: 8080", "address: 0.0.0.0, port_value: 8080")
    text = text.replace("address: 127.0.0.1, port_value: 9002", f"address: {picker}, port_value: {picker_port}")
    # Gateways name the pool by the Service in the authority, and send none of our metadata.
    text = text.replace("authority: switchpointd}", f'authority: "{picker.removesuffix(CLUSTER_DOMAIN)}:{picker_port}"}}')
    text = text.replace("                - {key: x-switchpoint-pool, value: default}\n", "")
    address = f"{{endpoint: {{address: {{socket_address: {{address: {pods}, port_value: {pod_port}}}}}}}}}"
    found = (
        "    type: STRICT_DNS\n    dns_refresh_rate: 1s\n"
        f"    load_assignment: {{cluster_name: inference-pool, endpoints: [{{lb_endpoints: [{address}]}}]}}\n"
    )
    text, count = re.subn(r"    type: EDS\n    eds_cluster_config:\n(?:      .*\n)+", found, text)
    assert count == 1, "ext_proc.yaml has another form"
    return text


def manifests(pool: dict) -> str:
    """Returns the gateway of an InferencePool, in the pool's namespace."""
    namespace, spec = pool["metadata"]["namespace"], pool["spec"]
    picker, port = spec["endpointPickerRef"]["name"], spec["targetPorts"][0]["number"]
    domain = f"{namespace}.svc{CLUSTER_DOMAIN}"
    text = configuration(f"{picker}.{domain}", spec["endpointPickerRef"]["port"]["number"], f"{PODS}.{domain}", port)
    container = {
        "name": "envoy",
        "image": "envoyproxy/envoy:v1.40.0",
        "args": ["-c", "/config/ext_proc.yaml", "--concurrency", "1"],
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "volumeMounts": [{"name": "config", "mountPath": "/config"}],
    }
    labels = {"app": NAME}
    items = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": {"ext_proc.yaml": text}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": NAME},
            "spec": {
                "selector": {"matchLabels": labels},
                "replicas": 1,
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {"containers": [container], "volumes": [{"name": "config", "configMap": {"name": NAME}}]},
                },
            },
        },
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME}, "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": PORT}]}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": PODS},
            "spec": {"clusterIP": "None", "selector": spec["selector"]["matchLabels"], "ports": [{"port": port}]},
        },
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def install(pool: str, namespace: str) -> None:
    found = json.loads(kube.kubectl("get", f"inferencepools.inference.networking.k8s.io/{pool}", "-n", namespace, "-o", "json"))
    kube.apply(manifests(found), namespace)
    kube.rolled_out(NAME, namespace)
