#!/usr/bin/env python3
"""The steps of `.github/workflows/release.yaml`.

    .ci/release.py check TAG              TAG, Cargo.toml, the chart and CHANGELOG.md have one version
    .ci/release.py collect FOLDER HOST/PATH
                                          copies what is published there into FOLDER, with SHA256SUMS
    .ci/release.py publish FOLDER HOST/PATH
                                          pushes images and chart, and signs them; needs cosign in PATH
    .ci/release.py notes TAG              prints the section of CHANGELOG.md
    .ci/release.py bump VERSION           writes the next version into every place that has it, and the commit of the
                                          release before it into .ci/releases.toml

`collect` comes after `make images`. `publish` never replaces a tag by other content. Standard library only.
"""

import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib

import versions

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "deploy/images"))

import cross  # noqa: E402: the folder of what builds images
import layers  # noqa: E402
from debian import ARCHITECTURES  # noqa: E402

IMAGES = ROOT / "target" / "images"
# The images for tests, which a release does not publish.
NOT_PUBLISHED = ("switchpoint-model-server",)
# The measured results from which pages are printed. Their copy in a release stays when a new measurement replaces them.
RESULTS = "docs/data"
CHART = ROOT / "deploy/charts/switchpoint"
# The commit of each release, for tests in checkouts without tags.
RELEASES = ROOT / ".ci" / "releases.toml"
CRANE = ROOT / ".tools" / "bin" / "crane"
HELM = ROOT / ".tools" / "bin" / "helm"
# Options of `helm push`, with which tests use a registry without TLS.
HELM_OPTIONS = shlex.split(os.environ.get("HELM_PUSH_OPTIONS", ""))


class Mistake(Exception):
    """The reason why a release must stop."""


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, text=True, capture_output=True, check=False)
    if done.returncode:
        raise Mistake(f"{' '.join(map(str, command))}: {done.stderr.strip()[-2000:]}")
    return done.stdout.strip()


def version() -> str:
    return extract(r'(?m)^version = "([^"]+)"', (ROOT / "Cargo.toml").read_text(), "Cargo.toml has no version")


def extract(pattern: str, text: str, otherwise: str) -> str:
    found = re.search(pattern, text)
    if not found:
        raise Mistake(otherwise)
    return found[1]


def section(changelog: str, wanted: str) -> str:
    """Returns the text below the heading of a version, which must have a date."""
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


def is_released(changelog: str, wanted: str) -> bool:
    """Whether the version has a date in the changelog."""
    return re.search(rf"(?m)^## \[{re.escape(wanted)}\] - \d{{4}}-\d\d-\d\d$", changelog) is not None


def with_release(table: str, wanted: str, commit: str) -> str:
    """Returns the table of releases with a line for this one. Raises `Mistake` if the table names another commit."""
    recorded = tomllib.loads(table)["releases"].get(wanted)
    if recorded not in (None, commit):
        raise Mistake(f"releases.toml has {recorded} for {wanted}, but the tag v{wanted} is {commit}")
    return table if recorded else f'{table}"{wanted}" = "{commit}"\n'


def record(wanted: str) -> None:
    """Writes the commit of a version's tag into the table, if the version is released."""
    if is_released((ROOT / "CHANGELOG.md").read_text(), wanted):
        commit = run("git", "rev-parse", "--verify", f"refs/tags/v{wanted}^{{commit}}")
        RELEASES.write_text(with_release(RELEASES.read_text(), wanted, commit))


def bump(wanted: str) -> None:
    if not re.fullmatch(versions.NUMBER, wanted):
        raise Mistake(f"{wanted} is not a version such as 1.2.3")
    record(version())
    print(f"{versions.rewrite(ROOT, versions.tracked(ROOT), wanted)} places have version {wanted}")


def with_registry(values: str, registry: str) -> str:
    """Returns the chart's values, with the registry of the release as their default."""
    placeholder = "  registry: registry.example.com\n"
    if values.count(placeholder) != 1:
        raise Mistake(f"values.yaml has not one line {placeholder.strip()!r}")
    return values.replace(placeholder, f"  registry: {registry}\n")


def package_chart(folder: pathlib.Path, registry: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        chart = pathlib.Path(shutil.copytree(CHART, pathlib.Path(temporary) / CHART.name))
        values = chart / "values.yaml"
        values.write_text(with_registry(values.read_text(), registry))
        run(HELM, "package", chart, "--destination", folder)


def archive_results(folder: pathlib.Path) -> None:
    """Writes the measured results into one archive, whose bytes depend only on them."""
    name = f"switchpoint-data-{version()}"
    files = (ROOT / RESULTS).glob("*.json")
    with tempfile.TemporaryDirectory() as temporary:
        archive = layers.write([layers.Entry(f"/{name}/{file.name}", content=file) for file in files], pathlib.Path(temporary))
        shutil.copyfile(archive, folder / f"{name}.tar.gz")


def collect(folder: pathlib.Path, registry: str) -> None:
    """Copies the layouts of images and SBOMs into `images`, and what users download beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    listed = IMAGES / "images.json"
    if not listed.exists():
        raise Mistake(f"{listed} is missing: run make images first")
    images = [image for image in json.loads(listed.read_text()) if image["name"] not in NOT_PUBLISHED]
    for image in images:
        for layout in (image["name"], *(f"{manifest['name']}.sbom" for manifest in image["manifests"])):
            shutil.copytree(IMAGES / layout, folder / "images" / layout)
        for manifest in image["manifests"]:
            shutil.copy(IMAGES / f"{manifest['name']}.cdx.json", folder)
    (folder / "images.json").write_text(json.dumps(images, indent=1) + "\n")
    shutil.copy(ROOT / "target/wasm32-wasip1/release/switchpoint.wasm", folder / f"switchpoint-{version()}.wasm")
    for name, file in programs(images).items():
        shutil.copy(file, folder / name)
    archive_results(folder)
    package_chart(folder, registry)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")


def programs(images: list[dict]) -> dict[str, pathlib.Path]:
    """Maps the names under which users download the programs, one for each platform, to the files."""
    found = {}
    for platform in sorted({manifest["platform"] for image in images for manifest in image["manifests"]} - {""}):
        name = platform.removeprefix("linux/")
        built = "release" if name == cross.host() else f"{ARCHITECTURES[name].rust}/release"
        for program in ("switchpointd", "switchpoint-migrate"):
            found[f"{program}-{version()}-linux-{name}"] = ROOT / "target" / built / program
    return found


def publish(folder: pathlib.Path, registry: str) -> None:
    for image in json.loads((folder / "images.json").read_text()):
        name, tag, digest = image["repository"], image["tag"], image["digest"]
        reference = f"{registry}/{name}"
        unpublished(f"{reference}:{tag}", digest)
        run(CRANE, "push", folder / "images" / image["name"], f"{reference}:{tag}")
        sign(f"{reference}@{digest}")
        for manifest in image["manifests"]:
            # Pushes the SBOM without a tag, because registries list the SBOM as a referrer of the image's manifest.
            sbom = folder / "images" / f"{manifest['name']}.sbom"
            run(CRANE, "push", sbom, f"{reference}@{json.loads((sbom / 'index.json').read_text())['manifests'][0]['digest']}")
            statement = folder / f"{manifest['name']}.cdx.json"
            run("cosign", "attest", "--yes", "--type", "cyclonedx", "--predicate", statement, f"{reference}@{manifest['digest']}")
        print(f"published {reference}:{tag}@{digest}")
    chart = f"{registry}/charts/switchpoint"
    run(HELM, "push", folder / f"switchpoint-{version()}.tgz", f"oci://{registry}/charts", *HELM_OPTIONS)
    digest = run(CRANE, "digest", f"{chart}:{version()}")
    sign(f"{chart}@{digest}")
    print(f"published {chart}:{version()}@{digest}")


def unpublished(reference: str, digest: str) -> None:
    """Raises `Mistake` if the tag has other content. An interrupted release may run again."""
    found = subprocess.run([CRANE, "digest", reference], text=True, capture_output=True, check=False)
    if found.returncode == 0 and found.stdout.strip() != digest:
        raise Mistake(f"{reference} is published already, as {found.stdout.strip()} and not {digest}")


def sign(reference: str) -> None:
    """Signs an image, and each manifest of an index: Istio's agent pins a module by the digest of a manifest."""
    run("cosign", "sign", "--yes", "--recursive", reference)


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["check", tag]:
                check(tag, version(), (CHART / "Chart.yaml").read_text(), (ROOT / "CHANGELOG.md").read_text())
            case ["collect", folder, registry]:
                collect(pathlib.Path(folder).absolute(), registry)
            case ["publish", folder, registry]:
                publish(pathlib.Path(folder).absolute(), registry)
            case ["notes", tag]:
                print(section((ROOT / "CHANGELOG.md").read_text(), tag.removeprefix("v")))
            case ["bump", wanted]:
                bump(wanted)
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except Mistake as why:
        print(f"release: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
