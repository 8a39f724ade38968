"""Finds the processes of containers, as the node's namespace counts them, and signals them."""

import json
import signal
import sys

import kube
import node
from paths import HERE

SOCKET = "/run/containerd/containerd.sock"


def container_pid(pod: str, namespace: str) -> int:
    """Returns the process of the pod's first container."""
    found = json.loads(kube.kubectl("get", "pod", pod, "-n", namespace, "-o", "json"))
    container = found["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    rows = node.run("ctr", "-a", SOCKET, "-n", "k8s.io", "tasks", "list").splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith(container))


def kill(pid: int, number: signal.Signals) -> None:
    node.run("sh", "-c", f"kill -{int(number)} {pid}")


def kill_by_oom(pid: int) -> None:
    """Kills the container by the kernel's OOM killer. The kernel may end the hog as well, so the hog's status does not matter."""
    node.run(sys.executable, str(HERE / "hog.py"), str(pid), check=False)
