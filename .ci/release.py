#!/usr/bin/env python3
"""The steps of `.github/workflows/release.yaml`.

    .ci/release.py check TAG              TAG, Cargo.toml, the chart and CHANGELOG.md have one version
    .ci/release.py collect FOLDER         copies what is published into FOLDER, with SHA256SUMS
    .ci/release.py publish FOLDER HOST/PATH
                                          pushes images and chart, and signs them; needs cosign in PATH
    .ci/release.py notes TAG              prints the section of CHANGELOG.md

`collect` comes after `make images`. `publish` never replaces a tag: a version has one content. Standard library only.
"""

import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
IMAGES = ROOT / "target" / "images"
CHART = ROOT / "charts" / "switchpoint"
CRANE = ROOT / ".tools" / "bin" / "crane"
HELM = ROOT / ".tools" / "bin" / "helm"


class Mistake(Exception):
    """A release that must not go on."""


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise Mistake(f"{' '.join(map(str, command))} failed")
    return done.stdout.strip()


def version() -> str:
    return extract(r'(?m)^version = "([^"]+)"', (ROOT / "Cargo.toml").read_text(), "Cargo.toml has no version")


def extract(pattern: str, text: str, otherwise: str) -> str:
    found = re.search(pattern, text)
    if not found:
        raise Mistake(otherwise)
    return found[1]


def section(changelog: str, wanted: str) -> str:
    """The text below the heading of a version, which must have a date."""
    pattern = rf"(?ms)^## \[{re.escape(wanted)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)"
    return extract(pattern, changelog, f"CHANGELOG.md has no heading '## [{wanted}] - YEAR-MONTH-DAY'").strip()


def check(tag: str, cargo: str, chart: str, changelog: str) -> None:
    """Compares the versions.

    Raises `Mistake` at the first difference."""
    for name, found in [
        ("Cargo.toml", cargo),
        ("version of Chart.yaml", extract(r'(?m)^version: "?([^"\s]+)', chart, "Chart.yaml has no version")),
        ("appVersion of Chart.yaml", extract(r'(?m)^appVersion: "?([^"\s]+)', chart, "Chart.yaml has no appVersion")),
    ]:
        if tag != f"v{found}":
            raise Mistake(f"the tag is {tag}, but {name} is {found}")
    section(changelog, tag.removeprefix("v"))


def layouts(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folders with an OCI image layout."""
    return sorted(path.parent for path in folder.glob("*/oci-layout"))


def collect(folder: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = layouts(IMAGES)
    if not found:
        raise Mistake(f"{IMAGES} has no OCI image layouts: run make images first")
    for layout in found:
        shutil.copytree(layout, folder / "images" / layout.name)
    for sbom in sorted(IMAGES.glob("*.json")):
        shutil.copy(sbom, folder)
    shutil.copy(ROOT / "target/wasm32-wasip1/release/switchpoint.wasm", folder / f"switchpoint-{version()}.wasm")
    shutil.copy(ROOT / "target/release/switchpointd", folder / f"switchpointd-{version()}-linux-amd64")
    run(HELM, "package", CHART, "--destination", folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")


def publish(folder: pathlib.Path, registry: str) -> None:
    for layout in layouts(folder / "images"):
        name, tag = layout.name, version()
        if name.endswith("-artifact"):
            name, tag = name.removesuffix("-artifact"), f"{tag}-artifact"
        reference = f"{registry}/{name}"
        if subprocess.run([CRANE, "digest", f"{reference}:{tag}"], capture_output=True, check=False).returncode == 0:
            raise Mistake(f"{reference}:{tag} is published already")
        run(CRANE, "push", layout, f"{reference}:{tag}")
        signed = f"{reference}@{run(CRANE, 'digest', f'{reference}:{tag}')}"
        run("cosign", "sign", "--yes", signed)
        for sbom in folder.glob(f"{layout.name}.*.json"):
            kind = "cyclonedx" if "bomFormat" in json.loads(sbom.read_text()) else "spdxjson"
            run("cosign", "attest", "--yes", "--type", kind, "--predicate", sbom, signed)
        print(f"published {reference}:{tag} {signed}")
    run(HELM, "push", folder / f"switchpoint-{version()}.tgz", f"oci://{registry}/charts")
    chart = f"{registry}/charts/switchpoint"
    signed = f"{chart}@{run(CRANE, 'digest', f'{chart}:{version()}')}"
    run("cosign", "sign", "--yes", signed)
    print(f"published {chart}:{version()} {signed}")


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["check", tag]:
                check(tag, version(), (CHART / "Chart.yaml").read_text(), (ROOT / "CHANGELOG.md").read_text())
            case ["collect", folder]:
                collect(pathlib.Path(folder).absolute())
            case ["publish", folder, registry]:
                publish(pathlib.Path(folder).absolute(), registry)
            case ["notes", tag]:
                print(section((ROOT / "CHANGELOG.md").read_text(), tag.removeprefix("v")))
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except Mistake as why:
        print(f"release: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
