"""Istio's own way to an InferencePool: a Gateway and an HTTPRoute, from which istiod makes an ext_proc filter."""

import json

import chat
import engines
import istio
import kube
import release
from istio_steps import Target

NAME = "inference"


def gateway_api() -> str:
    """A Gateway of Istio's class, for which istiod makes a Deployment and a Service, and a route to the InferencePool."""
    group = "inference.networking.k8s.io"
    gateway = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "Gateway",
        "metadata": {"name": NAME, "annotations": {"networking.istio.io/service-type": "ClusterIP"}},
        "spec": {"gatewayClassName": "istio", "listeners": [{"name": "http", "port": 80, "protocol": "HTTP"}]},
    }
    rule = {"backendRefs": [{"group": group, "kind": "InferencePool", "name": engines.NAME}]}
    route = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": NAME},
        "spec": {"parentRefs": [{"name": NAME}], "rules": [rule]},
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [gateway, route]})


def install() -> Target:
    """The chart's ext_proc release as the picker of the InferencePool, and a Gateway in front of it."""
    istio.install()
    engines.install()
    release.install_ext_proc("--set", "extProc.istio.enabled=true")
    kube.apply(gateway_api(), engines.NAMESPACE)
    name = f"{NAME}-istio"
    kube.wait_until("istiod makes the gateway", lambda: any(d["metadata"]["name"] == name for d in kube.get("deployments", engines.NAMESPACE)))
    kube.rolled_out(name, engines.NAMESPACE)
    target = Target(istio.service_address(name, engines.NAMESPACE), engines.NAMESPACE)
    chat.until_answered(target.address)
    return target


def remove() -> None:
    kube.kubectl("delete", "gateway,httproute", NAME, "-n", engines.NAMESPACE, "--ignore-not-found")
    kube.helm("uninstall", release.EXT_PROC_NAME, "-n", engines.NAMESPACE, "--ignore-not-found")
