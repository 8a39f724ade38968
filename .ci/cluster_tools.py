#!/usr/bin/env python3
"""Builds a real etcd, a real Kubernetes, the tools for images and charts, and Envoy Gateway's translator into .tools/bin, and fetches
published schemas into .tools/schemas, for tests that need the real programs and schemas.

    .ci/cluster_tools.py etcd kube-apiserver schemas envoy-gateway
    .ci/cluster_tools.py kube-controller-manager node containerd cni helm crane cosign prometheus otelcol keda-scaler

The program uses published Go modules and plain `go build`: no prebuilt binary, no container, no root. The program skips a tool whose stamp
file has the right version. If Go or a module is unavailable, the program prints this and exits with 3; the tests that need the tool are
then skipped with a message. Standard library only.
"""

import hashlib
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
# Exit code for "cannot be built on this machine", as opposed to an error in this script.
UNAVAILABLE = 3
# Without inlining, compiling takes 71 % of the CPU time (etcd's server: 63 instead of 88 s), and without DWARF a tenth less again. The
# tools need not be fast.
COMPILER_FLAGS = "-gcflags=all=-l -dwarf=false"
KUBERNETES = "k8s.io/kubernetes"
KUBERNETES_VERSION = "v1.36.3"
# Without these variables a server's version is `v0.0.0-master+$Format:%H$`, which kubectl and Helm cannot read.
KUBERNETES_VERSION_PARTS = {
    f"{package}.git{part}": value
    for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    for part, value in zip(("Version", "Major", "Minor"), (KUBERNETES_VERSION, *KUBERNETES_VERSION.removeprefix("v").split(".")))
}
CNI_PLUGINS = "github.com/containernetworking/plugins"
PROMETHEUS = "github.com/prometheus/prometheus"
ENVOY_GATEWAY = "github.com/envoyproxy/gateway"
ENVOY_GATEWAY_VERSION = "v1.9.1"
ISTIO = "istio.io/istio"
INFERENCE_EXTENSION = "sigs.k8s.io/gateway-api-inference-extension"
INFERENCE_EXTENSION_VERSION = "v1.6.0"


class Tool(NamedTuple):
    """A tool to build, with one `go build` for each of `packages`. `told` are linker variables that the tool's own build scripts set.
    `tags` are build tags. The tools of a family are built with one go.mod, and so with one version of each dependency: then a package
    that two tools need is compiled once. `files` are files and folders of the module that tests need; `build` copies them into
    `.tools/NAME`. `tests` are packages whose tests `go test -c` makes a program of."""

    module: str
    version: str
    packages: dict[str, str]
    told: dict[str, str] = {}
    family: str = ""
    tags: str = ""
    files: tuple[str, ...] = ()
    tests: dict[str, str] = {}
    # A folder of this repository with the source and the go.mod of the program, for a tool that is published as libraries only.
    source: str = ""


TABLE = {
    # `go install` refuses a module with replace directives, so `build` makes a module that requires etcd's module.
    # The family is Kubernetes, because most of etcd's packages also belong to Kubernetes.
    "etcd": Tool("go.etcd.io/etcd/server/v3", "v3.6.15", {"etcd": "go.etcd.io/etcd/server/v3"}, family=KUBERNETES),
    # The API server is all that `make test` needs of Kubernetes.
    "kube-apiserver": Tool(
        KUBERNETES,
        KUBERNETES_VERSION,
        {"kube-apiserver": f"{KUBERNETES}/cmd/kube-apiserver"},
        told=KUBERNETES_VERSION_PARTS,
        family=KUBERNETES,
    ),
    "kube-controller-manager": Tool(
        KUBERNETES,
        KUBERNETES_VERSION,
        {"kube-controller-manager": f"{KUBERNETES}/cmd/kube-controller-manager"},
        told=KUBERNETES_VERSION_PARTS,
        family=KUBERNETES,
    ),
    # The programs of the node of `make e2e-cluster`.
    "node": Tool(
        KUBERNETES,
        KUBERNETES_VERSION,
        {name: f"{KUBERNETES}/cmd/{name}" for name in ("kubectl", "kube-scheduler", "kubelet", "kube-proxy")},
        told=KUBERNETES_VERSION_PARTS,
        family=KUBERNETES,
    ),
    "containerd": Tool(
        "github.com/containerd/containerd/v2",
        "v2.4.2",
        {name: f"github.com/containerd/containerd/v2/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
    ),
    "cni": Tool(
        CNI_PLUGINS,
        "v1.9.1",
        {path.rpartition("/")[2]: f"{CNI_PLUGINS}/plugins/{path}" for path in ("main/ptp", "main/loopback", "ipam/host-local", "meta/portmap")},
    ),
    # Renders, checks and installs the chart. The family is Kubernetes, because two thirds of Helm's packages also belong to Kubernetes.
    "helm": Tool("helm.sh/helm/v4", "v4.3.1", {"helm": "helm.sh/helm/v4/cmd/helm"}, family=KUBERNETES),
    # Builds images without a container engine, and is a registry.
    "crane": Tool("github.com/google/go-containerregistry", "v0.22.1", {"crane": "github.com/google/go-containerregistry/cmd/crane"}),
    # Signs images, in the test of the release.
    "cosign": Tool("github.com/sigstore/cosign/v3", "v3.1.3", {"cosign": "github.com/sigstore/cosign/v3/cmd/cosign"}),
    # The command `egctl translate` turns manifests into Envoy's configuration, offline.
    "envoy-gateway": Tool(ENVOY_GATEWAY, ENVOY_GATEWAY_VERSION, {"egctl": f"{ENVOY_GATEWAY}/cmd/egctl"}, family=ENVOY_GATEWAY),
    # The controller, with its chart.
    "envoy-gateway-controller": Tool(
        ENVOY_GATEWAY,
        ENVOY_GATEWAY_VERSION,
        {"envoy-gateway": f"{ENVOY_GATEWAY}/cmd/envoy-gateway"},
        family=ENVOY_GATEWAY,
        files=("charts/gateway-helm",),
    ),
    # Prometheus is built without the assets of its web page, which the tag `builtinassets` would add, and without service discovery by
    # clouds.
    "prometheus": Tool(
        PROMETHEUS, "v0.313.5", {name: f"{PROMETHEUS}/cmd/{name}" for name in ("prometheus", "promtool")}, tags="remove_all_sd"
    ),
    # A collector with the parts that `e2e/observe` needs, because OpenTelemetry publishes no program of the collector as a module.
    "otelcol": Tool("go.opentelemetry.io/collector/otelcol", "v0.165.0", {"otelcol": "."}, source="e2e/observe/collector"),
    # istiod and the agent, with the charts and the template of Envoy's bootstrap. Istio 1.31; the module proxy has no tagged version.
    # Istio's own Envoy is not published as a module; the tests use the stock Envoy.
    "istio": Tool(
        ISTIO,
        "v0.0.0-20260827124520-eed52ebb66ad",
        {name: f"{ISTIO}/pilot/cmd/{name}" for name in ("pilot-discovery", "pilot-agent")},
        files=("manifests/charts", "tools/packaging/common/envoy_bootstrap.json"),
    ),
    # The published conformance suite of the Inference Extension, and the server behind the gateway in it.
    "conformance": Tool(
        f"{INFERENCE_EXTENSION}/conformance",
        INFERENCE_EXTENSION_VERSION,
        {"echo-basic": "sigs.k8s.io/gateway-api/conformance/echo-basic"},
        tests={"conformance.test": f"{INFERENCE_EXTENSION}/conformance"},
    ),
}


class Schemas(NamedTuple):
    """The files of a published module that define custom resources."""

    module: str
    version: str
    files: str


CERT_MANAGER = "github.com/cert-manager/cert-manager"
PROMETHEUS_OPERATOR = "github.com/prometheus-operator/prometheus-operator"
KEDA = "github.com/kedacore/keda/v2"
KEDA_VERSION = "v2.21.0"
# The Gateway API in the version that this Envoy Gateway is built with. For the Inference Extension, the last version that has each
# kind: objectives and rewrites have since moved to llm-d, with the same fields, but llm-d's module is not published.
SCHEMAS = [
    Schemas("istio.io/api", "v1.31.1", "kubernetes/customresourcedefinitions.gen.yaml"),
    Schemas("sigs.k8s.io/gateway-api", "v1.6.1", "config/crd/standard/gateway.networking.k8s.io_*s.yaml"),
    Schemas(ENVOY_GATEWAY, ENVOY_GATEWAY_VERSION, "charts/gateway-helm/charts/crds/crds/generated/*.yaml"),
    Schemas(INFERENCE_EXTENSION, INFERENCE_EXTENSION_VERSION, "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"),
    Schemas(INFERENCE_EXTENSION, "v1.5.0", "config/crd/bases/*_inference[mo]*s.yaml"),
    Schemas(INFERENCE_EXTENSION, "v0.5.1", "config/crd/bases/*_inferencemodels.yaml"),
    # The kinds of the objects that the chart makes for cert-manager and for the Prometheus operator.
    Schemas(CERT_MANAGER, "v1.21.2", "deploy/crds/cert-manager.io_certificates.yaml"),
    Schemas(CERT_MANAGER, "v1.21.2", "deploy/crds/cert-manager.io_issuers.yaml"),
    Schemas(CERT_MANAGER, "v1.21.2", "deploy/crds/cert-manager.io_clusterissuers.yaml"),
    Schemas(PROMETHEUS_OPERATOR, "v0.85.0", "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml"),
    Schemas(PROMETHEUS_OPERATOR, "v0.85.0", "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml"),
    # The kind of the object in docs/how-to/scale.md.
    Schemas(KEDA, KEDA_VERSION, "config/crd/bases/keda.sh_scaledobjects.yaml"),
]


# The name of our program with KEDA's package `scalers`, which is the test's client of our external scaler.
KEDA_SCALER = "keda-scaler"
KEDA_PROGRAM = ROOT / "e2e" / "observe" / "keda" / "main.go"


# The tools that this run has built.
BUILT: list[str] = []


class Unavailable(Exception):
    """Go or a module is unavailable."""


def build(name: str) -> None:
    """Builds a tool unless its stamp file exists."""
    tool = TABLE[name]
    files = sorted((ROOT / tool.source).iterdir()) if tool.source else []
    ours = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12] if files else ""
    stamp = TOOLS / "-".join(filter(None, (f".{name}", tool.version, ours)))
    if stamp.exists() and all((TOOLS / "bin" / binary).exists() for binary in (*tool.packages, *tool.tests)):
        return
    if shutil.which("go") is None:
        raise Unavailable("Go is not installed")
    print(f"setup: {name} {tool.version} into .tools (once, takes minutes)", flush=True)
    began = time.monotonic()
    folder = TOOLS / "go" / name
    if tool.source:
        shutil.copytree(ROOT / tool.source, folder, dirs_exist_ok=True)
    else:
        write_module(folder, [other for other in TABLE.values() if tool.family and other.family == tool.family] or [tool])
    (TOOLS / "bin").mkdir(exist_ok=True)
    flags = " ".join(["-s -w", *(f"-X {variable}={value}" for variable, value in tool.told.items())])
    # Go links several packages of one build at the same time, and then names each binary after its package.
    output = TOOLS / "bin" / (next(iter(tool.packages)) if len(tool.packages) == 1 else "")
    go(folder, "build", "-trimpath", COMPILER_FLAGS, f"-tags={tool.tags}", f"-ldflags={flags}", "-o", f"{output}", *tool.packages.values())
    for binary, package in tool.tests.items():
        go(folder, "test", "-c", "-trimpath", "-ldflags=-s -w", "-o", str(TOOLS / "bin" / binary), package)
    copy_files(name, folder)
    stamp.touch()
    BUILT.append(name)
    print(f"setup: {name} took {time.monotonic() - began:.0f} s", flush=True)


def build_keda_scaler() -> None:
    """Builds the program inside a copy of KEDA's module, and so with the dependencies that KEDA pins. The package `scalers` has
    a file for each of 80 scalers. The copy keeps only the external scaler, unchanged, which needs a tenth of the dependencies."""
    stamp = TOOLS / f".{KEDA_SCALER}-{KEDA_VERSION}-{hashlib.sha256(KEDA_PROGRAM.read_bytes()).hexdigest()[:12]}"
    if stamp.exists() and (TOOLS / "bin" / KEDA_SCALER).exists():
        return
    if shutil.which("go") is None:
        raise Unavailable("Go is not installed")
    print(f"setup: {KEDA_SCALER} {KEDA_VERSION} into .tools (once, takes minutes)", flush=True)
    began = time.monotonic()
    (TOOLS / "go").mkdir(parents=True, exist_ok=True)
    (TOOLS / "bin").mkdir(exist_ok=True)
    found = json.loads(go(TOOLS / "go", "mod", "download", "-json", f"{KEDA}@{KEDA_VERSION}"))
    folder = TOOLS / "go" / KEDA_SCALER
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(found["Dir"], folder)
    for file in (folder / "pkg" / "scalers").glob("*.go"):
        if file.name not in ("scaler.go", "external_scaler.go"):
            file.unlink()
    # Writes the only name that external_scaler.go takes from another scaler's file, with KEDA's value.
    (folder / "pkg" / "scalers" / "rest.go").write_text('package scalers\n\nconst externalMetricType = "External"\n')
    (folder / "cmd" / KEDA_SCALER).mkdir()
    shutil.copy(KEDA_PROGRAM, folder / "cmd" / KEDA_SCALER)
    go(folder, "build", "-trimpath", "-ldflags=-s -w", "-o", str(TOOLS / "bin" / KEDA_SCALER), f"./cmd/{KEDA_SCALER}")
    stamp.touch()
    BUILT.append(KEDA_SCALER)
    print(f"setup: {KEDA_SCALER} took {time.monotonic() - began:.0f} s", flush=True)


def copy_files(name: str, folder: pathlib.Path) -> None:
    """Copies the `files` of a tool from its module. The module cache is removed after the build."""
    for path in TABLE[name].files:
        found = json.loads(go(folder, "mod", "download", "-json", f"{TABLE[name].module}@{TABLE[name].version}"))
        source, target = pathlib.Path(found["Dir"]) / path, TOOLS / name / pathlib.Path(path).name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)


def write_module(folder: pathlib.Path, tools: list[Tool]) -> None:
    """Writes a Go module that requires these tools. `go build` adds the dependencies. (`go mod tidy` would download those of all tests
    too: 1.1 GB instead of 0.6 GB, and 40 s more for Kubernetes.)"""
    folder.mkdir(parents=True, exist_ok=True)
    imports = "".join(f'import _ "{package}"\n' for tool in tools for package in (*tool.packages.values(), *tool.tests.values()))
    (folder / "tools.go").write_text(f"//go:build tools\n\npackage tools\n\n{imports}")
    required = sorted({f"require {tool.module} {tool.version}\n" for tool in tools})
    (folder / "go.mod").write_text(f"module tools\n\ngo 1.24\n\n{''.join(required)}")
    if any(tool.module == KUBERNETES for tool in tools):
        replace_staging(folder)


def fetch_schemas() -> None:
    """Copies the files of all modules into one folder. The repository contains none of these files."""
    stamp = TOOLS / ("." + "-".join(["schemas", *(schemas.version for schemas in SCHEMAS)]))
    if stamp.exists() and (TOOLS / "schemas").exists():
        return
    if shutil.which("go") is None:
        raise Unavailable("Go is not installed")
    shutil.rmtree(TOOLS / "schemas", ignore_errors=True)
    (TOOLS / "schemas").mkdir(parents=True)
    for schemas in SCHEMAS:
        found = json.loads(go(TOOLS, "mod", "download", "-json", f"{schemas.module}@{schemas.version}"))
        files = sorted(pathlib.Path(found["Dir"]).glob(schemas.files))
        if not files:
            raise Unavailable(f"{schemas.module} {schemas.version} has no {schemas.files}")
        for file in files:
            shutil.copy(file, TOOLS / "schemas" / f"{schemas.module.replace('/', '-')}-{file.name}")
    stamp.touch()
    BUILT.append("schemas")


def replace_staging(folder: pathlib.Path) -> None:
    """Replaces Kubernetes' staging modules, which its go.mod takes from local folders, by the published modules of version v0.X.Y."""
    found = json.loads(go(folder, "mod", "download", "-json", f"{KUBERNETES}@{KUBERNETES_VERSION}"))
    mod = json.loads(go(folder, "mod", "edit", "-json", found["GoMod"]))
    version = "v0" + KUBERNETES_VERSION.removeprefix("v1")
    rows = [f"replace {r['Old']['Path']} => {r['Old']['Path']} {version}" for r in mod["Replace"] or [] if r["New"]["Path"].startswith("./staging")]
    with (folder / "go.mod").open("a") as file:
        file.write("\n" + "\n".join(rows) + "\n")


def go(folder: pathlib.Path, *arguments: str) -> str:
    # Use the installed toolchain and fetch no other. The caches are in .tools, so that `make clean` removes them.
    own = {"GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod -modcacherw"}
    own |= {"GOMODCACHE": str(TOOLS / "go" / "mod"), "GOCACHE": str(TOOLS / "go" / "cache")}
    done = subprocess.run(["go", *arguments], cwd=folder, env=os.environ | own, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"go {' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout


def main(names: list[str]) -> int:
    others = {"schemas": fetch_schemas, KEDA_SCALER: build_keda_scaler}
    unknown = [name for name in names if name not in TABLE and name not in others]
    if unknown or not names:
        print(f"usage: cluster_tools.py TOOL...  with TOOL one of {' '.join([*TABLE, *others])}", file=sys.stderr)
        return 2
    for name in names:
        try:
            others.get(name, lambda name=name: build(name))()
        except Unavailable as why:
            print(f"setup: {name} cannot be built here, and tests that need it will be SKIPPED: {why}", file=sys.stderr)
            return UNAVAILABLE
    # Remove the module and build caches: gigabytes that are useless after the build. A run that builds nothing leaves them, because
    # another run may be using them.
    if BUILT:
        shutil.rmtree(TOOLS / "go", ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
