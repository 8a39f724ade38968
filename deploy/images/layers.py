"""Writes layers of images: tar archives, compressed with gzip, whose bytes depend only on their content.

Every entry has owner 0 and the time 0, entries are sorted by path, and missing parent folders are added. So the same files give
the same digest, with the same version of zlib.
"""

import gzip
import hashlib
import io
import pathlib
import tarfile
from typing import NamedTuple

DIRECTORY_MODE = 0o755
TOP_COMPRESSION = 9


class Entry(NamedTuple):
    """A file, folder or link of a layer.

    `path` is absolute in the image. A file has `content`: its bytes, or the file to read them from. `symlink` is the target of a
    symbolic link, `hardlink` the path of a file of the same layer that sorts before this one. A folder has none of the three."""

    path: str
    mode: int = 0o644
    content: bytes | pathlib.Path | None = None
    symlink: str = ""
    hardlink: str = ""

    def data(self) -> bytes:
        return self.content.read_bytes() if isinstance(self.content, pathlib.Path) else self.content or b""


def complete(entries: list[Entry]) -> list[Entry]:
    """Returns the entries with all parent folders, sorted by path. A path that occurs twice is an error."""
    by_path: dict[str, Entry] = {}
    for entry in entries:
        if not entry.path.startswith("/") or entry.path.endswith("/"):
            raise ValueError(f"{entry.path}: a path in a layer is absolute and has no slash at its end")
        if entry.path in by_path:
            raise ValueError(f"{entry.path} is in the layer twice")
        by_path[entry.path] = entry
    for path in list(by_path):
        for parent in pathlib.PurePosixPath(path).parents:
            if str(parent) != "/":
                by_path.setdefault(str(parent), Entry(str(parent), DIRECTORY_MODE))
    return [by_path[path] for path in sorted(by_path)]


def header(entry: Entry, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(entry.path.lstrip("/"))
    info.mode = entry.mode
    info.mtime = info.uid = info.gid = 0
    info.uname = info.gname = ""
    if entry.symlink:
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.symlink, 0o777
    elif entry.hardlink:
        info.type, info.linkname = tarfile.LNKTYPE, entry.hardlink.lstrip("/")
    elif entry.content is None:
        info.type = tarfile.DIRTYPE
    else:
        info.size = size
    return info


def fingerprint(entries: list[Entry]) -> str:
    """Returns a name for the layer's content, by which `write` finds a layer that was already written."""
    digest = hashlib.sha256()
    for entry in complete(entries):
        described = (entry.path, entry.mode, entry.content is None, entry.symlink, entry.hardlink)
        digest.update(f"{described}{hashlib.sha256(entry.data()).hexdigest()}\n".encode())
    return digest.hexdigest()


def write(entries: list[Entry], folder: pathlib.Path) -> pathlib.Path:
    """Writes the layer into `folder`, unless it is there, and returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{fingerprint(entries)}.tar.gz"
    if out.exists():
        return out
    partial = out.with_suffix(".partial")
    with (
        partial.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", compresslevel=TOP_COMPRESSION, fileobj=raw, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for entry in complete(entries):
            data = entry.data()
            archive.addfile(header(entry, len(data)), io.BytesIO(data))
    partial.rename(out)
    return out
