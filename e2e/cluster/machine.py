"""What the machine must provide, and Debian packages for what Go modules do not provide."""

import ctypes
import os
import pathlib
import shutil
import subprocess

from paths import BIN, DEB, DEB_LIBRARIES, TARGET, WRAPPERS, Skipped

BINARIES = (
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl",
    "containerd", "containerd-shim-runc-v2", "ctr", "ptp", "loopback", "host-local", "portmap", "crane", "helm",
)  # fmt: skip
COMMANDS = ("unshare", "nsenter", "ip", "mount", "openssl", "tar", "cc")
# The Debian packages of runc and nft, with their libraries; the other packages are for images.
PACKAGES = (
    "runc", "libseccomp2", "nftables", "libnftables1", "libnftnl11", "libmnl0", "libjansson4", "libxtables12",
    "libc6", "libgcc-s1", "ca-certificates", "busybox-static", "bash-static",
)  # fmt: skip
PR_SET_PDEATHSIG = 1


def check() -> None:
    """Raises Skipped if the node cannot run here."""
    if os.geteuid() != 0:
        raise Skipped("the node needs root: it mounts, and makes network devices, inside its own namespaces")
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        raise Skipped(f"not installed: {', '.join(missing)}")
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--uts", "--fork", "--kill-child", "sh", "-c", "mount -t tmpfs tmpfs /run && ip link add probe0 type veth peer name probe1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if tried.returncode != 0:
        raise Skipped(f"the kernel refuses namespaces, mounts or veth devices: {tried.stderr.strip()}")
    missing = [name for name in BINARIES if not (BIN / name).exists()]
    if missing:
        raise Skipped(f"not built into .tools/bin: {', '.join(missing)} (.ci/cluster_tools.py etcd kube-apiserver kube-controller-manager node containerd cni helm crane)")


def check_builds() -> None:
    """Raises Skipped if the project's own release binaries are missing."""
    needed = ["release/switchpointd", "release/model-server", "wasm32-wasip1/release/switchpoint.wasm"]
    missing = [name for name in needed if not (TARGET / name).exists()]
    if missing:
        raise Skipped(f"not built in {TARGET}: {', '.join(missing)} (make release)")


def unpack_packages() -> None:
    """Downloads Debian packages with apt-get and unpacks them into .tools/deb. It installs nothing."""
    stamp = DEB / ".ready-1"
    if not stamp.exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise Skipped("no apt-get and dpkg-deb: runc, nft and the base of the test images come from Debian packages")
        archives = DEB / "archives"
        shutil.rmtree(DEB, ignore_errors=True)
        archives.mkdir(parents=True)
        done = subprocess.run(["apt-get", "download", *PACKAGES], cwd=archives, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Skipped(f"apt-get download failed (run `apt-get update`?): {done.stderr.strip()[-500:]}")
        for archive in archives.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(archive), str(DEB)], check=True)
        stamp.touch()
    for name in ("runc", "nft"):
        wrap(name)


def wrap(name: str) -> None:
    """Writes a script that starts an unpacked program with the libraries beside it."""
    WRAPPERS.mkdir(parents=True, exist_ok=True)
    script = WRAPPERS / name
    script.write_text(
        f"#!/bin/sh\nexport LD_LIBRARY_PATH={DEB_LIBRARIES}:{DEB}/lib/x86_64-linux-gnu XTABLES_LIBDIR={DEB_LIBRARIES}/xtables\n"
        f'exec {DEB}/usr/sbin/{name} "$@"\n'
    )
    script.chmod(0o755)


def environment() -> dict[str, str]:
    """Returns the environment of every process in the node."""
    path = f"{WRAPPERS}:{BIN}:{os.environ.get('PATH', '/usr/sbin:/usr/bin:/sbin:/bin')}"
    return os.environ | {"PATH": path}


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends, however the parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)


def controllers() -> list[pathlib.Path]:
    """Returns the roots of the mounted cgroup hierarchies."""
    rows = [row.split() for row in pathlib.Path("/proc/self/mounts").read_text().splitlines()]
    return [pathlib.Path(row[1]) for row in rows if row[2] in ("cgroup", "cgroup2")]
