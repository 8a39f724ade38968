"""The images: what is in each, how it starts, and which packages and crates its SBOM names."""

import pathlib
from typing import NamedTuple

import debian
from debian import Architecture, Package
from layers import Entry

MODULE_TARGET = "wasm32-wasip1"


class Image(NamedTuple):
    """`layers`: names of `contents`, first to last. `crates`: workspace members whose dependencies the SBOM lists, with their
    target; "" stands for the architecture's."""

    name: str
    description: str
    layers: tuple[str, ...]
    entrypoint: tuple[str, ...]
    packages: tuple[str, ...]
    crates: tuple[tuple[str, str], ...]
    cmd: tuple[str, ...] = ()
    workdir: str = ""
    envoy: bool = False


class Inputs(NamedTuple):
    """The built files that go into images. `model_server` and `envoy_licence` are None if they are not there."""

    switchpointd: pathlib.Path
    migrate: pathlib.Path
    module: pathlib.Path
    native: pathlib.Path
    envoy: pathlib.Path
    envoy_version: str
    envoy_licence: pathlib.Path | None
    model_server: pathlib.Path | None


IMAGES = (
    Image(
        "switchpointd",
        "Finds LLM endpoints, scrapes them and publishes their state to proxies",
        ("base", "switchpointd", "migrate"),
        ("/usr/local/bin/switchpointd",),
        debian.BASE_PACKAGES,
        (("control-plane", ""), ("migrate", "")),
    ),
    # All layers are layers of switchpointd, so a node that has the image `switchpointd` downloads nothing for this image.
    Image(
        "switchpoint-worker",
        "Registers the model server of the same pod, and publishes its metadata",
        ("base", "switchpointd"),
        ("/usr/local/bin/switchpointd", "register"),
        debian.BASE_PACKAGES,
        (("control-plane", ""),),
    ),
    Image(
        "switchpoint-gateway",
        "Envoy with the picker inside",
        ("base", "shell", "envoy", "gateway", "native"),
        ("/usr/local/bin/start.sh",),
        debian.PACKAGES,
        (("filter", MODULE_TARGET), ("filter-native", "")),
        cmd=("-c", "envoy-config/standalone.yaml"),
        workdir="/gateway",
        envoy=True,
    ),
    # Istio's agent and Envoy Gateway read plugin.wasm from the last layer. Init containers run `cp` from an earlier layer.
    Image(
        "switchpoint",
        "The picker as a wasm module, for init containers and for gateways that fetch modules from images",
        ("copier", "module"),
        ("/bin/cp",),
        ("busybox-static",),
        (("filter", MODULE_TARGET),),
        cmd=("/switchpoint.wasm", "/module/switchpoint.wasm"),
    ),
)
# These images are not for production: only `--test-images` builds these images.
TEST_IMAGES = (
    Image(
        "switchpoint-model-server",
        "A simulated model server, for tests only",
        ("base", "model-server"),
        ("/usr/local/bin/model-server",),
        debian.BASE_PACKAGES,
        (("testbed", ""),),
    ),
)


def contents(root: pathlib.Path, inputs: Inputs, packages: dict[str, Package], architecture: Architecture) -> dict[str, list[Entry]]:
    """Returns the entries of every layer, by the layer's name."""
    licence = root / "LICENSE"
    own = Entry("/usr/share/doc/switchpoint/LICENSE", content=licence)
    envoy = [Entry("/usr/local/bin/envoy", 0o755, inputs.envoy), Entry("/usr/share/doc/envoy/LICENSE", content=licence)]
    if inputs.envoy_licence:
        envoy.append(Entry("/usr/share/doc/envoy/LICENSE.packaging", content=inputs.envoy_licence))
    layers = {
        "base": [*debian.base(packages, architecture), own],
        "shell": debian.shell(packages),
        "copier": [*debian.copier(packages), own],
        "switchpointd": [Entry("/usr/local/bin/switchpointd", 0o755, inputs.switchpointd)],
        "migrate": [Entry("/usr/local/bin/switchpoint-migrate", 0o755, inputs.migrate)],
        "envoy": envoy,
        # Consumers read plugin.wasm, so plugin.wasm has the content, and switchpoint.wasm is a link to plugin.wasm.
        "module": [Entry("/plugin.wasm", content=inputs.module), Entry("/switchpoint.wasm", hardlink="/plugin.wasm")],
        # standalone.yaml names the module relative to the working directory.
        "gateway": [
            Entry("/switchpoint.wasm", content=inputs.module),
            Entry(f"/gateway/target/{MODULE_TARGET}/release/switchpoint.wasm", symlink="/switchpoint.wasm"),
            Entry("/gateway/envoy-config/standalone.yaml", content=root / "envoy-config/standalone.yaml"),
            Entry("/usr/local/bin/start.sh", 0o755, root / "envoy-config/start.sh"),
        ],
    }
    # Envoy loads it only if its configuration names it, as envoy-config/native.yaml does.
    layers["native"] = [Entry("/usr/local/lib/switchpoint/libswitchpoint_native.so", 0o755, inputs.native)]
    if inputs.model_server:
        layers["model-server"] = [Entry("/usr/local/bin/model-server", 0o755, inputs.model_server)]
    return layers
