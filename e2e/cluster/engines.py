"""The simulated model servers: a Deployment of vLLM-like pods, and an InferencePool that selects them."""

import json

import kube

NAMESPACE = "serving"
NAME = "llama"
SELECTOR = f"app={NAME}"
REPLICAS = 3
# The pause before SIGTERM, which is longer than the longest stream, so that no stream runs at SIGTERM.
PRE_STOP_SECONDS = 22
# Engine steps take a twentieth of the measured time, and the writes of a stream come 250 ms apart.
ARGUMENTS = ["--listen=$(POD_IP):8000", "--speed=20", "--chunk-delay-ms=250"]


def manifests() -> str:
    container = {
        "name": "vllm",
        "image": "registry.example.com/model-server:0.2.0",
        "args": ARGUMENTS,
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
        # The pod leaves the pool immediately, and the engine continues to serve until its streams have ended.
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}},
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME},
        "spec": {
            "replicas": REPLICAS,
            "selector": {"matchLabels": {"app": NAME}},
            "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": {"labels": {"app": NAME}},
                "spec": {"terminationGracePeriodSeconds": PRE_STOP_SECONDS + 30, "containers": [container]},
            },
        },
    }
    pool = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": NAME},
        "spec": {
            "selector": {"matchLabels": {"app": NAME}},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"name": "ext-proc-picker-llama", "port": {"number": 9002}, "failureMode": "FailClose"},
        },
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [deployment, pool]})


def install() -> None:
    kube.apply(json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}))
    kube.apply(manifests(), NAMESPACE)
    kube.rolled_out(NAME, NAMESPACE)


def restart() -> None:
    kube.kubectl("rollout", "restart", f"deployment/{NAME}", "-n", NAMESPACE)
    kube.rolled_out(NAME, NAMESPACE)


def scale(replicas: int) -> None:
    kube.kubectl("scale", f"deployment/{NAME}", "-n", NAMESPACE, f"--replicas={replicas}")
    kube.rolled_out(NAME, NAMESPACE)


def pods() -> list[dict]:
    return kube.pods(NAMESPACE, SELECTOR)
