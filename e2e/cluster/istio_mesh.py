"""Mutual TLS in the mesh: the model servers have sidecars, and the mesh accepts nothing else than mutual TLS."""

import json
import sys
import time

import chat
import istio
import istio_steps as steps
import kube
import node
from istio_steps import Failed, Outcome, Target
from paths import HERE

NAMESPACE = "default"
ENGINES = "model-servers"
STRICT = {"apiVersion": "security.istio.io/v1", "kind": "PeerAuthentication", "metadata": {"name": "default"}, "spec": {"mtls": {"mode": "STRICT"}}}
FILE = "envoyfilter.yaml"


def mutual_tls() -> Outcome:
    """The gateway of the shipped files before engines with sidecars: permissive, strict, and strict with the shipped exemption."""
    began = time.monotonic()
    istio.install_shipped(FILE)
    try:
        inject(True)
        target = steps.shipped_target()
        chat.until_answered(target.address)
        remarks = [f"sidecars in {len(target.pods())} engines", steps.routes_by_prefix(target)]
        runs = [steps.only_load(target, "permissive")]
        kube.apply(json.dumps(STRICT), istio.NAMESPACE)
        kube.wait_until("the engines refuse plain HTTP", lambda: not any(map(answers, addresses(target))), 60)
        remarks.append("strict: an engine refuses plain HTTP")
        kube.kubectl("apply", "-n", NAMESPACE, "-f", str(istio.CONFIG / "peer-authentication.yaml"))
        kube.wait_until("the exemption is in force", lambda: all(map(answers, addresses(target))), 60)
        chat.until_answered(target.address)
        runs += [
            steps.only_load(target, "strict, with the exemption"),
            steps.kill_engine(target),
            steps.kill_daemons(target, "switchpoint", "app=switchpointd"),
            steps.replace_gateway(target),
        ]
    finally:
        kube.kubectl("delete", "peerauthentication", "--all", "-n", istio.NAMESPACE)
        kube.kubectl("delete", "peerauthentication", "--all", "-n", NAMESPACE)
        istio.remove_shipped(FILE)
        inject(False)
    return steps.outcome(began, runs, *remarks)


def inject(wanted: bool) -> None:
    """Restarts the engines with or without sidecars."""
    kube.kubectl("label", "namespace", NAMESPACE, "--overwrite", f"istio-injection={'enabled' if wanted else 'disabled'}")
    kube.kubectl("rollout", "restart", f"deployment/{ENGINES}", "-n", NAMESPACE)
    kube.rolled_out(ENGINES, NAMESPACE)
    for pod in Target("", NAMESPACE).pods():
        parts = [one["name"] for kind in ("initContainers", "containers") for one in pod["spec"].get(kind, [])]
        if ("istio-proxy" in parts) != wanted:
            raise Failed(f"the pod has {parts}")


def addresses(target: Target) -> list[str]:
    return target.engines().split(",")


def answers(engine: str) -> bool:
    """Whether an engine answers a plain HTTP request."""
    return json.loads(node.run(sys.executable, str(HERE / "chat.py"), engine))["status"] == 200
