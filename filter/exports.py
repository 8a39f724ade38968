"""Removes from a module the callbacks that the filter does not implement: `exports.py IN OUT`.

The SDK exports every callback of proxy-wasm. Envoy calls each exported callback, even if it does nothing, which
costs each request about half a microsecond per callback.
"""

import pathlib
import sys

UNUSED = {
    b"proxy_on_downstream_connection_close", b"proxy_on_downstream_data", b"proxy_on_foreign_function", b"proxy_on_log",
    b"proxy_on_new_connection", b"proxy_on_upstream_connection_close", b"proxy_on_upstream_data",
}  # fmt: skip
HEAD_BYTES = 8
EXPORTS = 7


def number(module: bytes, at: int) -> tuple[int, int]:
    """Reads an unsigned LEB128 number. Returns the number and the position after the number."""
    value = shift = 0
    while True:
        byte = module[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def written(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + written(rest) if rest else bytes([low])


def used(section: bytes) -> bytes:
    """Returns the export section without the unused callbacks. Raises KeyError if one of these callbacks is missing."""
    count, at = number(section, 0)
    kept, left = [], set(UNUSED)
    for _ in range(count):
        size, name = number(section, at)
        _, end = number(section, name + size + 1)  # after a byte for the kind
        if section[name : name + size] in UNUSED:
            left.remove(section[name : name + size])
        else:
            kept.append(section[at:end])
        at = end
    if left:
        raise KeyError(f"the module does not export {left}")
    return written(len(kept)) + b"".join(kept)


def main() -> None:
    module = pathlib.Path(sys.argv[1]).read_bytes()
    parts, at = [module[:HEAD_BYTES]], HEAD_BYTES
    while at < len(module):
        kind = module[at]
        size, start = number(module, at + 1)
        at = start + size
        section = used(module[start:at]) if kind == EXPORTS else module[start:at]
        parts.append(bytes([kind]) + written(len(section)) + section)
    pathlib.Path(sys.argv[2]).write_bytes(b"".join(parts))


if __name__ == "__main__":
    main()
