"""The release before this tree: its source by its tag or by `.ci/releases.toml`, its binaries and images, built once into
target/previous."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable

import images
import node
from paths import REGISTRY, ROOT, Skipped

FOLDER = ROOT / "target/previous"
SOURCE = FOLDER / "source"
LAYOUTS = FOLDER / "images"
CHART = SOURCE / "deploy/charts/switchpoint"
# The commit of each release, for checkouts without tags.
RELEASES = ROOT / ".ci/releases.toml"
TAG = re.compile(r"^v(\d+)\.(\d+)\.(\d+)$")
BUILD_SECONDS_MAX = 3600


def revisions(tags: list[str], table: str) -> dict[str, str]:
    """Returns the revision of each release by its tag's name: the tag, or the commit of the table where the tag is absent."""
    recorded = tomllib.loads(table)["releases"]
    return {f"v{version}": commit for version, commit in recorded.items()} | {tag: f"refs/tags/{tag}" for tag in tags}


def newest(tags: Iterable[str], version: str) -> str | None:
    """Returns the newest tag of a release that is older than `version`."""
    released = {tuple(map(int, found.groups())): tag for tag in tags if (found := TAG.match(tag))}
    present = TAG.match(f"v{version}")
    limit = tuple(map(int, present.groups())) if present else (0,)
    return released[max(older)] if (older := [number for number in released if number < limit]) else None


def run(*command: object, folder: pathlib.Path = ROOT) -> str:
    words = [str(word) for word in command]
    # The build of the other source must not write into a target folder that the caller set.
    environment = {name: value for name, value in os.environ.items() if name != "CARGO_TARGET_DIR"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=BUILD_SECONDS_MAX, check=False)
    if done.returncode != 0:
        raise node.NodeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def find(version: str) -> tuple[str, str]:
    """Returns the tag's name and the commit of the release before `version`. Raises Skipped if there is none, or if a shallow clone
    lacks it."""
    known = revisions(run("git", "tag", "--list", "v*").split(), RELEASES.read_text())
    found = newest(known, version)
    if found is None:
        raise Skipped(f"no release before {version}: neither a tag nor a line in {RELEASES.relative_to(ROOT)}")
    try:
        return found, run("git", "rev-parse", "--verify", "--quiet", f"{known[found]}^{{commit}}").strip()
    except node.NodeError as error:
        raise Skipped(f"this clone lacks the commit of {found} (`git fetch --unshallow`)") from error


def check_out(commit: str) -> None:
    """Makes SOURCE the work tree of the commit."""
    run("git", "worktree", "prune")
    if not SOURCE.exists():
        run("git", "worktree", "add", "--detach", SOURCE, commit)
    elif run("git", "rev-parse", "HEAD", folder=SOURCE).strip() != commit:
        run("git", "checkout", "--detach", commit, folder=SOURCE)
    for name in (".tools", ".venv"):
        if not (SOURCE / name).exists():
            (SOURCE / name).symlink_to(ROOT / name)


def prepare(version: str) -> str:
    """Builds what is missing, pushes the images to the node's registry with the release's version as tag, and returns that version."""
    wanted, commit = find(version)
    check_out(commit)
    stamp = FOLDER / f"{wanted}.ready"
    if not stamp.exists():
        run("make", "build", folder=SOURCE)
        run(sys.executable, SOURCE / "deploy/images/build.py", "--output", LAYOUTS)
        stamp.touch()
    for name in ("switchpointd", "switchpoint-gateway", "switchpoint"):
        images.crane("push", str(LAYOUTS / name), f"{REGISTRY}/{name}:{wanted.removeprefix('v')}")
    return wanted.removeprefix("v")
