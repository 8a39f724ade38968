"""Reads which shared libraries, and which versions of their symbols, an ELF file needs and defines.

The loader checks the same at start. Reading it here finds a binary that needs a newer glibc than the image has before the image is
built, also for another architecture than this machine's, whose programs `ldd` cannot read.
"""

import io
from typing import NamedTuple

from elftools.elf.elffile import ELFFile

MAGIC = b"\x7fELF"
MACHINES = {"EM_X86_64": "amd64", "EM_AARCH64": "arm64"}
WEAK = 2


class Elf(NamedTuple):
    """`needed`: names of libraries. `versions`: pairs of a library and a version of its symbols, such as ("libc.so.6",
    "GLIBC_2.34"). `defined`: versions that this library defines. `interpreter`: the loader's path, "" if static."""

    machine: str
    interpreter: str
    needed: list[str]
    versions: list[tuple[str, str]]
    defined: set[str]


def read(data: bytes) -> Elf | None:
    """Returns the header data of an ELF file, or None if `data` is not an ELF file."""
    if not data.startswith(MAGIC):
        return None
    file = ELFFile(io.BytesIO(data))
    # Leaves out weak versions, because the loader does not require weak versions.
    versions = [
        (library.name, version.name)
        for section in file.iter_sections("SHT_GNU_verneed")
        for library, required in section.iter_versions()
        for version in required
        if not version["vna_flags"] & WEAK
    ]
    return Elf(
        machine=MACHINES.get(file["e_machine"], str(file["e_machine"])),
        interpreter=next((segment.get_interp_name() for segment in file.iter_segments("PT_INTERP")), ""),
        needed=[tag.needed for segment in file.iter_segments("PT_DYNAMIC") for tag in segment.iter_tags("DT_NEEDED")],
        versions=versions,
        defined={next(names).name for section in file.iter_sections("SHT_GNU_verdef") for _, names in section.iter_versions()},
    )


def problems(files: dict[str, bytes], machine: str) -> list[str]:
    """Returns sentences that say why ELF files of an image cannot start in it. `files`: path and content of every file of the image."""
    parsed = {path: elf for path, data in files.items() if (elf := read(data))}
    libraries = {path.rpartition("/")[2]: elf for path, elf in parsed.items()}
    found = []
    for path, elf in parsed.items():
        if elf.machine != machine:
            found.append(f"{path} is for {elf.machine}, the image for {machine}")
            continue
        if elf.interpreter and elf.interpreter not in files:
            found.append(f"{path} needs the loader {elf.interpreter}, which the image lacks")
        found += [f"{path} needs {name}, which the image lacks" for name in elf.needed if name not in libraries]
        found += [
            f"{path} needs {version} of {name}, which is newer than the library in the image"
            for name, version in elf.versions
            if name in libraries and version not in libraries[name].defined
        ]
    return found
