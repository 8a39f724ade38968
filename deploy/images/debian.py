"""Takes files of Debian packages for the images, without installing a package.

The packages come from the Debian release that apt-get is configured for. Debian's servers keep only the newest version of a
package in a release, so a fixed version would fail after the next security update. Versions and hashes are recorded in the SBOM
instead, and the downloaded packages stay in a folder: `--debs FOLDER` builds with the same packages again.
"""

import hashlib
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import NamedTuple

from layers import Entry

# The packages by purpose. The base of every image that is linked with glibc has these four packages.
BASE_PACKAGES = ("base-files", "ca-certificates", "libc6", "libgcc-s1")
SHELL_PACKAGES = ("bash-static", "busybox-static")
ALL_ARCHITECTURES = "ca-certificates"
PACKAGES = BASE_PACKAGES + SHELL_PACKAGES
# The libraries that switchpointd and Envoy link or load. The loader's name depends on the architecture.
LIBRARIES = (
    "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libnss_dns.so.2", "libnss_files.so.2", "libpthread.so.0",
    "libresolv.so.2", "librt.so.1",
)  # fmt: skip
# The tools that start.sh calls, and `ls` and `sh` to look into a running container.
APPLETS = ("/bin/awk", "/bin/cat", "/bin/cp", "/bin/grep", "/bin/ls", "/bin/sh", "/bin/sleep", "/usr/bin/env")
USER = 65532


class Architecture(NamedTuple):
    """Names of one architecture: Debian's (which OCI uses too), Debian's folder of libraries, the loader, Rust's target."""

    name: str
    libraries: str
    loader: str
    rust: str


ARCHITECTURES = {
    "amd64": Architecture("amd64", "/lib/x86_64-linux-gnu", "/lib64/ld-linux-x86-64.so.2", "x86_64-unknown-linux-gnu"),
    "arm64": Architecture("arm64", "/lib/aarch64-linux-gnu", "/lib/ld-linux-aarch64.so.1", "aarch64-unknown-linux-gnu"),
}


class Unavailable(Exception):
    """The packages cannot be fetched or unpacked on this machine."""


class Package(NamedTuple):
    name: str
    version: str
    architecture: str
    sha256: str
    control: str
    tree: pathlib.Path

    def file(self, name: str) -> pathlib.Path:
        """Returns the file with this base name, in whichever folder of libraries or programs the Debian release has it."""
        found = sorted(path for path in self.tree.rglob(name) if path.is_file() and not path.is_symlink())
        if not found:
            raise Unavailable(f"the package {self.name} {self.version} has no file {name}")
        return found[0]


def run(*command: str, folder: pathlib.Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def download(architecture: str, folder: pathlib.Path) -> list[pathlib.Path]:
    """Downloads the packages that `folder` lacks, and returns their files."""
    if shutil.which("apt-get") is None:
        raise Unavailable("apt-get is missing: build on Debian, or name a folder with the packages by --debs")
    folder.mkdir(parents=True, exist_ok=True)
    settings = foreign(architecture, folder)
    files = fetch([*(f"{name}:{architecture}" for name in PACKAGES if name != ALL_ARCHITECTURES), ALL_ARCHITECTURES], folder, settings)
    gcc = next(file for file in files if file.name.startswith("libgcc-s1_"))
    return files + fetch([f"{licence_package(gcc)}:{architecture}"], folder, settings)


def foreign(architecture: str, folder: pathlib.Path) -> list[str]:
    """Returns apt-get's settings for an architecture that this machine lacks, with its indexes in `folder`. The signature
    check and the machine's own indexes stay as they are."""
    known = run("dpkg", "--print-architecture", folder=folder).split() + run("dpkg", "--print-foreign-architectures", folder=folder).split()
    if architecture in known:
        return []
    lists, cache = folder / "apt/lists", folder / "apt/cache"
    for name in (lists / "partial", cache / "archives/partial"):
        name.mkdir(parents=True, exist_ok=True)
    values = [f"Dir::State::lists={lists}", f"Dir::Cache={cache}", *(f"APT::Architectures::={name}" for name in (*known, architecture))]
    settings = [word for value in values for word in ("-o", value)]
    run("apt-get", "-qq", "-o", "APT::Sandbox::User=root", *settings, "update", folder=folder)
    return settings


def fetch(names: list[str], folder: pathlib.Path, settings: list[str]) -> list[pathlib.Path]:
    """Downloads packages with apt-get, which verifies the packages by the signed index of the release."""
    # Without this option apt-get, run as root, would warn that the user `_apt` cannot write to this folder.
    apt = ("apt-get", "-qq", "-o", "APT::Sandbox::User=root", *settings, "download")
    try:
        # apt-get leaves out files that are in the current folder.
        with tempfile.TemporaryDirectory() as empty:
            uris = run(*apt, "--print-uris", *names, folder=pathlib.Path(empty))
        listed = re.findall(r"'\S+' (\S+) \d+ SHA256:([0-9a-f]{64})", uris)
        if len(listed) != len(names):
            raise Unavailable(f"apt-get download --print-uris names {len(listed)} files for {', '.join(names)}")
        if any(sha256(folder / file) != digest for file, digest in listed):
            run(*apt, *names, folder=folder)
    except Unavailable as why:
        raise Unavailable(f"{why}\nDebian's packages are not available; `apt-get update` may help") from why
    return [folder / file for file, _ in listed]


def licence_package(gcc: pathlib.Path) -> str:
    """Returns the package with the licence of libgcc-s1, for example gcc-12-base: its number changes with the Debian release."""
    found = re.search(r"\bgcc-\d+-base\b", run("dpkg-deb", "-f", str(gcc), "Depends", folder=gcc.parent))
    if not found:
        raise Unavailable(f"{gcc.name} does not name the package with its licence")
    return found[0]


def sha256(file: pathlib.Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def unpack(files: list[pathlib.Path], folder: pathlib.Path) -> dict[str, Package]:
    """Unpacks the packages below `folder`, which is emptied first, and returns them by name."""
    if shutil.which("dpkg-deb") is None:
        raise Unavailable("dpkg-deb is missing: build on Debian")
    shutil.rmtree(folder, ignore_errors=True)
    packages = {}
    for file in files:
        name, version, architecture = (run("dpkg-deb", "-f", str(file), field, folder=file.parent).strip() for field in ("Package", "Version", "Architecture"))
        if name in packages:
            raise Unavailable(f"{file.parent} has two packages {name}: remove the older one")
        (folder / name).mkdir(parents=True)
        run("dpkg-deb", "-x", str(file), str(folder / name), folder=file.parent)
        control = run("dpkg-deb", "-f", str(file), folder=file.parent)
        packages[name] = Package(name, version, architecture, sha256(file), control, folder / name)
    missing = [name for name in PACKAGES if name not in packages]
    if not any(name.startswith("gcc-") for name in packages):
        missing.append("gcc-N-base")
    if missing:
        raise Unavailable(f"these Debian packages are missing: {', '.join(missing)}")
    return packages


def records(package: Package, licence: Package | None = None) -> list[Entry]:
    """Returns the package's licence, and the package's record at the path where vulnerability scanners look for packages of images
    without dpkg. `licence`: the package that has the licence, if it is another one."""
    return [
        Entry(f"/usr/share/doc/{package.name}/copyright", content=(licence or package).file("copyright")),
        Entry(f"/var/lib/dpkg/status.d/{package.name}", content=package.control.encode()),
    ]


def accounts() -> list[Entry]:
    return [
        Entry("/etc/passwd", content=f"root:x:0:0:root:/:/sbin/nologin\nnonroot:x:{USER}:{USER}:nonroot:/:/sbin/nologin\n".encode()),
        Entry("/etc/group", content=f"root:x:0:\nnonroot:x:{USER}:\n".encode()),
    ]


def base(packages: dict[str, Package], architecture: Architecture) -> list[Entry]:
    """Returns glibc, CA certificates and a user, for dynamically linked binaries."""
    certificates = sorted((packages["ca-certificates"].tree / "usr/share/ca-certificates").rglob("*.crt"))
    libc = packages["libc6"]
    entries = [
        Entry(architecture.loader, 0o755, libc.file(architecture.loader.rpartition("/")[2])),
        Entry("/etc/nsswitch.conf", content=b"hosts: files dns\n"),
        Entry("/etc/os-release", content=packages["base-files"].file("os-release")),
        Entry("/etc/ssl/certs/ca-certificates.crt", content=b"".join(file.read_bytes() for file in certificates)),
        Entry("/tmp", 0o1777),
        *accounts(),
    ]
    for name in LIBRARIES:
        package = packages["libgcc-s1"] if name == "libgcc_s.so.1" else libc
        entries.append(Entry(f"{architecture.libraries}/{name}", 0o644, package.file(name)))
    licences = {"libgcc-s1": next(package for name, package in packages.items() if name.startswith("gcc-"))}
    return entries + [entry for name in BASE_PACKAGES for entry in records(packages[name], licences.get(name))]


def shell(packages: dict[str, Package]) -> list[Entry]:
    """Returns bash and the tools that start.sh calls, all statically linked."""
    return [
        Entry("/bin/bash", 0o755, packages["bash-static"].file("bash-static")),
        Entry("/bin/busybox", 0o755, packages["busybox-static"].file("busybox")),
        *(Entry(path, symlink="/bin/busybox") for path in APPLETS),
        *(entry for name in SHELL_PACKAGES for entry in records(packages[name])),
    ]


def copier(packages: dict[str, Package]) -> list[Entry]:
    """Returns a static `cp`, for init containers that copy the module into a folder of the pod."""
    busybox = packages["busybox-static"]
    program = Entry("/bin/busybox", 0o755, busybox.file("busybox"))
    return [program, Entry("/bin/cp", symlink="/bin/busybox"), *accounts(), *records(busybox)]
