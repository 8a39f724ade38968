"""The published conformance suite of the Gateway API Inference Extension, with Istio as its gateway and our ext_proc server as its picker.

The suite and its manifests are unchanged. They name two images: `echo-basic`, which is built from its module, and `lwepp`, upstream's
picker for tests, whose place our daemon takes. An EnvoyFilter (MAPPING) does at the gateway what lwepp does only for this suite."""

import collections
import json
import re
import subprocess
import time
from typing import Iterator

import images
import istio
import kube
import manifests
import node
from istio_steps import SUBSET_KEY, Failed, Outcome
from paths import BIN, DEB, NODE_ADDRESS, ROOT, RUN, Skipped

SUITE = "conformance.test"
ECHO = "echo-basic"
# The images that the suite's manifests name.
ECHO_IMAGE = "k8s-staging-gateway-api/echo-basic:v20251106-v1.3.0-263-g47c3435c"
PICKER_IMAGE = "gateway-api-inference-extension/lwepp:v1.6.0"
BUNDLE = "v1.6.0"
BUNDLE_ANNOTATION = "inference.networking.k8s.io/bundle-version"
INFRA, BACKENDS = "inference-conformance-infra", "inference-conformance-app-backend"
PICKERS = ("primary", "secondary", "appprotocol-http", "appprotocol-h2c", "dp")
SECONDS_MAX = 3600
# Matches `--- PASS: TestConformance/NAME (1.23s)`, the line of a test of the suite, but not the lines of the test's steps.
RESULT = re.compile(r"^\s*--- (PASS|FAIL|SKIP): TestConformance/([^/\s]+) \(", re.MULTILINE)
METRICS_PORT = 9091
COUNTERS = ("llm_d_epp_extproc_streams_total", "switchpoint_endpoint_served_total")
# The tests that fail, with the reasons. The drill also fails if one of these tests passes, so that this list stays true.
KNOWN = {
    "GatewayWeightedAcrossTwoInferencePools": "Istio asks one picker, that of the rule's last pool, for the requests of both. If the "
    "test names a pod of the first pool, this picker has no endpoint to choose and answers 503, as the protocol says",
}
SERVED = "x-gateway-destination-endpoint-served"
# Starts our daemon by the arguments of lwepp.
ENTRYPOINT = """#!/bin/sh
while [ $# -gt 1 ]; do
  case $1 in
    --pool-name) name=$2 ;;
    --pool-namespace) namespace=$2 ;;
    --grpc-port) port=$2 ;;
    --grpc-health-port) health=$2 ;;
  esac
  shift 2
done
printf 'pools:\\n- {name: %s, inferencePool: {namespace: %s, name: %s}}\\n' "$name" "$namespace" "$name" > /tmp/pools.yaml
exec /switchpointd serve --pools=/tmp/pools.yaml --listen-ext-proc=0.0.0.0:$port --listen-health=0.0.0.0:$health --listen-metrics=0.0.0.0:9091
"""
# Without a load balancer in the cluster, a Gateway has no address unless its Service is a ClusterIP.
CLASS_DEFAULTS = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "gateway-class-defaults", "labels": {"gateway.istio.io/defaults-for-class": "istio"}},
    "data": {"service": "spec:\n  type: ClusterIP\n"},
}
# lwepp takes the endpoints of the header `test-epp-endpoint-selection`; the protocol's name for this header is the subset hint. Istio
# forwards only `envoy.lb` to pickers. lwepp also copies the endpoint that the gateway reports into a header of the reply.
MAPPING = f"""
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {{name: conformance-mapping}}
spec:
  configPatches:
  - applyTo: HTTP_FILTER
    match: &first
      context: GATEWAY
      listener: {{filterChain: {{filter: {{name: envoy.filters.network.http_connection_manager}}}}}}
    patch:
      operation: INSERT_FIRST
      value:
        name: selection
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config
          request_rules:
          - header: test-epp-endpoint-selection
            on_header_present: {{metadata_namespace: envoy.lb.subset_hint, key: {SUBSET_KEY}, type: STRING}}
  - applyTo: HTTP_FILTER
    match: *first
    patch:
      operation: INSERT_FIRST
      value:
        name: served
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation
          mutations:
            response_mutations:
            - append:
                header: {{key: x-conformance-test-served-endpoint, value: "%DYNAMIC_METADATA(envoy.lb:{SERVED})%"}}
                append_action: OVERWRITE_IF_EXISTS_OR_ADD
  - applyTo: HTTP_FILTER
    match:
      context: GATEWAY
      listener: {{filterChain: {{filter: {{name: envoy.filters.network.http_connection_manager, subFilter: {{name: envoy.filters.http.ext_proc}}}}}}}}
    patch:
      operation: MERGE
      value:
        name: envoy.filters.http.ext_proc
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
          metadata_options: {{forwarding_namespaces: {{untyped: [envoy.lb.subset_hint]}}}}
"""


def push_images() -> None:
    for name in (SUITE, ECHO):
        if not (BIN / name).exists():
            raise Skipped(f"{name} is not built into .tools (.ci/cluster_tools.py conformance)")
    images.push(images.Image(ECHO_IMAGE, [{f"/{ECHO}": BIN / ECHO}], f"/{ECHO}"))
    daemon = {"/switchpointd": images.RELEASE / "switchpointd", "/lwepp": ENTRYPOINT.encode()}
    images.push(images.Image(PICKER_IMAGE, [images.base() | images.shell(), daemon], "/lwepp"))


def other_versions() -> list[str]:
    """Returns the CRDs of the Inference Extension in other versions, which the suite refuses beside its own versions."""
    found = json.loads(kube.kubectl("get", "crd", "-o", "json"))["items"]
    return [crd["metadata"]["name"] for crd in found if crd["metadata"].get("annotations", {}).get(BUNDLE_ANNOTATION, BUNDLE) != BUNDLE]


def istio_objects() -> Iterator[str]:
    """Returns `inference-pool-istio.yaml` for each picker's Service: the patch in the namespace of the gateway, the rest in the
    namespace of the Service."""
    shipped = (ROOT / "envoy-config/kubernetes/inference-pool-istio.yaml").read_text()
    for picker in PICKERS:
        service = f"{picker}-endpoint-picker-svc"
        text = shipped.replace("switchpointd.inference.svc", f"{service}.{BACKENDS}.svc").replace("name: switchpointd, namespace: inference", f"name: {service}, namespace: {BACKENDS}")
        rule, patch = text.split("\n---\n")
        yield f"{rule}\n---\n{patch.replace(f'namespace: {BACKENDS}', f'namespace: {INFRA}', 1)}"


def install() -> None:
    istio.install()
    push_images()
    for crd in other_versions():
        kube.kubectl("delete", "crd", crd)
    kube.apply(json.dumps(CLASS_DEFAULTS), istio.NAMESPACE)
    for namespace in (INFRA, BACKENDS):
        kube.apply(manifests.namespace(namespace))
    for text in istio_objects():
        kube.kubectl("apply", "-f", "-", stdin=text)
    kube.apply(MAPPING, INFRA)
    kube.wait_until("istiod makes its class", lambda: "istio" in kube.kubectl("get", "gatewayclass", "-o", "name"))


def remove() -> None:
    for namespace in (BACKENDS, INFRA):
        kube.kubectl("delete", "namespace", namespace, "--ignore-not-found", "--timeout=240s")
    kube.kubectl("delete", "configmap", CLASS_DEFAULTS["metadata"]["name"], "-n", istio.NAMESPACE, "--ignore-not-found")
    manifests.install_schemas()


def run_suite(*arguments: str) -> str:
    """Runs the suite in the node's network, with the cluster's DNS, because the address of a Gateway is a name. Returns its output."""
    resolver = RUN / "resolv.conf"
    resolver.write_text(f"nameserver {NODE_ADDRESS}\n")
    command = [
        str(BIN / SUITE), "-test.v", f"-test.timeout={SECONDS_MAX}s", "--gateway-class=istio", "--cleanup-base-resources=false",
        f"--report-output={RUN / 'istio-conformance-report.yaml'}", "--organization=istio", "--project=istio", f"--version={istio.TAG}", *arguments,
    ]  # fmt: skip
    output = RUN / "istio-conformance.log"
    with output.open("w") as log:
        script = f'mount --bind {resolver} /etc/resolv.conf && exec "$@"'
        subprocess.run(node.command("unshare", "--mount", "sh", "-c", script, "sh", *command), env=node.environment(), stdout=log, stderr=log, timeout=SECONDS_MAX, check=False)
    return output.read_text()


def counted() -> dict[str, int]:
    """Returns the sums over all pickers: the number of decisions, and the number of requests whose endpoint the gateway reported."""
    total: collections.Counter[str] = collections.Counter()
    for pod in kube.get("pods", BACKENDS):
        if "endpoint-picker" not in pod["metadata"]["name"]:
            continue
        page = node.run(str(DEB / "bin/busybox"), "wget", "-qO-", f"http://{pod['status']['podIP']}:{METRICS_PORT}/metrics")
        total.update(counters(page))
    return dict(total)


def counters(page: str) -> dict[str, int]:
    sums = dict.fromkeys(COUNTERS, 0)
    for row in page.splitlines():
        name = re.split(r"[{ ]", row, maxsplit=1)[0]
        if name in sums:
            sums[name] += int(float(row.rpartition(" ")[2]))
    return sums


def results(output: str) -> dict[str, list[str]]:
    """Returns the names of the tests that passed, failed, and were skipped, from the suite's output."""
    found: dict[str, list[str]] = {"PASS": [], "FAIL": [], "SKIP": []}
    for result, name in RESULT.findall(output):
        found[result].append(name)
    return found


def told(found: dict[str, list[str]]) -> str:
    words = zip(("passed", "failed", "skipped"), found.values())
    return "; ".join(f"{len(names)} {word}: {', '.join(map(with_reason, names))}" for word, names in words if names)


def with_reason(name: str) -> str:
    return f"{name} ({KNOWN[name]})" if name in KNOWN else name


def conformance() -> Outcome:
    began = time.monotonic()
    try:
        install()
        found = results(run_suite())
        seen = counted()
    finally:
        remove()
    said = f"{told(found)}; the pickers counted {seen}"
    if set(found["FAIL"]) != set(KNOWN) or found["SKIP"] or not found["PASS"]:
        raise Failed(f"{said} ({RUN / 'istio-conformance.log'})")
    if not all(seen.get(name) for name in COUNTERS):
        raise Failed(f"another picker than ours decided: {said}")
    return Outcome((None, time.monotonic() - began, said))
