"""Mutual TLS in the mesh: the model servers have sidecars, and the mesh accepts nothing else than mutual TLS.

`WAYS` are the ways to load the picker. Each way is drilled without strict mutual TLS, with strict mutual TLS, and with strict mutual TLS
while parts fail."""

import json
import sys
import time
from typing import Callable, NamedTuple

import chat
import engines
import istio
import istio_pool
import istio_steps as steps
import istio_traffic_extension
import kube
import node
from istio_steps import Failed, Outcome, Run, Target
from paths import HERE

STRICT = {"apiVersion": "security.istio.io/v1", "kind": "PeerAuthentication", "metadata": {"name": "default"}, "spec": {"mtls": {"mode": "STRICT"}}}


class Way(NamedTuple):
    """A way to load the picker: the functions that install and remove the picker, the Deployment of the model servers, and the faults
    that the gateway must survive."""

    install: Callable[[], Target]
    remove: Callable[[], None]
    model_servers: str
    faults: Callable[[Target], list[Run]]


def shipped(name: str) -> Way:
    def install() -> Target:
        istio.install_shipped(name)
        return steps.shipped_target()

    return Way(install, lambda: istio.remove_shipped(name), "model-servers", module_faults)


def traffic_extension() -> Way:
    return Way(istio_traffic_extension.install, istio_traffic_extension.remove, "model-servers", module_faults)


def module_faults(target: Target) -> list[Run]:
    return [steps.kill_engine(target), steps.kill_daemons(target, "switchpoint", "app=switchpointd"), steps.replace_gateway(target)]


def pool_faults(target: Target) -> list[Run]:
    """Causes the faults of the drill `istio-inference-pool`: the only daemon picks each endpoint, so it is stopped in order."""
    return [steps.kill_engine(target), istio_pool.replace_daemon(target), steps.replace_gateway(target)]


WAYS: dict[str, Callable[[], Way]] = {
    "envoyfilter": lambda: shipped("envoyfilter.yaml"),
    "wasmplugin": lambda: shipped("wasmplugin.yaml"),
    "trafficextension": traffic_extension,
    "inference-pool": lambda: Way(istio_pool.install, istio_pool.remove, engines.NAME, pool_faults),
}


def drill(name: str) -> Callable[[], Outcome]:
    """Returns the drill of one way to load the picker."""
    return lambda: mutual_tls(WAYS[name]())


def mutual_tls(way: Way) -> Outcome:
    """Drills the gateway before engines with sidecars: permissive, strict, and strict with the shipped exemption."""
    began = time.monotonic()
    target = way.install()
    try:
        inject(way, target, True)
        chat.until_answered(target.address)
        remarks = [f"sidecars in {len(target.pods())} engines", steps.routes_by_prefix(target)]
        runs = [steps.only_load(target, "permissive")]
        kube.apply(json.dumps(STRICT), istio.NAMESPACE)
        kube.wait_until("the engines refuse plain HTTP", lambda: not any(map(answers, addresses(target))), 60)
        remarks.append("strict: an engine refuses plain HTTP")
        kube.kubectl("apply", "-n", target.namespace, "-f", str(istio.CONFIG / "peer-authentication.yaml"))
        kube.wait_until("the exemption is in force", lambda: all(map(answers, addresses(target))), 60)
        chat.until_answered(target.address)
        runs += [steps.only_load(target, "strict, with the exemption"), *way.faults(target)]
    finally:
        for namespace in (istio.NAMESPACE, target.namespace):
            kube.kubectl("delete", "peerauthentication", "--all", "-n", namespace)
        way.remove()
        inject(way, target, False)
    return steps.outcome(began, runs, *remarks)


def inject(way: Way, target: Target, wanted: bool) -> None:
    """Restarts the engines with or without sidecars."""
    kube.kubectl("label", "namespace", target.namespace, "--overwrite", f"istio-injection={'enabled' if wanted else 'disabled'}")
    kube.kubectl("rollout", "restart", f"deployment/{way.model_servers}", "-n", target.namespace)
    kube.rolled_out(way.model_servers, target.namespace)
    for pod in target.pods():
        parts = [one["name"] for kind in ("initContainers", "containers") for one in pod["spec"].get(kind, [])]
        if ("istio-proxy" in parts) != wanted:
            raise Failed(f"the pod has {parts}")


def addresses(target: Target) -> list[str]:
    return target.engines().split(",")


def answers(engine: str) -> bool:
    """Whether an engine answers a plain HTTP request."""
    return json.loads(node.run(sys.executable, str(HERE / "chat.py"), engine))["status"] == 200
