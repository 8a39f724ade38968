"""Folders, addresses and names that all parts of the test cluster share."""

import hashlib
import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent

TOOLS = ROOT / ".tools"
BIN = TOOLS / "bin"
# The folder of the unpacked Debian packages: runc, nft and the packages of test images.
DEB = TOOLS / "deb"
DEB_LIBRARIES = DEB / "usr/lib/x86_64-linux-gnu"
SCHEMAS = TOOLS / "schemas"

# The folder for everything that the node writes.
STATE = ROOT / "target/cluster"
ETC = STATE / "etc"
RUN = STATE / "run"
LOGS = STATE / "log"
WRAPPERS = STATE / "bin"
IMAGES = STATE / "images"

# The folder with the release binaries. SWITCHPOINT_TARGET names another folder if the binaries are built elsewhere.
TARGET = pathlib.Path(os.environ.get("SWITCHPOINT_TARGET", ROOT / "target")).resolve()

NODE_NAME = "node1"
NODE_ADDRESS = "10.199.0.2"
NODE_ROUTER = "10.199.0.1"
REGISTRY = f"{NODE_ADDRESS}:5000"
POD_RANGE = "10.244.0.0/16"
NODE_POD_RANGE = "10.244.0.0/24"
SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE_ADDRESS = "10.96.0.1"
# The registries in the image names of the project's manifests and of the conformance suite's manifests. containerd pulls all these images
# from REGISTRY.
IMAGE_HOSTS = ("registry.example.com", "docker.io", "gcr.io", "registry.k8s.io", REGISTRY)
# The parent of all cgroups of pods, in every hierarchy. Each checkout has a different parent, so that nodes of two checkouts can run at the
# same time.
CGROUP = f"switchpoint-e2e-{hashlib.sha256(str(STATE).encode()).hexdigest()[:8]}"
ADMIN_KUBECONFIG = ETC / "admin.conf"


class Skipped(Exception):
    """This machine cannot run the node. The message says why."""
