"""Images of the test cluster, made with crane and pushed to the node's registry: the sandbox, simulated model servers, and the stock
Envoy image that `sidecar.yaml` names."""

import gzip
import io
import os
import pathlib
import subprocess
import tarfile
from typing import NamedTuple

import node
from paths import DEB, DEB_LIBRARIES, HERE, IMAGES, REGISTRY, ROOT, TARGET

USER = "65532"
# The test images need the PATH of the published images, because Envoy Gateway starts their programs by name.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RELEASE = TARGET / "release"
WASM = TARGET / "wasm32-wasip1/release/switchpoint.wasm"
MODULE_NAMES = ("switchpoint.wasm", "plugin.wasm")
BUSYBOX_LINKS = ("sh", "sleep", "cat", "grep", "ls", "cp", "printf")
# A script in place of vLLM, which ignores the arguments that `worker.yaml` passes to vLLM.
VLLM_SCRIPT = "#!/bin/sh\nexec /model-server --listen 0.0.0.0:8000\n"

Layer = dict[str, "pathlib.Path | str | bytes"]


class Image(NamedTuple):
    """An image: `layers` from the lowest up; each maps a path in the image to a file here, to its content, or to the target of a
    link (`str`)."""

    name: str
    layers: list[Layer]
    entrypoint: str = ""


def write_layer(files: Layer, target: pathlib.Path) -> None:
    """Writes a layer whose bytes depend on the content only."""
    with target.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1, mtime=0, filename="") as packed:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path in sorted(files):
                add(archive, path.lstrip("/"), files[path])


def add(archive: tarfile.TarFile, path: str, content: "pathlib.Path | str | bytes") -> None:
    entry = tarfile.TarInfo(path)
    entry.mode = 0o755
    if isinstance(content, str):
        entry.type, entry.linkname = tarfile.SYMTYPE, content
        archive.addfile(entry)
    elif path.endswith("/"):
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(entry)
    else:
        data = content if isinstance(content, bytes) else content.read_bytes()
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))


def base() -> Layer:
    """Returns the files that a program linked with glibc needs."""
    files: Layer = {
        "etc/passwd": b"nonroot:x:65532:65532::/tmp:/sbin/nologin\n",
        "etc/group": b"nonroot:x:65532:\n",
        "etc/nsswitch.conf": b"hosts: files dns\n",
        "etc/ssl/certs/ca-certificates.crt": b"".join(file.read_bytes() for file in sorted((DEB / "usr/share/ca-certificates/mozilla").glob("*.crt"))),
        "tmp/": b"",
        "lib64/ld-linux-x86-64.so.2": "/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
    }
    for folder in (DEB / "lib/x86_64-linux-gnu", DEB_LIBRARIES):
        for name in ("ld-linux-x86-64.so.2", "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libresolv.so.2", "libnss_dns.so.2", "libnss_files.so.2", "libgcc_s.so.1"):
            if (folder / name).exists():
                files[f"lib/x86_64-linux-gnu/{name}"] = folder / name
    return files


def shell() -> Layer:
    """Returns the programs that start.sh runs."""
    files: Layer = {"bin/busybox": DEB / "bin/busybox", "bin/bash": DEB / "bin/bash-static"}
    files |= {f"bin/{name}": "busybox" for name in BUSYBOX_LINKS}
    return files | {"usr/bin/env": "/bin/busybox", "usr/bin/awk": "/bin/busybox"}


def pause() -> pathlib.Path:
    program = IMAGES / "pause"
    subprocess.run(["cc", "-Os", "-static", "-s", "-o", str(program), str(HERE / "pause.c")], check=True)
    return program


def envoy() -> pathlib.Path:
    return next((ROOT / ".venv/lib").glob("python3*/site-packages/envoy/_bin/envoy"))


def all_images() -> list[Image]:
    module = {f"/{name}": WASM for name in MODULE_NAMES}
    return [
        Image("pause:1", [{"/pause": pause()}], "/pause"),
        Image("model-server:0.2.0", [base(), {"/model-server": RELEASE / "model-server"}], "/model-server"),
        Image("vllm/vllm-openai:v0.11.0", [base() | shell(), {"/model-server": RELEASE / "model-server", "/vllm": VLLM_SCRIPT.encode()}], "/vllm"),
        Image("envoyproxy/envoy:v1.40.0", [base() | shell(), {"/usr/local/bin/envoy": envoy()}], "/usr/local/bin/envoy"),
        Image("switchpointd:0.2.0", [base(), {"/switchpointd": RELEASE / "switchpointd"}], "/switchpointd"),
        Image("switchpoint:0.2.0", [{"/bin/busybox": DEB / "bin/busybox", "/bin/cp": "busybox"}, module]),
    ]


def crane(*arguments: str) -> None:
    node.run("env", f"DOCKER_CONFIG={IMAGES}", "crane", *arguments, "--insecure")


def push(image: Image) -> None:
    stem = image.name.replace("/", "-").replace(":", "-")
    files = []
    for number, layer in enumerate(image.layers):
        files.append(IMAGES / f"{stem}-{number}.tar.gz")
        write_layer(layer, files[-1])
    reference = f"{REGISTRY}/{image.name}"
    crane("append", "--oci-empty-base", *(f"--new_layer={file}" for file in files), f"--new_tag={reference}")
    entrypoint = [f"--entrypoint={image.entrypoint}"] if image.entrypoint else []
    # Sets the platform, because containerd finds no matching image without a platform.
    crane("mutate", "--set-platform=linux/amd64", f"--user={USER}", f"--env=PATH={PATH}", *entrypoint, f"--tag={reference}", reference)
    for file in files:
        os.remove(file)


def push_all() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for image in all_images():
        push(image)
