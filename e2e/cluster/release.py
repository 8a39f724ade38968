"""The chart, installed from the project's own images: two daemons with a Lease, two gateways, mutual TLS."""

import datetime
import json
import pathlib
import shutil
import subprocess
import sys
from typing import NamedTuple

import engines
import images
import kube
import node
from paths import REGISTRY, ROOT, RUN, TARGET, Skipped

CHART = ROOT / "deploy/charts/switchpoint"
LAYOUTS = ROOT / "target/images"
NAME = "switchpoint"
NAMESPACE = "switchpoint"
DAEMON = f"{NAME}-daemon"
GATEWAY = f"{NAME}-gateway"
DAEMON_LABELS = "app.kubernetes.io/name=switchpoint-daemon"
GATEWAY_LABELS = "app.kubernetes.io/name=switchpoint-gateway"
GATEWAY_METRICS_PORT = 9902
HELM_TIMEOUT = "180s"
# The exit code of deploy/images/build.py if a tool is unavailable.
IMAGES_UNAVAILABLE = 3
# The name of the release that picks by ext_proc, which must be in the namespace of its InferencePool.
EXT_PROC_NAME = "ext-proc"



class Daemons(NamedTuple):
    """The daemons of a release: the name of their Deployment and Lease, and the namespace of both."""

    name: str
    namespace: str

    def pods(self) -> list[dict]:
        return kube.pods(self.namespace, DAEMON_LABELS)

    def lease(self) -> dict:
        return json.loads(kube.kubectl("get", "lease", self.name, "-n", self.namespace, "-o", "json"))["spec"]

    def lease_holder(self) -> str:
        """Returns the name of the daemon that holds the Lease: its pod and a random suffix. Returns an empty text if no daemon holds the
        Lease."""
        return self.lease().get("holderIdentity") or ""

    def leader(self) -> str:
        """Returns the pod whose daemon holds the Lease."""
        holder = self.lease_holder()
        names = (pod["metadata"]["name"] for pod in self.pods())
        return next((name for name in names if holder.startswith(name)), "")

    def lease_acquired(self) -> float:
        """Returns the time when the present leader took the Lease, in seconds since 1970."""
        return datetime.datetime.fromisoformat(self.lease()["acquireTime"]).timestamp()


DAEMONS = Daemons(DAEMON, NAMESPACE)
EXT_PROC_DAEMONS = Daemons(f"{EXT_PROC_NAME}-daemon", engines.NAMESPACE)

VALUES = {
    "pools": [{"name": engines.NAME, "namespace": engines.NAMESPACE, "inferencePool": {"name": engines.NAME}}],
    "daemon": {"resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}}},
    "gateway": {
        "concurrency": 1,
        "maxHeapBytes": 512 * 1024 * 1024,
        "resources": {"requests": {"cpu": "10m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
    },
}


def build_images() -> None:
    """Builds the shipped images, unless they were built from the same files before."""
    binaries = {
        "--switchpointd": TARGET / "release/switchpointd",
        "--module": TARGET / "wasm32-wasip1/release/switchpoint.wasm",
        "--model-server": TARGET / "release/model-server",
    }
    sources = [*binaries.values(), *sorted((ROOT / "deploy/images").glob("*.py")), *sorted((ROOT / "envoy-config").glob("*.*"))]
    inputs = "\n".join(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in sources)
    stamp = LAYOUTS / "cluster-inputs.txt"
    if stamp.exists() and stamp.read_text() == inputs:
        return
    arguments = [text for option, file in binaries.items() for text in (option, str(file))]
    done = subprocess.run(
        [sys.executable, str(ROOT / "deploy/images/build.py"), "--output", str(LAYOUTS), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        kind = Skipped if done.returncode == IMAGES_UNAVAILABLE else node.NodeError
        raise kind(f"deploy/images/build.py ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    stamp.write_text(inputs)


def push_images() -> None:
    """Pushes the shipped images to the node's registry."""
    for layout in sorted(folder for folder in LAYOUTS.iterdir() if (folder / "index.json").exists()):
        if layout.name.endswith((".sbom", "-artifact")):
            continue
        images.crane("push", str(layout), f"{REGISTRY}/{layout.name}:{version()}")


def version() -> str:
    """Returns the version of the chart, which is the tag of its images."""
    rows = (CHART / "Chart.yaml").read_text().splitlines()
    return next(row.split(":")[1].strip() for row in rows if row.startswith("appVersion:"))


def package(chart_version: str, chart: pathlib.Path = CHART) -> pathlib.Path:
    """Returns a copy of the chart, in a folder with its version. helm follows no links out of the chart, so the copy contains the files
    instead of links."""
    folder = RUN / f"chart-{chart_version}"
    shutil.copytree(chart, folder, symlinks=False, dirs_exist_ok=True)
    return folder


def values_file() -> pathlib.Path:
    file = RUN / "values.json"
    file.write_text(json.dumps(VALUES))
    return file


def upgrade(chart: pathlib.Path, *arguments: str) -> None:
    """Installs or upgrades the release, and waits until it is ready."""
    kube.helm(
        "upgrade", "--install", NAME, str(chart), "-n", NAMESPACE, "--create-namespace", "-f", str(values_file()),
        "--wait", "--timeout", HELM_TIMEOUT, *arguments,
    )  # fmt: skip
    settled()


def settled() -> None:
    for name in (DAEMON, GATEWAY):
        kube.rolled_out(name, NAMESPACE)


def rollback(revision: int) -> None:
    kube.helm("rollback", NAME, str(revision), "-n", NAMESPACE, "--wait", "--timeout", HELM_TIMEOUT)
    settled()


def install_ext_proc(*arguments: str) -> None:
    """Installs a second release, for gateways that cannot load the module. Returns when both daemons can pick and one leads."""
    kube.helm(
        "upgrade", "--install", EXT_PROC_NAME, str(package(version())), "-n", engines.NAMESPACE, "-f", str(values_file()),
        "--set", "gateway.enabled=false", "--set", "extProc.enabled=true",
        "--set-json", 'networkPolicy.extProcGateways=[{"namespaceSelector": {}}]', "--wait", "--timeout", HELM_TIMEOUT, *arguments,
    )  # fmt: skip
    kube.wait_until("an ext_proc daemon leads", lambda: EXT_PROC_DAEMONS.leader() != "")


def restart_ext_proc() -> None:
    """Replaces the daemons of the ext_proc release, one after another."""
    kube.kubectl("rollout", "restart", f"deployment/{EXT_PROC_DAEMONS.name}", "-n", EXT_PROC_DAEMONS.namespace)
    kube.rolled_out(EXT_PROC_DAEMONS.name, EXT_PROC_DAEMONS.namespace)


def address() -> str:
    return kube.service_address(GATEWAY, NAMESPACE)


def restart(name: str) -> None:
    kube.kubectl("rollout", "restart", f"deployment/{name}", "-n", NAMESPACE)
    kube.rolled_out(name, NAMESPACE)


def version_pairs() -> set[tuple[str, str]]:
    """Returns the image tags of the leading daemon and of each ready gateway: a gateway has its state from the leader."""
    holder = DAEMONS.leader()
    daemons = [tag_of(pod) for pod in DAEMONS.pods() if pod["metadata"]["name"] == holder]
    gateways = {tag_of(pod) for pod in kube.pods(NAMESPACE, GATEWAY_LABELS) if kube.is_ready(pod)}
    return {(daemon, gateway) for daemon in daemons for gateway in gateways}


def tag_of(pod: dict) -> str:
    return pod["spec"]["containers"][0]["image"].rpartition(":")[2]

