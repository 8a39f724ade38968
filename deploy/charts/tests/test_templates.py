"""The chart's manifests: lint, goldens, errors for invalid values, and the page of all values.

    UPDATE_GOLDENS=1 python3 -m unittest discover deploy/charts/tests    writes the goldens
    UPDATE_DOCS=1 python3 -m unittest discover deploy/charts/tests       writes docs/reference/chart.md
"""

import json
import os
import pathlib
import subprocess
import sys
import unittest

import helm

HERE = pathlib.Path(__file__).resolve().parent
PAGE = helm.ROOT / "docs" / "reference" / "chart.md"
APIS = ["--api-versions", "cert-manager.io/v1", "--api-versions", "monitoring.coreos.com/v1"]


class ChartTest(unittest.TestCase):
    """Base class: skips a test that needs Helm where there is none."""

    def setUp(self) -> None:
        if why := helm.missing():
            helm.skipped(self.id(), why)
            self.skipTest(why)

    def refused(self, *arguments: str) -> str:
        """Returns the error that these arguments cause."""
        with self.assertRaises(helm.HelmError) as raised:
            helm.template(*arguments)
        return str(raised.exception)


class Goldens(ChartTest):
    def test_lint_finds_nothing(self) -> None:
        for values in sorted((HERE / "values").glob("*.yaml")):
            if "cert-manager" in values.name or values.name == "many-pools.yaml":
                continue  # `helm lint` has no way to say which APIs the cluster has
            with self.subTest(values.name):
                helm.helm("lint", "--strict", str(helm.CHART), "--values", str(values))

    def test_manifests_are_those_of_the_goldens(self) -> None:
        for values in sorted((HERE / "values").glob("*.yaml")):
            with self.subTest(values.name):
                text = helm.golden(helm.template(*APIS, values=values))
                path = HERE / "golden" / values.name
                if os.environ.get("UPDATE_GOLDENS"):
                    path.write_text(text)
                self.assertEqual(text, path.read_text(), f"{path.name}: see UPDATE_GOLDENS at the top of this file")

    def test_every_object_has_a_name_and_the_labels_of_the_release(self) -> None:
        for values in sorted((HERE / "values").glob("*.yaml")):
            for key, one in helm.objects(*APIS, values=values).items():
                with self.subTest(values=values.name, object=key):
                    self.assertEqual(one["metadata"]["labels"]["app.kubernetes.io/instance"], helm.RELEASE)
                    self.assertLessEqual(len(key[2]), 63)

    def test_another_label_replaces_the_default_one(self) -> None:
        found = helm.objects("--set", "istio.enabled=true,istio.selector.istio=null,istio.selector.app=edge")
        selector = found["EnvoyFilter", "istio-system", "sp"]["spec"]["workloadSelector"]
        self.assertEqual(selector, {"labels": {"app": "edge"}})

    def test_the_native_module_takes_the_place_of_the_wasm_filter(self) -> None:
        found = helm.objects("--set", "gateway.native=true")
        (config,) = helm.read_yaml(found["ConfigMap", helm.NAMESPACE, "sp-gateway"]["data"]["envoy.yaml"])
        manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        filters = {one["name"]: one["typed_config"] for one in manager["http_filters"]}
        self.assertNotIn("header_to_metadata", filters)
        native = filters["switchpoint"]
        self.assertEqual(native["dynamic_module_config"]["name"], "switchpoint_native")
        self.assertIn("pools", json.loads(native["filter_config"]["value"]))
        (layer,) = config["layered_runtime"]["layers"]
        self.assertTrue(layer["static_layer"]["envoy.reloadable_features.dynamic_modules_strip_custom_stat_prefix"])
        (container,) = found["Deployment", helm.NAMESPACE, "sp-gateway"]["spec"]["template"]["spec"]["containers"]
        self.assertIn("ENVOY_DYNAMIC_MODULES_SEARCH_PATH", [one["name"] for one in container["env"]])

    def test_dashboards_and_rules_are_those_of_the_repository(self) -> None:
        found = helm.objects(*APIS, values=HERE / "values" / "many-pools.yaml")
        config_map = found["ConfigMap", helm.NAMESPACE, "sp-dashboards"]
        self.assertEqual(config_map["metadata"]["labels"]["grafana_dashboard"], "1")
        files = sorted((helm.ROOT / "deploy/dashboards").glob("*.json"))
        self.assertEqual(
            {name: json.loads(text) for name, text in config_map["data"].items()},
            {f"switchpoint-{file.name}": json.loads(file.read_text()) for file in files},
        )
        (rules,) = helm.read_yaml((helm.ROOT / "deploy/dashboards" / "rules.yaml").read_text())
        rule = found["PrometheusRule", helm.NAMESPACE, "sp"]
        self.assertEqual((rule["spec"], rule["metadata"]["labels"]["release"]), (rules, "prometheus"))

    def test_each_namespace_of_a_pool_gets_only_the_rights_that_its_pools_need(self) -> None:
        found = helm.objects(*APIS, values=HERE / "values" / "many-pools.yaml")
        rights = {
            namespace: {resource for rule in one["rules"] for resource in rule["resources"]}
            for (kind, namespace, name), one in found.items()
            if kind == "Role" and name == "sp-daemon-pools-of-switchpoint"
        }
        objects = {"inferenceobjectives", "inferencemodelrewrites", "inferencemodels"}
        self.assertEqual(rights, {"prod": {"pods", "inferencepools"} | objects, "research": {"pods", "services", "endpointslices"}})

    def test_a_certificate_has_the_pools_of_its_namespace(self) -> None:
        pools = (("a", ["team-a"]), ("b", ["team-b"]), ("shared", []))
        rows = [{"name": name, "endpoints": ["10.0.0.1:1"], "hosts": [name]} | ({"proxyNamespaces": only} if only else {}) for name, only in pools]
        values = {"pools": rows, "gateway": {"enabled": False}, "sidecar": {"enabled": True, "namespaces": ["team-a", "team-b"]}}
        found = helm.objects(*APIS, *(word for key, value in values.items() for word in ("--set-json", f"{key}={json.dumps(value)}")))
        (container,) = found["Deployment", helm.NAMESPACE, "sp-daemon"]["spec"]["template"]["spec"]["containers"]
        flag = "--state-tls-client-names="
        names = [argument.removeprefix(flag) for argument in container["args"] if argument.startswith(flag)]
        self.assertEqual(names, [
            "shared=proxy.sp.switchpoint", "a=proxy.sp.team-a", "shared=proxy.sp.team-a", "b=proxy.sp.team-b", "shared=proxy.sp.team-b",
        ])  # fmt: skip
        keys = {namespace: found["Secret", namespace, "sp-proxy-tls"]["data"]["tls.key"] for namespace in ("switchpoint", "team-a", "team-b")}
        self.assertEqual(len(set(keys.values())), 3, "each namespace has a key of its own")
        for own, other in (("a", "b"), ("b", "a")):
            fragments = found["ConfigMap", f"team-{own}", "sp-sidecar"]["data"]
            self.assertIn(f"inference-pool-{own}", fragments["clusters.yaml"])
            self.assertFalse([name for name, text in fragments.items() if f"inference-pool-{other}" in text])

    def test_gateways_with_ext_proc_need_a_certificate_if_the_value_says_so(self) -> None:
        flag = "--ext-proc-tls-client-ca=/etc/switchpointd-tls/ca.crt"
        values = HERE / "values" / "ext-proc.yaml"
        for arguments, is_required in (((), False), (("--set-json", "networkPolicy.extProcGateways=[]", "--set", "extProc.clientCertificates=true"), True)):
            found = helm.objects(*APIS, *arguments, values=values)
            (container,) = found["Deployment", helm.NAMESPACE, "sp-daemon"]["spec"]["template"]["spec"]["containers"]
            self.assertEqual(flag in container["args"], is_required)

    def test_the_daemon_connects_only_where_its_pools_are(self) -> None:
        def allowed(*arguments: str) -> list[object]:
            found = helm.objects(*APIS, *arguments)
            spec = found["NetworkPolicy", helm.NAMESPACE, "sp-daemon"]["spec"]
            self.assertEqual(spec["policyTypes"], ["Ingress", "Egress"])
            return [rule["to"] for rule in spec["egress"] if "to" in rule]

        self.assertEqual(allowed(), [[{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "switchpoint"}}}]])
        ((everywhere, _),) = allowed("--set-json", 'pools=[{"name": "a", "endpoints": ["10.0.0.1:1"]}]')
        self.assertEqual(everywhere["ipBlock"]["except"], ["169.254.0.0/16"])
        further = allowed("--set-json", 'networkPolicy.egress=[{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]')
        self.assertEqual(further[1], [{"ipBlock": {"cidr": "10.0.0.0/8"}}])


class Refusals(ChartTest):
    """Each error names the value and says what is wrong with it."""

    def test_an_unknown_value_is_an_error(self) -> None:
        for value, words in {
            "gatway.enabled=true": "additional properties 'gatway' not allowed",
            "gateway.replica=3": "at '/gateway': additional properties 'replica' not allowed",
            "daemon.podDisruptionBudget.enable=true": "at '/daemon/podDisruptionBudget': additional properties 'enable' not allowed",
            "pools[0].nam=x": "at '/pools/0': additional properties 'nam' not allowed",
            "tls.certManager.issuerRef.kin=x": "additional properties 'kin' not allowed",
        }.items():
            with self.subTest(value):
                self.assertIn(words, self.refused("--set", value))

    def test_a_value_of_the_wrong_kind_is_an_error(self) -> None:
        for value, words in {
            "daemon.replicas=two": "at '/daemon/replicas': got string, want integer",
            "gateway.enabled=maybe": "at '/gateway/enabled': got string, want boolean",
            "daemon.scrapeInterval=fast": "at '/daemon/scrapeInterval': 'fast' does not match pattern",
            "istio.mode=Lua": "at '/istio/mode': value must be one of 'EnvoyFilter', 'WasmPlugin'",
            "extProc.failureMode=Open": "at '/extProc/failureMode': value must be one of 'FailClose', 'FailOpen'",
            "pools[0].name=a,pools[0].modelServers.matchLabels=null": "at '/pools/0/modelServers/matchLabels': got null, want object",
            "istio.selector.istio=null": "at '/istio/selector': minProperties: got 0, want 1",
            "pools[0].name=Llama": "at '/pools/0/name': 'Llama' does not match pattern",
            "gateway.image.digest=abc": "at '/gateway/image/digest': 'abc' does not match pattern",
        }.items():
            with self.subTest(value):
                self.assertIn(words, self.refused("--set", value))

    def test_values_that_contradict_each_other_are_an_error(self) -> None:
        pools = "pools[0].name=a,pools[0].endpoints[0]=h:1,pools[1].name=b,pools[1].endpoints[0]=h:2"
        for value, words in {
            pools: 'pools "a" and "b" both take requests for host "*"; give each its own `hosts`',
            pools.replace("name=b", "name=a"): 'two pools are named "a"',
            "pools[0].name=a,pools[0].inferencePool.name=x,pools[0].endpoints[0]=h:1": 'pool "a" has 2 sources of endpoints; give one of modelServers, inferencePool,',
            "pools[0].name=a": 'pool "a" has 0 sources',
            "extProc.enabled=true,pools[0].name=a,pools[0].inferencePool.name=a,pools[0].namespace=prod": "an InferencePool can only name a picker in its own namespace",
            "extProc.enabled=true": "set networkPolicy.extProcGateways",
            "pools[0].name=a,pools[0].endpoints={10.0.0.1:1},pools[0].proxyNamespaces={x}": "where a gateway serves all pools",
            "tls.certManager.enabled=true": "Install cert-manager first",
            "monitoring.podMonitor.enabled=true": "Install the Prometheus operator first",
            "prometheusRule.enabled=true": "Install the Prometheus operator first",
            "tls.existingSecret.daemon=x": "tls.existingSecret.proxy is not",
            "gateway.terminationGracePeriodSeconds=12": "must exceed gateway.drainSeconds (10)",
            "envoyGateway.enabled=true,envoyGateway.namespace=edge": "name a Service of that namespace",
        }.items():
            with self.subTest(value):
                self.assertIn(words, self.refused("--set", value))

    def test_proxies_elsewhere_need_a_cluster_issuer(self) -> None:
        error = self.refused(*APIS, "--set", "tls.certManager.enabled=true,istio.enabled=true")
        self.assertIn('proxies in namespace "istio-system" need tls.certManager.issuerRef', error)


class Page(unittest.TestCase):
    def test_every_value_is_in_the_page(self) -> None:
        done = subprocess.run([sys.executable, HERE.parent / "values_page.py"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        if os.environ.get("UPDATE_DOCS"):
            PAGE.write_text(done.stdout)
        self.assertEqual(done.stdout, PAGE.read_text(), "see UPDATE_DOCS at the top of this file")


if __name__ == "__main__":
    unittest.main()
