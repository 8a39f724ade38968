"""The processes of the node. `components.py start NAME`, run inside the node, starts one again."""

import os
import subprocess
import sys

from machine import environment
from paths import ADMIN_KUBECONFIG, ETC, HERE, LOGS, NODE_ADDRESS, NODE_NAME, POD_RANGE, REGISTRY, RUN, SERVICE_RANGE

ETCD_URL = "http://127.0.0.1:2379"
ETCD_PEER_URL = "http://127.0.0.1:2380"

COMMANDS: dict[str, list[str]] = {
    "etcd": [
        "etcd", f"--data-dir={RUN}/etcd", "--unsafe-no-fsync",
        f"--listen-client-urls={ETCD_URL}", f"--advertise-client-urls={ETCD_URL}",
        f"--listen-peer-urls={ETCD_PEER_URL}", f"--initial-advertise-peer-urls={ETCD_PEER_URL}", f"--initial-cluster=default={ETCD_PEER_URL}",
    ],
    "registry": ["crane", "registry", "serve", "--address", REGISTRY, "--disk", f"{RUN}/registry"],
    "containerd": ["containerd", "-c", f"{ETC}/containerd.toml"],
    "kube-apiserver": [
        "kube-apiserver", f"--etcd-servers={ETCD_URL}", "--secure-port=6443", "--bind-address=0.0.0.0", f"--advertise-address={NODE_ADDRESS}",
        f"--tls-cert-file={ETC}/apiserver.pem", f"--tls-private-key-file={ETC}/apiserver.key", f"--token-auth-file={ETC}/tokens.csv",
        "--authorization-mode=Node,RBAC", f"--service-account-key-file={ETC}/sa.pub", f"--service-account-signing-key-file={ETC}/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local", f"--service-cluster-ip-range={SERVICE_RANGE}",
        # Sets InternalIP, because `kubectl logs` would otherwise look up the node's name in DNS.
        "--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP", "--endpoint-reconciler-type=lease",
    ],
    "kube-controller-manager": [
        "kube-controller-manager", f"--kubeconfig={ETC}/kcm.conf", "--leader-elect=false", "--secure-port=0",
        f"--service-account-private-key-file={ETC}/sa.key", f"--root-ca-file={ETC}/ca.pem", f"--cluster-signing-cert-file={ETC}/ca.pem",
        f"--cluster-signing-key-file={ETC}/ca.key", "--allocate-node-cidrs=true", f"--cluster-cidr={POD_RANGE}",
        # Each controller has a separate user, because RBAC would forbid nearly everything to one common user.
        f"--service-cluster-ip-range={SERVICE_RANGE}", "--use-service-account-credentials=true",
    ],
    "kube-scheduler": ["kube-scheduler", f"--kubeconfig={ETC}/scheduler.conf", "--leader-elect=false", "--secure-port=0"],
    "kubelet": [
        "kubelet", f"--config={ETC}/kubelet.yaml", f"--kubeconfig={ETC}/kubelet.conf", f"--root-dir={RUN}/kubelet",
        f"--cert-dir={RUN}/kubelet/pki", f"--hostname-override={NODE_NAME}", f"--node-ip={NODE_ADDRESS}",
    ],
    "kube-proxy": ["kube-proxy", f"--config={ETC}/kube-proxy.yaml"],
    "dns": [sys.executable, str(HERE / "dns.py"), str(ADMIN_KUBECONFIG)],
}  # fmt: skip


def start(name: str) -> int:
    """Starts a component in the background and returns its process id, as the node's namespace counts."""
    with (LOGS / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            COMMANDS[name], env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=RUN, start_new_session=True
        )
    (RUN / f"{name}.pid").write_text(str(process.pid))
    return process.pid


def pid(name: str) -> int:
    return int((RUN / f"{name}.pid").read_text())


def stop(name: str, signal: int) -> None:
    os.kill(pid(name), signal)


if __name__ == "__main__":
    action, component, *rest = sys.argv[1:]
    if action == "start":
        start(component)
    else:
        stop(component, int(rest[0]))
