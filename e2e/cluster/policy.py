"""Makes pods fit on a small node: all manifests are applied as shipped, and their CPU requests add up to more than two cores."""

import json

import kube

CPU = "10m"
NAME = "small-cpu-requests"


def shrink(field: str) -> str:
    """Returns the CEL expression that changes the request of each container of `field` to CPU."""
    kind = f"Object.spec.{field}"
    return f'object.spec.{field}.map(c, {kind}{{name: c.name, resources: {kind}.resources{{requests: {{"cpu": "{CPU}"}}}}}})'


def mutation(field: str) -> dict:
    given = f"has(object.spec.{field}) ? Object{{spec: Object.spec{{{field}: {shrink(field)}}}}} : Object{{}}"
    return {"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": given}}


def install() -> None:
    version = "admissionregistration.k8s.io/v1"
    policy = {
        "apiVersion": version,
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": NAME},
        "spec": {
            "matchConstraints": {"resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]},
            "reinvocationPolicy": "IfNeeded",
            "mutations": [mutation("containers"), mutation("initContainers")],
        },
    }
    binding = {"apiVersion": version, "kind": "MutatingAdmissionPolicyBinding", "metadata": {"name": NAME}, "spec": {"policyName": NAME}}
    kube.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": [policy, binding]}))
