"""Short calls of kubectl and helm inside the node."""

import json
import time
from typing import Callable

import node

WAIT_SECONDS_MAX = 180


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    return node.run("kubectl", *arguments, stdin=stdin)


def helm(*arguments: str) -> str:
    return node.run("helm", *arguments)


def get(kind: str, namespace: str, selector: str = "") -> list[dict]:
    chosen = ["-l", selector] if selector else []
    return json.loads(kubectl("get", kind, "-n", namespace, "-o", "json", *chosen))["items"]


def apply(text: str, namespace: str = "default") -> None:
    """Applies manifests. Applies on the server, because a client-side apply stores the manifests in an annotation, which is too small
    for large CRDs."""
    kubectl("apply", "--server-side", "--force-conflicts", "-n", namespace, "-f", "-", stdin=text)


def wait_until(what: str, condition: Callable[[], bool], seconds_max: float = WAIT_SECONDS_MAX) -> float:
    """Waits until the condition holds; returns the seconds. Errors of the API server count as "not yet"."""
    began = time.monotonic()
    while True:
        try:
            if condition():
                return time.monotonic() - began
        except node.NodeError:
            pass
        if time.monotonic() - began > seconds_max:
            raise node.NodeError(f"{what}: not within {seconds_max:.0f} s")
        time.sleep(0.3)


def rolled_out(name: str, namespace: str) -> None:
    """Waits until the new pods of a Deployment are available and the old ones are gone."""
    kubectl("rollout", "status", f"deployment/{name}", "-n", namespace, f"--timeout={WAIT_SECONDS_MAX}s")
    wait_until(f"the old pods of {name} end", lambda: not ending(name, namespace))


def ending(name: str, namespace: str) -> list[str]:
    """Returns the pods of a Deployment that are being deleted, and those of old revisions."""
    deployment = json.loads(kubectl("get", "deployment", name, "-n", namespace, "-o", "json"))
    found = pods(namespace, selector(deployment))
    if len(found) > deployment["spec"]["replicas"]:
        return [pod["metadata"]["name"] for pod in found]
    return [pod["metadata"]["name"] for pod in found if "deletionTimestamp" in pod["metadata"]]


def selector(deployment: dict) -> str:
    return ",".join(f"{name}={value}" for name, value in deployment["spec"]["selector"]["matchLabels"].items())


def pods(namespace: str, labels: str) -> list[dict]:
    return get("pods", namespace, labels)


def is_ready(pod: dict) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def containers(found: list[dict]) -> dict[str, tuple[str, int]]:
    """Returns the container id and the number of restarts of each container, by pod and name."""
    return {
        f"{pod['metadata']['name']}/{status['name']}": (status.get("containerID", ""), status["restartCount"])
        for pod in found
        for status in pod["status"].get("containerStatuses", [])
    }


def service_address(name: str, namespace: str) -> str:
    service = json.loads(kubectl("get", "service", name, "-n", namespace, "-o", "json"))
    return f"{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"
