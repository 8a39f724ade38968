"""Runs a test binary built for wasm32-wasip1, with one folder in reach under its own name, and exits as it does.

usage: run.py tests.wasm FOLDER
"""

import sys

import wasmtime


def main():
    wasm, folder = sys.argv[1:]
    config = wasmtime.Config()
    config.cache = True
    engine = wasmtime.Engine(config)
    linker = wasmtime.Linker(engine)
    linker.define_wasi()
    module = wasmtime.Module.from_file(engine, wasm)
    wasi = wasmtime.WasiConfig()
    # Runs fewer random cases than natively, because the wasm run tests another compiler and other instructions, not other inputs.
    wasi.argv = ["it", "--test-threads=1"]
    wasi.env = [("PROPTEST_CASES", "32")]
    wasi.preopen_dir(folder, folder)
    wasi.inherit_stdout()
    wasi.inherit_stderr()
    store = wasmtime.Store(engine)
    store.set_wasi(wasi)
    start = linker.instantiate(store, module).exports(store)["_start"]
    try:
        start(store)
    except wasmtime.ExitTrap as end:
        sys.exit(end.code)


main()
