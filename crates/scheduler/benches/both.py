"""The cost of decisions and plugins, natively and in wasm, side by side: builds and runs the bench `schedule` twice.

The wasm host is wasmtime, which compiles ahead of time, as V8 in Envoy does in the end. The numbers of wasmtime and of V8 agree within a
fifth.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import wasmtime

ROOT = Path(__file__).resolve().parents[3]


def built(*arguments, **environment):
    """Builds the bench with further arguments of cargo, and returns its executable."""
    command = ["cargo", "bench", "-q", "-p", "scheduler", "--bench", "schedule", "--no-run", "--message-format=json", *arguments]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, env={**os.environ, **environment}).stdout
    executables = [json.loads(line).get("executable") for line in output.splitlines()]
    return next(executable for executable in executables if executable)


def in_wasm(module):
    """Runs the module and returns its output."""
    engine = wasmtime.Engine()
    linker = wasmtime.Linker(engine)
    linker.define_wasi()
    with tempfile.NamedTemporaryFile() as output:
        wasi = wasmtime.WasiConfig()
        wasi.argv = ["schedule"]
        wasi.stdout_file = output.name
        wasi.inherit_stderr()
        store = wasmtime.Store(engine)
        store.set_wasi(wasi)
        start = linker.instantiate(store, wasmtime.Module.from_file(engine, module)).exports(store)["_start"]
        try:
            start(store)
        except wasmtime.ExitTrap as end:
            if end.code != 0:
                sys.exit(f"exit code {end.code}")
        return open(output.name, encoding="utf-8").read()


def main():
    native = subprocess.run([built()], check=True, stdout=subprocess.PIPE, text=True).stdout
    wasm = in_wasm(built("--target", "wasm32-wasip1", CARGO_TARGET_DIR=str(ROOT / "target/wasm-golden")))
    for ours, theirs in zip(native.splitlines(), wasm.splitlines(), strict=True):
        if not ours:
            print()
            continue
        name, *cells = ours.split()
        heading = not cells[0].replace(".", "").replace("-", "").isdigit()
        pairs = zip(cells, theirs.split()[1:], strict=True)
        row = [f"{a:>9} {'' if heading else b:>9}" for a, b in pairs]
        print((f"{name:<32}" + " ".join(row)).rstrip())
        if heading:
            print(" " * 32 + " ".join(f"{'native':>9} {'wasm':>9}" for _ in cells))


if __name__ == "__main__":
    main()
