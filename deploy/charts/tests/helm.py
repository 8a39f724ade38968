"""Runs Helm on the chart, and reads YAML with it, because Python's standard library has no reader for YAML."""

import base64
import functools
import json
import os
import pathlib
import re
import subprocess
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy/charts/switchpoint"
HELM = ROOT / ".tools" / "bin" / "helm"
RELEASE = "sp"
NAMESPACE = "switchpoint"
SECONDS_MAX = 120
# A chart whose only template turns the documents of a file into JSON.
READER = """{{ $all := list -}}
{{ range splitList "\\n---\\n" (printf "\\n%s" (.Files.Get "input.yaml")) -}}
{{ $one := fromYaml . -}}{{ if $one.Error }}{{ fail $one.Error }}{{ end -}}
{{ if $one }}{{ $all = append $all $one }}{{ end -}}
{{ end -}}
{{ dict "apiVersion" "v1" "kind" "Read" "documents" $all | toJson }}
"""
KEY = '{{ dict "apiVersion" "v1" "kind" "Read" "key" (genPrivateKey "ecdsa") | toJson }}\n'

Object = dict[str, Any]


class HelmError(Exception):
    """The error text of a failed command of Helm."""


def missing() -> str | None:
    """Returns the reason why Helm cannot run here, if there is one."""
    return None if HELM.exists() else "there is no helm; `.ci/cluster_tools.py helm` builds it where Go is installed"


def skipped(name: str, why: str) -> None:
    """Prints the line that .ci/steps.py counts as a skipped test."""
    print(f"SKIPPED {name.replace('.', '::')}: {why}", flush=True)


def helm(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Runs Helm and returns its output.

    Raises HelmError if it fails."""
    own = {"HELM_CACHE_HOME": _home("cache"), "HELM_CONFIG_HOME": _home("config"), "HELM_DATA_HOME": _home("data")}
    done = subprocess.run(
        [HELM, *arguments], env=os.environ | own | (environment or {}), capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    if done.returncode != 0:
        # Leaves out the line that Helm prints for each link of the chart into envoy-config.
        lines = [line for line in done.stderr.splitlines() if "found symbolic link" not in line]
        raise HelmError("\n".join(lines))
    return done.stdout


def _home(name: str) -> str:
    return str(pathlib.Path(tempfile.gettempdir()) / f"switchpoint-helm-{os.getuid()}" / name)


@functools.cache
def template(*arguments: str, values: pathlib.Path | None = None) -> str:
    """Returns the manifests of the chart for these arguments and values, without a cluster."""
    files = ["--values", str(values)] if values else []
    return helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *files, *arguments)


def read_yaml(text: str) -> list[Object]:
    """Returns the documents of a YAML text."""
    return _reader(READER, text)["documents"]


def private_key() -> str:
    """Returns a new private key, as PEM."""
    return _reader(KEY, "")["key"]


def _reader(chart_template: str, text: str) -> Object:
    with tempfile.TemporaryDirectory() as folder:
        chart = pathlib.Path(folder)
        (chart / "templates").mkdir()
        (chart / "Chart.yaml").write_text("apiVersion: v2\nname: reader\nversion: 0.1.0\n")
        (chart / "templates" / "read.yaml").write_text(chart_template)
        (chart / "input.yaml").write_text(text)
        output = helm("template", "reader", str(chart))
    return json.loads(output[output.index("{") :])


@functools.cache
def objects(*arguments: str, values: pathlib.Path | None = None) -> dict[tuple[str, str, str], Object]:
    """Returns the objects of the chart by kind, namespace and name."""
    return by_name(read_yaml(template(*arguments, values=values)))


def by_name(documents: list[Object]) -> dict[tuple[str, str, str], Object]:
    found = {}
    for one in documents:
        key = (one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"])
        if key in found:
            raise AssertionError(f"two objects {key}")
        found[key] = one
    return found


def decoded(text: str) -> str:
    """Returns the text of a value of a Secret."""
    return base64.b64decode(text).decode()


# Base64 of certificates and keys, which are new in each run.
SECRET = re.compile(r"(?m)^(  (?:tls\.crt|tls\.key|ca\.crt): )\S+$")
CHECKSUM = re.compile(r"(?m)^( +checksum/\w+: )\S+$")
# Goldens leave out what stems from envoy-config, because test_envoy.py compares it with the files of envoy-config.
TEXTS = "envoy|clusters|http_filters|virtual_hosts|connection_manager"
BLOCK = re.compile(rf"(?m)^(  (?:{TEXTS})\.yaml: \|\n)(?:    .*\n|\n)+")
# Goldens leave out the dashboards, because test_templates.py compares the dashboards with their files.
DASHBOARD = re.compile(r"(?m)^(  [\w-]+\.json: \|\n)(?:    .*\n|\n)+")
MADE = re.compile(r'("switchpoint/made-on-day":")\d+')
PATCHES = re.compile(r"(?m)^(  (?:configPatches|jsonPatches|http):\n)(?:  [ -].*\n|\n)+")


def golden(text: str) -> str:
    """Returns the manifests without what is new in each run, and without what stems from envoy-config and dashboards."""
    text = MADE.sub(r"\1(a day)", text)
    text = CHECKSUM.sub(r"\1(a checksum)", SECRET.sub(r"\1(base64)", text))
    text = DASHBOARD.sub(r"\1    # from dashboards\n", text)
    text = PATCHES.sub(r"\1  # from envoy-config\n", BLOCK.sub(r"\1    # from envoy-config\n", text))
    return re.sub(r"[ \t]+\n", "\n", text)
