"""Reads which shared libraries, and which versions of their symbols, an ELF file needs and defines.

The loader checks the same at start. Reading it here finds a binary that needs a newer glibc than the image has before the image is
built, also for another architecture than this machine's. Only 64-bit little-endian files, such as those of amd64 and arm64.
"""

import struct
from typing import NamedTuple

MAGIC = b"\x7fELF\x02\x01"
MACHINES = {62: "amd64", 183: "arm64"}
PT_LOAD, PT_DYNAMIC, PT_INTERP = 1, 2, 3
DT_NEEDED, DT_STRTAB, DT_VERDEF, DT_VERDEFNUM, DT_VERNEED, DT_VERNEEDNUM = 1, 5, 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
WEAK = 2


class Elf(NamedTuple):
    """`needed`: names of libraries. `versions`: pairs of a library and a version of its symbols, such as ("libc.so.6",
    "GLIBC_2.34"). `defined`: versions that this library defines. `interpreter`: the loader's path, "" if static."""

    machine: str
    interpreter: str
    needed: list[str]
    versions: list[tuple[str, str]]
    defined: set[str]


class Reader:
    """Positions in the file of what the dynamic section names by address."""

    def __init__(self, data: bytes):
        self.data = data
        offset, size, count = *struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54)
        self.segments = [self.segment(offset + size * index) for index in range(count)]
        self.dynamic: list[tuple[int, int]] = []
        for kind, at, _, length in self.segments:
            if kind == PT_DYNAMIC:
                self.dynamic = list(struct.iter_unpack("<qQ", data[at : at + length // 16 * 16]))
        self.strings = self.position(DT_STRTAB)

    def segment(self, at: int) -> tuple[int, int, int, int]:
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", self.data, at)
        return kind, offset, address, length

    def value(self, tag: int) -> int:
        return next((value for found, value in self.dynamic if found == tag), 0)

    def position(self, tag: int) -> int:
        address = self.value(tag)
        for kind, offset, start, length in self.segments:
            if kind == PT_LOAD and address and start <= address < start + length:
                return offset + address - start
        return 0

    def string(self, offset: int) -> str:
        begin = self.strings + offset
        return self.data[begin : self.data.index(b"\0", begin)].decode()

    def interpreter(self) -> str:
        return next((self.data[at : at + length].rstrip(b"\0").decode() for kind, at, _, length in self.segments if kind == PT_INTERP), "")

    def required(self) -> list[tuple[str, str]]:
        """The versions in DT_VERNEED, without weak ones, which the loader does not require."""
        found, at = [], self.position(DT_VERNEED)
        for _ in range(self.value(DT_VERNEEDNUM)):
            _, count, file, first, following = struct.unpack_from("<HHIII", self.data, at)
            entry = at + first
            for _ in range(count):
                _, flags, _, name, step = struct.unpack_from("<IHHII", self.data, entry)
                if not flags & WEAK:
                    found.append((self.string(file), self.string(name)))
                entry += step
            at += following
        return found

    def defined(self) -> set[str]:
        """The versions in DT_VERDEF."""
        found, at = set(), self.position(DT_VERDEF)
        for _ in range(self.value(DT_VERDEFNUM)):
            _, _, _, _, _, first, following = struct.unpack_from("<HHHHIII", self.data, at)
            found.add(self.string(struct.unpack_from("<I", self.data, at + first)[0]))
            at += following
        return found


def read(data: bytes) -> Elf | None:
    """None if `data` is not such an ELF file."""
    if not data.startswith(MAGIC):
        return None
    reader = Reader(data)
    machine = struct.unpack_from("<H", data, 18)[0]
    return Elf(
        machine=MACHINES.get(machine, f"machine {machine}"),
        interpreter=reader.interpreter(),
        needed=[reader.string(value) for tag, value in reader.dynamic if tag == DT_NEEDED],
        versions=reader.required(),
        defined=reader.defined(),
    )


def problems(files: dict[str, bytes], machine: str) -> list[str]:
    """Why ELF files of an image cannot start in it, as sentences. `files`: path and content of every file of the image."""
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
