"""Compares the ways to let the picker know the prompt in Istio: by hit rate and time to the first token on one trace."""

import contextlib
import json
import sys
import time
from typing import Iterator

import chat
import engines
import istio
import istio_pool
import istio_steps as steps
import kube
import node
from istio_steps import Target
from paths import HERE, RUN

# With these arguments, the engines take as long as measured engines, and send the first token immediately.
REAL_ARGUMENTS = ["--listen=$(POD_IP):8000", "--speed=1"]
# The picker's configuration for gateways where only a header shows which requests belong to one conversation.
SESSIONS = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: session-affinity-scorer
  parameters: {strategy: session_id}
- type: max-score-picker
"""
# The pause after a change of the module: istiod pushes a change within a second, and Envoy takes about another second to load the module.
SWITCH_SECONDS = 6
SESSION_HEADER = "x-session-id: CONVERSATION"
FILE = "wasmplugin.yaml"


@contextlib.contextmanager
def real_engines() -> Iterator[None]:
    """Makes engines that are installed meanwhile take as long as measured engines. The next drill installs the fast engines again."""
    before = engines.ARGUMENTS
    engines.ARGUMENTS = REAL_ARGUMENTS
    try:
        yield
    finally:
        engines.ARGUMENTS = before


def measured() -> str:
    rows: dict[str, dict] = {}
    with real_engines():
        istio.install_shipped("envoyfilter.yaml")
        try:
            target = steps.shipped_target()
            rows["envoyfilter.yaml"] = trace(target)
            istio.apply_shipped(FILE)
            rows["wasmplugin.yaml"] = switched(target)
            apply_at_the_headers()
            rows["at the headers"] = switched(target)
            choose_by_session()
            rows["at the headers, a session header"] = switched(target, SESSION_HEADER)
            rows["Istio alone"] = without_picker()
        finally:
            istio.remove_shipped(FILE)
            istio.apply_daemon()
            istio.restart_daemon()
        try:
            rows["InferencePool"] = trace(istio_pool.install())
        finally:
            istio_pool.remove()
    written = {"place": "Istio on the node", "rows": [{"decision": name, **row} for name, row in rows.items()]}
    (RUN / "istio-body-rows.json").write_text(json.dumps(written, indent=1))
    return "; ".join(f"{name}: {described(row)}" for name, row in rows.items())


def trace(target: Target, *headers: str) -> dict:
    return json.loads(node.run(sys.executable, str(HERE / "multi_turn.py"), target.address, target.engines(), *headers))


def described(row: dict) -> str:
    first = row["first_ms"]
    return f"{row['hit_rate']:.0%} cached, {row['stayed']:.0%} stayed, first token {first['mean']:.0f} ms (mean), {first['p50']:.0f} ms (median), {first['p90']:.0f} ms (p90)"


def switched(target: Target, *headers: str) -> dict:
    """Sends the trace after a change of the gateway's configuration, as soon as the picker answers with this configuration."""
    time.sleep(SWITCH_SECONDS)
    chat.until_answered(target.address)
    return trace(target, *headers)


def apply_at_the_headers() -> None:
    """Applies the WasmPlugin of the shipped file, changed so that the picker decides without the body."""
    plugin = istio.objects(FILE)[0]
    plugin["spec"]["pluginConfig"]["decide_at"] = "headers"
    kube.apply(json.dumps(plugin), istio.NAMESPACE)


def choose_by_session() -> None:
    """Gives the daemon a configuration that follows the session header."""
    pools = "pools:\n- name: default\n  inferencePool: {namespace: default, name: inference}\n  config: /etc/switchpointd/sessions.yaml\n"
    data = json.dumps({"data": {"pools.yaml": pools, "sessions.yaml": SESSIONS}})
    kube.kubectl("patch", "configmap", "switchpointd", "-n", "switchpoint", "--type=merge", "-p", data)
    istio.restart_daemon()


def without_picker() -> dict:
    """Sends the trace with Istio's load balancing over the Service. The trace goes to the pod's address, because the gateway's probe
    asks the picker and so fails."""
    kube.kubectl("delete", "wasmplugin/switchpoint", "envoyfilter/switchpoint", "-n", istio.NAMESPACE)
    target = Target(f"{istio.gateway_pod()['status']['podIP']}:80", "default")
    return switched(target)
