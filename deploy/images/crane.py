"""Runs crane: builds images in a separate registry process, pulls the images as OCI layouts, and pushes layouts."""

import contextlib
import os
import pathlib
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

START_SECONDS_MAX = 10


class Failed(Exception):
    """crane ended with an error."""


class Settings(NamedTuple):
    """An image's configuration."""

    platform: str
    user: str
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    workdir: str
    env: dict[str, str]
    labels: dict[str, str]


class Crane:
    """`config`: the folder with the registries' credentials. `registry` uses an empty folder, so crane does not read the user's
    credentials."""

    def __init__(self, binary: pathlib.Path, config: pathlib.Path | None = None):
        self.binary, self.config = binary, config

    def run(self, *arguments: str) -> str:
        environment = os.environ | ({"DOCKER_CONFIG": str(self.config)} if self.config else {})
        done = subprocess.run([self.binary, *arguments], env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Failed(f"crane {' '.join(arguments)}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def build(self, reference: str, layers: list[pathlib.Path], settings: Settings) -> None:
        """Pushes an image of these layers. Its manifest and layers have OCI's media types."""
        files = [argument for layer in layers for argument in ("--new_layer", str(layer))]
        self.run("append", "--oci-empty-base", *files, "--new_tag", reference)
        # crane reads commas in these two as separators of arguments, and adds environment and labels one by one.
        options = ["--set-platform", settings.platform, "--user", settings.user, "--entrypoint", ",".join(settings.entrypoint)]
        options += ["--cmd", ",".join(settings.cmd)] if settings.cmd else []
        options += ["--workdir", settings.workdir] if settings.workdir else []
        options += [argument for key, value in settings.env.items() for argument in ("--env", f"{key}={value}")]
        options += [argument for key, value in settings.labels.items() for argument in ("--label", f"{key}={value}")]
        self.run("mutate", *options, "--tag", reference, reference)

    def pull(self, reference: str, layout: pathlib.Path) -> None:
        self.run("pull", "--format=oci", reference, str(layout))

    def push(self, layout: pathlib.Path, reference: str, insecure: bool = False) -> None:
        self.run(*(["--insecure"] if insecure else []), "push", str(layout), reference)


@contextlib.contextmanager
def registry(binary: pathlib.Path, blobs: pathlib.Path | None = None) -> Iterator[tuple[Crane, str]]:
    """A registry on a free port of loopback for as long as the context lasts: a crane without credentials, and the address. Blobs
    are in memory, or in the folder `blobs`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, "registry", "serve", "--address", "127.0.0.1:0", *(["--disk", str(blobs)] if blobs else [])]
        log = pathlib.Path(folder) / "registry.log"
        with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
            try:
                yield Crane(binary, pathlib.Path(folder)), address(process, log)
            finally:
                process.terminate()


def address(process: subprocess.Popen[bytes], log: pathlib.Path) -> str:
    """Waits until the registry has logged its port."""
    end = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"serving on port (\d+)", log.read_text()):
            return f"127.0.0.1:{found[1]}"
        time.sleep(0.02)
    raise Failed(f"crane registry serve did not start: {log.read_text()}")
