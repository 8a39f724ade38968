"""PID 1 of the node: makes the node's mounts and network, starts its components and reaps processes. When PID 1 is killed, the
kernel ends every process, mount and network device of the node."""

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from typing import Callable

import components
from machine import environment
from paths import ADMIN_KUBECONFIG, NODE_ADDRESS, NODE_NAME, NODE_ROUTER, ROOT, RUN

READY_SECONDS_MAX = 120
# The kubelet sets these sysctls for the whole machine, and ends if it cannot. `mounts` puts files with these values over /proc/sys, so the
# kubelet finds the wanted values and writes nothing.
SYSCTLS = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}
# Folders that `init.py` replaces, because the kubelet, containerd and the CNI library write into them.
REPLACED = ("/run", "/var/log", "/var/lib")


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def mounts() -> None:
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "proc", "proc", "/proc")
    (RUN / "sys").mkdir(parents=True, exist_ok=True)
    for name, value in SYSCTLS.items():
        file = RUN / "sys" / name.replace("/", "-")
        file.write_text(value + "\n")
        run("mount", "--bind", str(file), f"/proc/sys/{name}")
    for folder in ("registry", "kubelet", "containerd", "etcd", "opt"):
        (RUN / folder).mkdir(parents=True, exist_ok=True)
    # The kubelet mounts the volumes of pods below this folder, and containers must see these mounts.
    run("mount", "--bind", f"{RUN}/kubelet", f"{RUN}/kubelet")
    run("mount", "--make-rshared", f"{RUN}/kubelet")
    used = [ROOT, pathlib.Path(sys.executable).resolve(), pathlib.Path(os.__file__).resolve()]
    for folder in REPLACED:
        if not any(path.is_relative_to(folder) for path in used):
            run("mount", "-t", "tmpfs", "tmpfs", folder)
    pathlib.Path("/run/lock").mkdir(exist_ok=True)


def network() -> None:
    socket.sethostname(NODE_NAME)
    run("ip", "link", "set", "lo", "up")
    # Both ends of the link are inside the node, so that the node cannot reach the outside, and the outside cannot reach the node.
    run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "uplink")
    run("ip", "address", "add", f"{NODE_ADDRESS}/24", "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")
    run("ip", "link", "set", "uplink", "up")
    # The kubelet requires a default route.
    run("ip", "route", "add", "default", "via", NODE_ROUTER, "dev", "eth0")
    pathlib.Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def kubectl(*arguments: str) -> bool:
    command = [shutil.which("kubectl", path=environment()["PATH"]) or "kubectl", f"--kubeconfig={ADMIN_KUBECONFIG}", *arguments]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def wait_for(what: str, ready: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not ready():
        if time.monotonic() - began > READY_SECONDS_MAX:
            raise SystemExit(f"{what} is not ready after {READY_SECONDS_MAX} s; see the logs in target/cluster/log")
        time.sleep(0.2)


def main() -> None:
    began = time.monotonic()
    mounts()
    network()
    for name in ("etcd", "registry", "containerd", "kube-apiserver"):
        components.start(name)
    wait_for("the API server", lambda: kubectl("get", "--raw", "/readyz"))
    print(f"API server ready after {time.monotonic() - began:.1f} s", flush=True)
    for name in ("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "dns"):
        components.start(name)
    wait_for("the node", lambda: kubectl("wait", "--for=condition=Ready", f"node/{NODE_NAME}", "--timeout=1s"))
    wait_for("the default service account", lambda: kubectl("get", "serviceaccount", "default"))
    print(f"node ready after {time.monotonic() - began:.1f} s", flush=True)
    (RUN / "ready").touch()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(1)


if __name__ == "__main__":
    main()
