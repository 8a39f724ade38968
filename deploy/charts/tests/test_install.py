"""The chart on a real API server: every object is accepted, and certificates outlive upgrades."""

import copy
import json
import pathlib
import re
import ssl
import sys
import unittest
from datetime import datetime

import cluster
import helm
import processes
from test_templates import APIS, ChartTest

sys.path.append(str(helm.ROOT / ".ci"))
import doc_commands  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
DEFINITIONS = ("inferencepools", "gateway.networking", "gateway.envoyproxy", "istio.io-api")
OPERATORS = ("cert-manager", "prometheus-operator", "kedacore")
# Namespaces of the value files and of the documents.
NAMESPACES = ("switchpoint", "istio-system", "envoy-gateway-system", "prod", "research", "edge", "cert-manager", "default")
SECRETS = ("sp-ca", "sp-daemon-tls", "sp-proxy-tls")


def documented() -> list[tuple[str, helm.Object]]:
    """Returns the manifests for the API server that the documents show, with their pages."""
    found = []
    for page in sorted((helm.ROOT / "docs").rglob("*.md")):
        for block in doc_commands.blocks(page.read_text()):
            if block.language == "yaml" and re.search(r"(?m)^apiVersion: (?!llm-d\.ai/)", block.text):
                found += [(page.name, one) for one in helm.read_yaml(block.text)]
    assert found, "the documents show no manifest"
    return found


class Install(ChartTest):
    shared: cluster.Cluster | None = None

    @classmethod
    def tearDownClass(cls) -> None:
        if cls.shared:
            cls.shared.close()
            cls.shared = None

    def setUp(self) -> None:
        super().setUp()
        if why := cluster.missing():
            helm.skipped(self.id(), why)
            self.skipTest(why)
        if not Install.shared:
            Install.shared = cluster.Cluster()
            for namespace in NAMESPACES:
                if namespace != "default":
                    Install.shared.create_namespace(namespace)
            Install.shared.define(*DEFINITIONS)
        self.cluster = Install.shared

    def install(self, namespace: str, *arguments: str, command: str = "install") -> str:
        return self.cluster.helm(command, helm.RELEASE, str(helm.CHART), "--namespace", namespace, *arguments)

    def secrets(self, namespace: str) -> dict[str, dict[str, str]]:
        return {name: self.cluster.secret(namespace, name) for name in SECRETS}

    def test_the_api_server_accepts_every_object(self) -> None:
        """Objects of cert-manager and the Prometheus operator are refused without their definitions, and accepted with them."""
        for settings, why in [
            ("tls.certManager.enabled=true", "Install cert-manager first"),
            ("monitoring.podMonitor.enabled=true", "Install the Prometheus operator first"),
            ("prometheusRule.enabled=true", "Install the Prometheus operator first"),
        ]:
            with self.subTest(settings), self.assertRaisesRegex(helm.HelmError, why):
                self.install("switchpoint", "--set", settings, "--dry-run=server")
        self.cluster.define(*OPERATORS)
        kinds = set()
        for values in sorted((HERE / "values").glob("*.yaml")):
            self.install("switchpoint", "--values", str(values), "--dry-run=server")
            for key, one in helm.objects(*APIS, values=values).items():
                with self.subTest(values=values.name, object=key):
                    self.cluster.dry_run(one)
                    kinds.add(one["kind"])
        self.assertLessEqual({"Certificate", "EnvoyFilter", "Issuer", "PodMonitor", "PrometheusRule"}, kinds)
        self.refuses_mistakes(helm.objects(*APIS, values=HERE / "values" / "many-pools.yaml"))
        for page, one in documented():
            with self.subTest(page=page, object=one["metadata"]["name"]):
                self.cluster.dry_run(one)

    def refuses_mistakes(self, found: dict[tuple[str, str, str], helm.Object]) -> None:
        """Checks that the dry run finds an unknown field, and a value that the published schema does not allow."""
        unknown = copy.deepcopy(found["Deployment", "switchpoint", "sp-daemon"])
        unknown["spec"]["template"]["spec"]["unheardOf"] = 1
        interval = copy.deepcopy(found["PodMonitor", "switchpoint", "sp-daemon"])
        interval["spec"]["podMetricsEndpoints"][0]["interval"] = "often"
        for one, why in ((unknown, "unheardOf"), (interval, "often")):
            with self.assertRaisesRegex(cluster.Refused, why):
                self.cluster.dry_run(one)

    def test_upgrades_keep_certificates_and_generations_renew_them(self) -> None:
        namespace = "certificates"
        self.cluster.create_namespace(namespace)
        self.install(namespace)
        first = self.secrets(namespace)
        ca, leaf = first["sp-ca"], first["sp-daemon-tls"]
        self.assertEqual(leaf["ca.crt"], ca["tls.crt"])
        times = re.findall(rb"\x17\x0d(\d{12})Z", ssl.PEM_cert_to_DER_cert(helm.decoded(leaf["tls.crt"])))
        begin, end = (datetime.strptime(time.decode(), "%y%m%d%H%M%S") for time in times)
        self.assertEqual((end - begin).days, 90)

        def upgrade(*settings: str) -> dict[str, dict[str, str]]:
            arguments = [argument for setting in settings for argument in ("--set", setting)]
            self.install(namespace, *arguments, command="upgrade")
            return self.secrets(namespace)

        self.assertEqual(upgrade("gateway.replicas=3"), first, "an upgrade of something else")
        # When the namespace istio-system gets its first proxies, it gets a new certificate of the same CA.
        upgrade("istio.enabled=true")
        istio = self.cluster.secret("istio-system", "sp-proxy-tls")
        self.assertEqual(istio["ca.crt"], leaf["ca.crt"])
        self.assertNotEqual(istio["tls.key"], first["sp-proxy-tls"]["tls.key"])

        # A certificate is renewed, with the same CA, when a third of its time is over: after 30 days.
        path = f"/api/v1/namespaces/{namespace}/secrets/sp-proxy-tls"
        made = "switchpoint/made-on-day"
        today = int(self.cluster.request("GET", path)["metadata"]["annotations"][made])
        for days, is_kept in ((29, True), (31, False)):
            secret = self.cluster.request("GET", path)
            secret["metadata"]["annotations"][made] = str(today - days)
            secret["metadata"] = {key: secret["metadata"][key] for key in ("name", "namespace", "labels", "annotations")}
            self.cluster.request("PATCH", f"{path}?fieldManager=helm", secret)
            renewed = upgrade()
            self.assertEqual(renewed["sp-proxy-tls"]["tls.crt"] == first["sp-proxy-tls"]["tls.crt"], is_kept, days)
        self.assertEqual(renewed["sp-proxy-tls"]["ca.crt"], first["sp-proxy-tls"]["ca.crt"])
        self.assertEqual(renewed["sp-daemon-tls"], first["sp-daemon-tls"])
        self.assertEqual(upgrade(), renewed)

        second = upgrade("tls.generation=2")
        self.assertEqual(second["sp-ca"], ca, "a new generation keeps the CA")
        for name in ("sp-daemon-tls", "sp-proxy-tls"):
            self.assertNotEqual(second[name]["tls.crt"], first[name]["tls.crt"], name)
            self.assertEqual(second[name]["ca.crt"], first[name]["ca.crt"], name)

        with self.assertRaisesRegex(helm.HelmError, "raise tls.generation some minutes later"):
            upgrade("tls.generation=3", "tls.caGeneration=2")
        with self.assertRaisesRegex(helm.HelmError, "tls.trustPreviousCa must be true"):
            upgrade("tls.generation=2", "tls.caGeneration=2", "tls.trustPreviousCa=false")
        # A user who may edit Secrets in a namespace of proxies cannot stop the upgrade by an edit.
        third = upgrade("tls.generation=2", "tls.caGeneration=2", "istio.enabled=true")
        edited = self.cluster.secret("istio-system", "sp-proxy-tls")
        self.assertNotEqual(edited["tls.crt"], istio["tls.crt"], "its annotation has another generation")
        self.assertEqual(edited["ca.crt"], third["sp-daemon-tls"]["ca.crt"])
        self.assertNotEqual(third["sp-ca"]["tls.crt"], ca["tls.crt"])
        self.assertEqual(third["sp-daemon-tls"]["tls.crt"], second["sp-daemon-tls"]["tls.crt"], "the old CA's certificate stays")
        both = helm.decoded(third["sp-daemon-tls"]["ca.crt"])
        self.assertEqual(both, helm.decoded(third["sp-ca"]["tls.crt"]) + helm.decoded(ca["tls.crt"]), "both CAs are trusted")

        fourth = upgrade("tls.generation=3", "tls.caGeneration=2")
        self.assertNotEqual(fourth["sp-daemon-tls"]["tls.crt"], third["sp-daemon-tls"]["tls.crt"])
        self.assertEqual(fourth["sp-daemon-tls"]["ca.crt"], third["sp-daemon-tls"]["ca.crt"])

        fifth = upgrade("tls.generation=3", "tls.caGeneration=2", "tls.trustPreviousCa=false")
        self.assertEqual(fifth["sp-daemon-tls"]["ca.crt"], fifth["sp-ca"]["tls.crt"], "only the new CA is trusted")
        self.assertEqual(fifth["sp-daemon-tls"]["tls.crt"], fourth["sp-daemon-tls"]["tls.crt"])

        # Another name needs another certificate.
        renamed = upgrade("tls.generation=3", "tls.caGeneration=2", "tls.trustPreviousCa=false", "clusterDomain=corp.internal")
        self.assertNotEqual(renamed["sp-daemon-tls"]["tls.crt"], fifth["sp-daemon-tls"]["tls.crt"])
        self.assertEqual(renamed["sp-proxy-tls"], fifth["sp-proxy-tls"])

    def test_a_new_installation_uses_the_certificates_that_an_old_one_left(self) -> None:
        namespace = "again"
        self.cluster.create_namespace(namespace)
        self.install(namespace)
        first = self.secrets(namespace)
        self.cluster.helm("uninstall", helm.RELEASE, "--namespace", namespace)
        self.assertEqual(self.secrets(namespace), first)
        self.install(namespace)
        self.assertEqual(self.secrets(namespace), first)

    def allowed(self, verb: str, namespace: str, name: str) -> bool:
        """Whether the daemon of `switchpoint` may do the action `verb` with this Secret."""
        resource = {"verb": verb, "resource": "secrets", "namespace": namespace, "name": name}
        review = {
            "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
            "spec": {"user": "system:serviceaccount:switchpoint:sp-daemon", "resourceAttributes": resource},
        }
        return self.cluster.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)["status"]["allowed"]

    def test_the_rights_of_the_daemon_suffice(self) -> None:
        """The daemon runs with the arguments and the ServiceAccount of the chart, leads by its Lease and watches all pools."""
        if why := processes.missing():
            helm.skipped(self.id(), why)
            self.skipTest(why)
        values = HERE / "values" / "many-pools.yaml"
        self.install("switchpoint", "--values", str(values), "--set", "monitoring.podMonitor.enabled=false,prometheusRule.enabled=false")
        machine = processes.Machine()
        self.addCleanup(machine.close)
        machine.daemon_tls.write(self.cluster.secret("switchpoint", "sp-daemon-tls"))
        arguments = machine.daemon_arguments(helm.objects(*APIS, values=values))
        environment = {"KUBECONFIG": str(self.cluster.account("switchpoint", "sp-daemon")), "SWITCHPOINT_LEASE_IDENTITY": "pod-1"}
        machine.start("daemon", [processes.DAEMON, *arguments], environment)

        def read() -> dict[str, bool]:
            """Whether the daemon leads, and has read the source of each discovered pool."""
            status, body = processes.get(machine.debug_port, "/debug/instances")
            if status != 200:
                return {}
            read = {one["pool"]: one["synced"] and not one["error"] for one in json.loads(body)["sources"]}
            return read | {"leads": json.loads(processes.get(machine.debug_port, "/debug/state")[1])["leads"]}

        try:
            # The pool of InferencePool `qwen-32b` has no source yet: nothing made that object.
            processes.wait("the daemon leads and has read its sources", lambda: all(map(read().get, ("leads", "llama", "mistral"))))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{read()}\n{machine.log('daemon')}") from error
        for namespace, name in (("switchpoint", "sp-daemon-tls"), ("switchpoint", "sp-proxy-tls"), ("edge", "sp-proxy-tls")):
            self.assertTrue(all(self.allowed(verb, namespace, name) for verb in ("get", "patch")), (namespace, name))
        self.assertTrue(self.allowed("get", "switchpoint", "sp-ca"))
        self.assertFalse(self.allowed("patch", "switchpoint", "sp-ca") or self.allowed("get", "edge", "other"))
        # The daemon has read the certificates and the CA, and no certificate must be renewed.
        self.assertNotIn("cannot check or renew a certificate", machine.log("daemon"))
        self.assertNotIn("renewed a certificate", machine.log("daemon"))
        lease = self.cluster.request("GET", "/apis/coordination.k8s.io/v1/namespaces/switchpoint/leases/sp-daemon")
        self.assertIn("pod-1", lease["spec"]["holderIdentity"])
        self.assertNotIn("forbidden", machine.log("daemon"))
        self.assertNotIn("Forbidden", machine.log("daemon"))


if __name__ == "__main__":
    unittest.main()
