"""Runs the commands of `docs/how-to/install.md` and `upgrade.md` on the node, as they are written there."""

import json
import pathlib
import re
import sys
import tempfile
import time

import engines
import kube
import node
import release
from paths import ROOT

sys.path.append(str(ROOT / ".ci"))
import doc_commands  # noqa: E402

INSTALL, UPGRADE = "docs/how-to/install.md", "docs/how-to/upgrade.md"
# The namespace of the model servers on the pages.
NAMESPACE = "inference"
# The sections of these pages whose commands the test runs, in this order. Sections for Istio and Envoy Gateway are left out, because
# neither is on the node.
SECTIONS = [
    (INSTALL, "Own gateway"),
    (UPGRADE, "Upgrade"),
    (UPGRADE, "Check"),
    (UPGRADE, "Certificates"),
    (UPGRADE, "Roll back"),
]
# Sections that begin without a release, and the namespace that they install into.
ALONE = [((INSTALL, "An Envoy of your own"), release.NAMESPACE), ((INSTALL, "ext_proc for an InferencePool"), NAMESPACE)]
# The maximum pause. On the pages, a pause lets Secrets reach pods that serve; in this test no pod serves.
PAUSE_SECONDS_MAX = 5
SECTION_SECONDS_MAX = 400
# With images in a registry, one command and one request take less than a minute. A busy machine may take ten times as long.
FIRST_ANSWER = (INSTALL, "Own gateway")
FIRST_ANSWER_SECONDS_MAX = 10 * 60


def model_servers() -> None:
    """Creates the pods that the pages expect. The chart makes the InferencePool of these pods."""
    items = json.loads(engines.manifests())["items"]
    kube.apply(json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}))
    kube.apply(json.dumps(next(item for item in items if item["kind"] == "Deployment")), NAMESPACE)
    kube.rolled_out(engines.NAME, NAMESPACE)


def fitted(values: str) -> str:
    """Returns the values with the small requests of this node."""
    added = [f"{part}: {json.dumps(release.VALUES[part])}\n" for part in ("daemon", "gateway") if not re.search(rf"(?m)^{part}:", values)]
    return values + "".join(added)


def run_section(page: str, heading: str) -> str:
    """Runs a section's commands; returns its heading and the seconds. Raises NodeError at the first command that fails, or if the first
    answer comes too late."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        script = doc_commands.lay_out(page, heading, folder, PAUSE_SECONDS_MAX)
        for file in folder.glob("*.yaml"):
            file.write_text(fitted(file.read_text()))
        node.run("bash", str(script), timeout=SECTION_SECONDS_MAX)
    seconds = time.monotonic() - began
    if (page, heading) == FIRST_ANSWER and seconds > FIRST_ANSWER_SECONDS_MAX:
        raise node.NodeError(f"the first answer came after {seconds:.0f} s, at most {FIRST_ANSWER_SECONDS_MAX}")
    return f"{heading} {seconds:.0f} s"


def remove(namespace: str) -> None:
    """Uninstalls the release, with the certificates that the chart keeps: certificates of a later generation refuse an installation with
    the values of another page."""
    kube.helm("uninstall", release.NAME, "-n", namespace, "--wait")
    kube.kubectl("delete", "secrets", "-n", namespace, "-l", f"app.kubernetes.io/instance={release.NAME}")


def run() -> str:
    """Runs all sections, and removes what the sections installed."""
    model_servers()
    done = [run_section(*section) for section in SECTIONS]
    remove(release.NAMESPACE)
    for section, namespace in ALONE:
        done.append(run_section(*section))
        remove(namespace)
    kube.kubectl("delete", "namespace", release.NAMESPACE, NAMESPACE, "--timeout=150s")
    return "; ".join(done)
