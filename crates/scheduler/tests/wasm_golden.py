"""Runs the wasm build of the example `golden` on each case and prints the decisions in order.

usage: wasm_golden.py golden.wasm CASE...
"""

import sys
import tempfile

import wasmtime


def decide(engine, linker, module, case):
    """Runs the module with `case` on its standard input and returns its output."""
    with tempfile.NamedTemporaryFile() as output:
        wasi = wasmtime.WasiConfig()
        wasi.argv = ["golden"]
        wasi.stdin_file = case
        wasi.stdout_file = output.name
        wasi.inherit_stderr()
        store = wasmtime.Store(engine)
        store.set_wasi(wasi)
        start = linker.instantiate(store, module).exports(store)["_start"]
        try:
            start(store)
        except wasmtime.ExitTrap as end:
            if end.code != 0:
                sys.exit(f"{case}: exit code {end.code}")
        return open(output.name, encoding="utf-8").read()


def main():
    wasm, cases = sys.argv[1], sys.argv[2:]
    engine = wasmtime.Engine()
    linker = wasmtime.Linker(engine)
    linker.define_wasi()
    module = wasmtime.Module.from_file(engine, wasm)
    for case in cases:
        sys.stdout.write(decide(engine, linker, module, case))


main()
