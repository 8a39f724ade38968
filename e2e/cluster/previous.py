"""The release before this tree: its source by its tag, its binaries and images, built once into target/previous."""

import os
import pathlib
import re
import subprocess
import sys

import images
import node
from paths import REGISTRY, ROOT, Skipped

FOLDER = ROOT / "target/previous"
SOURCE = FOLDER / "source"
LAYOUTS = FOLDER / "images"
CHART = SOURCE / "charts/switchpoint"
TAG = re.compile(r"^v(\d+)\.(\d+)\.(\d+)$")
BUILD_SECONDS_MAX = 3600


def newest(tags: list[str], version: str) -> str | None:
    """The newest tag of a release that is older than `version`."""
    released = {tuple(map(int, found.groups())): tag for tag in tags if (found := TAG.match(tag))}
    present = TAG.match(f"v{version}")
    limit = tuple(map(int, present.groups())) if present else (0,)
    return released[max(older)] if (older := [number for number in released if number < limit]) else None


def run(*command: object, folder: pathlib.Path = ROOT) -> str:
    words = [str(word) for word in command]
    # A target folder of the caller's is not for the other source.
    environment = {name: value for name, value in os.environ.items() if name != "CARGO_TARGET_DIR"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=BUILD_SECONDS_MAX, check=False)
    if done.returncode != 0:
        raise node.NodeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def tag(version: str) -> str:
    """Raises Skipped if there is none, as in a shallow clone."""
    found = newest(run("git", "tag", "--list", "v*").split(), version)
    if found is None:
        raise Skipped(f"no tag of a release before {version} (`git fetch --tags`)")
    return found


def check_out(wanted: str) -> None:
    """Makes SOURCE the work tree of the tag."""
    run("git", "worktree", "prune")
    if not SOURCE.exists():
        run("git", "worktree", "add", "--detach", SOURCE, wanted)
    elif run("git", "rev-parse", "HEAD", folder=SOURCE) != run("git", "rev-parse", f"{wanted}^{{commit}}"):
        run("git", "checkout", "--detach", wanted, folder=SOURCE)
    for name in (".tools", ".venv"):
        if not (SOURCE / name).exists():
            (SOURCE / name).symlink_to(ROOT / name)


def prepare(version: str) -> str:
    """Builds what is missing, pushes the images to the node's registry with the release's version as tag, and returns that version."""
    wanted = tag(version)
    check_out(wanted)
    stamp = FOLDER / f"{wanted}.ready"
    if not stamp.exists():
        run("make", "build", folder=SOURCE)
        run(sys.executable, SOURCE / "images/build.py", "--output", LAYOUTS)
        stamp.touch()
    for name in ("switchpointd", "switchpoint-gateway", "switchpoint"):
        images.crane("push", str(LAYOUTS / name), f"{REGISTRY}/{name}:{wanted.removeprefix('v')}")
    return wanted.removeprefix("v")
