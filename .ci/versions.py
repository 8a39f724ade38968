"""The places that have the version of the workspace, and a way to change all of these places together.

Dates, records of past runs and statements about a named release (`in 0.1.0`) are not among these places, and stay unchanged.
"""

import pathlib
import re
import subprocess
from typing import NamedTuple

# Suffixes of image tags such as `-artifact` are not part of the version.
NUMBER = r"\d+\.\d+\.\d+"
# Files that are not checked: tests of this folder have other versions, and the changelog has the versions of past releases.
EXCLUDED = re.compile(r"^(\.ci/test_|CHANGELOG\.md$)")


class Rule(NamedTuple):
    """Files whose path matches `files`, and the text around a version in them: `before` and `after` are regular expressions."""

    files: str
    before: str
    after: str = r"(?![\w.])"


LOCKED = r'\[\[package\]\]\nname = "[\w-]+"\nversion = "'
RULES = (
    Rule(r"^Cargo\.toml$", r'\[workspace\.package\]\nversion = "', '"'),
    # Packages of the workspace have no source; the crates that only build tools have version 0.0.0.
    Rule(r"(^|/)Cargo\.lock$", LOCKED + r"(?!0\.0\.0\")", r'"\n(?!source)'),
    Rule(r"^deploy/charts/switchpoint/Chart\.yaml$", r"(?m:^)(?:v|appV)ersion: ", r"\n"),
    Rule(r"^deploy/charts/tests/golden/", r"(?:helm\.sh/chart: switchpoint-|app\.kubernetes\.io/version: \"?)"),
    Rule(r"\.(md|yaml|py|rs|sh)$", r"\b(?:switchpoint(?:d|-\w+)?|model-server):", r"(?!\d)"),
    Rule(r"^deploy/images/README\.md$", r"(?<=[` ])", r"(?=-(?:artifact|amd64|arm64)\b)"),
)


class Place(NamedTuple):
    """A version in a file: its path and the positions of its first character and behind its last."""

    path: str
    begin: int
    end: int
    found: str


def tracked(root: pathlib.Path) -> list[str]:
    """Returns the paths of the repository's files, without links."""
    rows = subprocess.run(["git", "ls-files", "--stage"], cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    return [row.split("\t")[1] for row in rows if row.startswith("100")]


def places_in(path: str, text: str) -> list[Place]:
    """Returns the versions of a file, in order."""
    found = {}
    for rule in RULES:
        if not re.search(rule.files, path):
            continue
        for match in re.finditer(f"{rule.before}({NUMBER}){rule.after}", text):
            found[match.start(1)] = Place(path, match.start(1), match.end(1), match[1])
    return [found[begin] for begin in sorted(found)]


def places(root: pathlib.Path, paths: list[str]) -> list[Place]:
    found = []
    for path in paths:
        if not EXCLUDED.search(path) and any(re.search(rule.files, path) for rule in RULES):
            found += places_in(path, (root / path).read_text())
    return found


def rewrite(root: pathlib.Path, paths: list[str], version: str) -> int:
    """Writes the version into all places, and its heading into the changelog. Returns the number of places."""
    found = places(root, paths)
    for path in dict.fromkeys(place.path for place in found):
        text = (root / path).read_text()
        for place in reversed([place for place in found if place.path == path]):
            text = text[: place.begin] + version + text[place.end :]
        (root / path).write_text(text)
    changelog = root / "CHANGELOG.md"
    changelog.write_text(with_heading(changelog.read_text(), version))
    return len(found)


def with_heading(changelog: str, version: str) -> str:
    """Returns the changelog with a heading for the version, below `Unreleased`."""
    if f"## [{version}]" in changelog:
        return changelog
    return changelog.replace("## [Unreleased]\n", f"## [Unreleased]\n\n## [{version}] - unreleased\n", 1)
