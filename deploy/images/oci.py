"""Writes OCI image layouts of artifacts: the module as Istio's raw form, and SBOMs that refer to an image.

crane builds images, but it has no command for artifacts. crane pushes these layouts as it pushes layouts of images.
"""

import hashlib
import json
import pathlib
import shutil
from typing import Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
EMPTY_CONFIG = "application/vnd.oci.empty.v1+json"
GZIP_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
# The raw form of a module: https://github.com/solo-io/wasm/blob/master/spec/spec.md
WASM_CONFIG_LAYER = "application/vnd.module.wasm.config.v1+json"
WASM_LAYER = "application/vnd.module.wasm.content.layer.v1+wasm"
CYCLONEDX = "application/vnd.cyclonedx+json"
TITLE = "org.opencontainers.image.title"

Json = dict[str, Any]


def compact(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Layout:
    """An OCI image layout with one manifest, or with one index of manifests."""

    def __init__(self, folder: pathlib.Path):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "blobs/sha256").mkdir(parents=True)
        self.folder = folder

    def add(self, data: bytes, media_type: str, title: str = "") -> Json:
        """Writes a blob and returns its descriptor."""
        digest = digest_of(data)
        (self.folder / "blobs" / digest.replace(":", "/")).write_bytes(data)
        annotations = {"annotations": {TITLE: title}} if title else {}
        return {"mediaType": media_type, "digest": digest, "size": len(data)} | annotations

    def finish(self, manifest: Json) -> str:
        """Writes the manifest, or the index of manifests, as the layout's only one. Returns its digest."""
        descriptor = self.add(compact(manifest), manifest["mediaType"])
        (self.folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        (self.folder / "index.json").write_bytes(compact({"schemaVersion": 2, "manifests": [descriptor]}))
        return descriptor["digest"]


def descriptor(folder: pathlib.Path) -> Json:
    """Returns the descriptor of the only manifest of a layout, without annotations."""
    manifests = json.loads((folder / "index.json").read_bytes())["manifests"]
    if len(manifests) != 1:
        raise ValueError(f"{folder} has {len(manifests)} manifests")
    return {key: manifests[0][key] for key in ("mediaType", "digest", "size")}


def blob(folder: pathlib.Path, digest: str) -> bytes:
    return (folder / "blobs" / digest.replace(":", "/")).read_bytes()


def manifest_of(folder: pathlib.Path, digest: str = "") -> Json:
    """Returns the manifest with this digest, or the only manifest of the layout."""
    return json.loads(blob(folder, digest or descriptor(folder)["digest"]))


def manifests(folder: pathlib.Path) -> list[Json]:
    """Returns the descriptors of a layout's manifests: the manifests that the index of platforms lists, or the only manifest."""
    only = descriptor(folder)
    return manifest_of(folder)["manifests"] if only["mediaType"] == INDEX else [only]


def join(folder: pathlib.Path, layouts: dict[str, pathlib.Path], annotations: dict[str, str]) -> None:
    """Makes one image of the layouts of several platforms, such as `linux/arm64`, and removes these layouts. Nodes choose by the index;
    layers that platforms share are stored once. The layout of a single platform stays as it is."""
    if len(layouts) == 1:
        shutil.rmtree(folder, ignore_errors=True)
        next(iter(layouts.values())).rename(folder)
        return
    joined, listed = Layout(folder), []
    for platform, layout in layouts.items():
        system, architecture = platform.split("/")
        listed.append(descriptor(layout) | {"platform": {"os": system, "architecture": architecture}})
        for file in (layout / "blobs/sha256").iterdir():
            file.rename(folder / "blobs/sha256" / file.name)
        shutil.rmtree(layout)
    joined.finish({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed, "annotations": annotations})


def write_module(folder: pathlib.Path, module: bytes, annotations: dict[str, str]) -> str:
    """Writes the module as an artifact of two layers, its runtime configuration and the raw module. Returns the digest."""
    layout = Layout(folder)
    runtime = {"type": "envoy_proxy", "abiVersions": ["v0.2.1"], "config": {"rootIds": []}}
    return layout.finish(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": WASM_LAYER,
            "config": layout.add(b"{}", EMPTY_CONFIG),
            "layers": [
                layout.add(compact(runtime), WASM_CONFIG_LAYER, "runtime-config.json"),
                layout.add(module, WASM_LAYER, "plugin.wasm"),
            ],
            "annotations": annotations,
        }
    )


def write_sbom(folder: pathlib.Path, sbom: bytes, name: str, subject: Json) -> str:
    """Writes an SBOM that refers to the image `subject`, so registries list it as the image's referrer. Returns the digest."""
    layout = Layout(folder)
    return layout.finish(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": CYCLONEDX,
            "config": layout.add(b"{}", EMPTY_CONFIG),
            "layers": [layout.add(sbom, CYCLONEDX, f"{name}.cdx.json")],
            "subject": subject,
        }
    )
