#!/usr/bin/env python3
"""Builds a real etcd and a real Kubernetes control plane into .tools/bin, for the tests that want the truth.

    .ci/cluster_tools.py etcd kubernetes

Published Go modules and plain `go build`: no prebuilt binary, no container, no root. A tool whose stamp names its version is left
alone. Without Go, or when a module cannot be had, it says so and exits with 3: the tests then skip what needs the tool, and say so.
Standard library only.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".tools"
# Exit code for "cannot be built here", as opposed to a mistake in this script.
UNAVAILABLE = 3
KUBERNETES = "k8s.io/kubernetes"


class Tool(NamedTuple):
    """One `go build` each of `packages`; `replaced` reads the replacements of staging modules from the module's own go.mod."""

    module: str
    version: str
    packages: dict[str, str]
    replaced: bool = False


TABLE = {
    # `go install` refuses it: its go.mod has replace directives. Hence a module of our own that requires it.
    "etcd": Tool("go.etcd.io/etcd/server/v3", "v3.6.15", {"etcd": "go.etcd.io/etcd/server/v3"}),
    "kubernetes": Tool(
        KUBERNETES,
        "v1.36.3",
        {
            "kube-apiserver": f"{KUBERNETES}/cmd/kube-apiserver",
            "kube-controller-manager": f"{KUBERNETES}/cmd/kube-controller-manager",
        },
        replaced=True,
    ),
}


class Unavailable(Exception):
    """Go, or a module, is out of reach."""


def build(name: str) -> None:
    tool = TABLE[name]
    stamp = TOOLS / f".{name}-{tool.version}"
    if stamp.exists() and all((TOOLS / "bin" / binary).exists() for binary in tool.packages):
        return
    if shutil.which("go") is None:
        raise Unavailable("Go is not installed")
    print(f"setup: {name} {tool.version} into .tools (once; minutes)", flush=True)
    began = time.monotonic()
    folder = TOOLS / "go" / name
    folder.mkdir(parents=True, exist_ok=True)
    imports = "".join(f'import _ "{package}"\n' for package in tool.packages.values())
    (folder / "tools.go").write_text(f"//go:build tools\n\npackage tools\n\n{imports}")
    (folder / "go.mod").write_text(f"module tools\n\ngo 1.24\n\nrequire {tool.module} {tool.version}\n")
    if tool.replaced:
        replace_staging(folder, tool)
    go(folder, "mod", "tidy")
    (TOOLS / "bin").mkdir(exist_ok=True)
    for binary, package in tool.packages.items():
        go(folder, "build", "-trimpath", "-ldflags=-s -w", "-o", str(TOOLS / "bin" / binary), package)
    stamp.touch()
    print(f"setup: {name} took {time.monotonic() - began:.0f} s", flush=True)


def replace_staging(folder: pathlib.Path, tool: Tool) -> None:
    """Kubernetes' go.mod points its staging modules at folders beside it; published, they are modules of version v0.X.Y."""
    found = json.loads(go(folder, "mod", "download", "-json", f"{tool.module}@{tool.version}"))
    mod = json.loads(go(folder, "mod", "edit", "-json", found["GoMod"]))
    version = "v0" + tool.version.removeprefix("v1")
    rows = [f"replace {r['Old']['Path']} => {r['Old']['Path']} {version}" for r in mod["Replace"] or [] if r["New"]["Path"].startswith("./staging")]
    with (folder / "go.mod").open("a") as file:
        file.write("\n" + "\n".join(rows) + "\n")


def go(folder: pathlib.Path, *arguments: str) -> str:
    # What is installed is used: no other toolchain is fetched. The caches are ours, so that `make clean` removes them.
    own = {"GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod -modcacherw"}
    own |= {"GOMODCACHE": str(TOOLS / "go" / "mod"), "GOCACHE": str(TOOLS / "go" / "cache")}
    done = subprocess.run(["go", *arguments], cwd=folder, env=os.environ | own, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"go {' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in TABLE]
    if unknown or not names:
        print(f"usage: cluster_tools.py TOOL...  with TOOL one of {' '.join(TABLE)}", file=sys.stderr)
        return 2
    for name in names:
        try:
            build(name)
        except Unavailable as why:
            print(f"setup: {name} cannot be built here, and what needs it will be SKIPPED: {why}", file=sys.stderr)
            return UNAVAILABLE
    # Gigabytes, of no use once the binaries are there.
    shutil.rmtree(TOOLS / "go", ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
