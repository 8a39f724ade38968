"""Envoy's configuration in the chart: that of envoy-config, valid for the real Envoy, with certificates that change without a
restart."""

import json
import pathlib
import subprocess
import unittest
from typing import Any

import helm
import processes
from test_templates import APIS, ChartTest

HERE = pathlib.Path(__file__).resolve().parent
CONFIG = helm.ROOT / "envoy-config"
HOST = "models.example.com"
DAEMON_HOST = "sp-daemon.switchpoint.svc.cluster.local"


def values(name: str) -> pathlib.Path:
    return HERE / "values" / name


def shipped(name: str) -> list[helm.Object]:
    return helm.read_yaml((CONFIG / name).read_text())


def renamed(one: Any, *pairs: tuple[str, str]) -> Any:
    """Returns the object with each first text replaced by the second, in all strings."""
    text = json.dumps(one)
    for old, new in pairs:
        text = text.replace(old, new)
    return json.loads(text)


def without_labels(one: helm.Object) -> helm.Object:
    metadata = {key: value for key, value in one["metadata"].items() if key != "labels"}
    return one | {"metadata": metadata}


def picker_config(one: Any) -> None:
    """Replaces each configuration of the picker, which is JSON in a string, by the parsed JSON."""
    if isinstance(one, dict):
        for key, value in one.items():
            if isinstance(value, str) and value.lstrip().startswith('{"'):
                one[key] = json.loads(value)
            picker_config(value)
    elif isinstance(one, list):
        for value in one:
            picker_config(value)


def indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())


class SameAsShipped(ChartTest):
    """Except for the names of the release, the chart renders the files of envoy-config."""

    maxDiff = None

    def same(self, rendered: Any, expected: Any) -> None:
        picker_config(rendered)
        picker_config(expected)
        self.assertEqual(rendered, expected)

    def test_gateway(self) -> None:
        text = helm.objects(values=values("defaults.yaml"))["ConfigMap", helm.NAMESPACE, "sp-gateway"]["data"]["envoy.yaml"]
        pairs = [("inference-pool-default", "inference-pool"), (DAEMON_HOST, "127.0.0.1"), ('\\"/switchpoint.wasm', '\\"x')]
        rendered = renamed(helm.read_yaml(text)[0], *pairs)
        [expected] = shipped("standalone.yaml")
        [mtls] = shipped("mtls.yaml")

        [ingress, metrics] = rendered["static_resources"]["listeners"]
        self.assertEqual(metrics["name"], "metrics")
        self.assertEqual(ingress["address"]["socket_address"].pop("address"), "0.0.0.0")
        expected["static_resources"]["listeners"][0]["address"]["socket_address"].pop("address")
        routes = ingress["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]
        self.assertTrue(routes.pop("ignore_port_in_host_matching"))
        self.assertEqual(routes["virtual_hosts"][0].pop("name"), "default")
        expected_manager = expected["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        self.assertEqual(expected_manager["route_config"]["virtual_hosts"][0].pop("name"), "inference")
        for one, manager in ((rendered, ingress["filter_chains"][0]["filters"][0]["typed_config"]), (expected, expected_manager)):
            one.pop("node")
            wasm = next(row for row in manager["http_filters"] if row["name"] == "switchpoint")
            wasm["typed_config"]["config"]["vm_config"].pop("code")
        rendered["static_resources"]["listeners"].remove(metrics)
        admin = rendered["static_resources"]["clusters"].pop()
        self.assertEqual(admin["name"], "admin")

        state = next(row for row in rendered["static_resources"]["clusters"] if row["name"] == "switchpoint-state")
        tls = state.pop("transport_socket")
        common, wanted = tls["typed_config"]["common_tls_context"], mtls["transport_socket"]["typed_config"]["common_tls_context"]
        for key in ("tls_certificate_sds_secret_configs", "validation_context_sds_secret_config"):
            self.assertTrue(common.pop(key))
        for key in ("tls_certificates", "validation_context"):
            wanted.pop(key)
        mtls["transport_socket"]["typed_config"]["sni"] = "127.0.0.1"
        self.assertEqual(tls, mtls["transport_socket"])
        self.same(rendered, expected)

    def test_sampled_access_log(self) -> None:
        found = helm.objects("--set", "gateway.accessLogPercent=10", values=values("defaults.yaml"))
        [config] = helm.read_yaml(found["ConfigMap", helm.NAMESPACE, "sp-gateway"]["data"]["envoy.yaml"])
        manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        commented = next(line for line in (CONFIG / "standalone.yaml").read_text().splitlines() if line.strip().startswith("# filter:"))
        [expected] = helm.read_yaml(commented.strip().removeprefix("# "))
        self.assertEqual(manager["access_log"][0]["filter"], expected["filter"])

    def test_istio(self) -> None:
        pairs = [
            ("inference-pool-default", "inference-pool"), ('"inference-default"', '"inference"'), ("inference-realtime-default", "inference-realtime"),
            (DAEMON_HOST, "switchpointd.switchpoint.svc.cluster.local"),
        ]
        for mode, file in (("EnvoyFilter", "envoyfilter"), ("WasmPlugin", "wasmplugin")):
            found = helm.objects("--set", f"istio.mode={mode}", values=values("istio.yaml"))
            rendered = [renamed(without_labels(one), *pairs) for (_, namespace, _), one in found.items() if namespace == "istio-system"]
            # The chart adds the proxies' certificate, and the daemon's right to renew that certificate.
            rendered = {one["kind"]: one for one in rendered if one["kind"] not in ("Secret", "Role", "RoleBinding")}
            expected = {one["kind"]: one for one in shipped("istio/bootstrap.yaml") + shipped(f"istio/{file}.yaml")}
            self.assertEqual(rendered.keys(), expected.keys())
            for kind, one in expected.items():
                with self.subTest(mode=mode, kind=kind):
                    self.assertEqual(rendered[kind]["metadata"].pop("namespace"), "istio-system")
                    if kind == "ConfigMap":
                        for both in (rendered[kind], one):
                            both["data"] = {key: helm.read_yaml(text) for key, text in both["data"].items()}
                    else:
                        rendered[kind]["metadata"] = one["metadata"]
                    self.same(rendered[kind], one)

    def test_envoy_gateway(self) -> None:
        pairs = [
            ("inference-pool-default", "inference-pool"), (DAEMON_HOST, "switchpointd.switchpoint.svc.cluster.local"),
            ("sp-proxy-tls", "switchpoint-proxy-tls"),
        ]
        found = helm.objects(values=values("envoy-gateway.yaml"))
        for expected in shipped("envoy-gateway/gateway.yaml"):
            with self.subTest(expected["kind"]):
                [rendered] = [renamed(without_labels(one), *pairs) for (kind, _, _), one in found.items() if kind == expected["kind"]]
                self.assertEqual(rendered["metadata"].get("namespace"), expected["metadata"].get("namespace"))
                # The names of the release do not follow from the values.
                rendered["metadata"] = expected["metadata"]
                if expected["kind"] == "Gateway":
                    self.assertEqual(rendered["spec"]["infrastructure"]["parametersRef"].pop("name"), "sp")
                    expected["spec"]["infrastructure"]["parametersRef"].pop("name")
                self.same(rendered, expected)

    def test_ext_proc_in_istio(self) -> None:
        found = helm.objects(values=values("ext-proc.yaml"))
        for expected in shipped("kubernetes/inference-pool-istio.yaml"):
            one = without_labels(found[expected["kind"], helm.NAMESPACE, "sp-picker-llama"])
            one = renamed(one, ("sp-picker-llama", "switchpointd"), ("switchpoint.svc", "inference.svc"))
            one["metadata"]["namespace"] = "inference"
            self.assertEqual(one, expected)

    def test_each_pool_gets_the_requests_of_its_hosts(self) -> None:
        """In Envoy Gateway, the routes match the authority, because all routes are in one virtual host."""
        found = helm.objects("--set", "envoyGateway.enabled=true", *APIS, values=values("many-pools.yaml"))
        policy = found["EnvoyPatchPolicy", helm.NAMESPACE, "sp"]
        [routes] = [patch["operation"]["value"] for patch in policy["spec"]["jsonPatches"] if patch["operation"]["path"].endswith("/routes")]
        chats = [row for row in routes if row["match"].get("path") == "/v1/chat/completions"]
        hosts = [row["match"].get("headers", [{}])[0].get("string_match", {}).get("safe_regex", {}).get("regex") for row in chats]
        pools = [row["route"]["cluster"] for row in chats]
        expected = {
            "inference-pool-llama": r"(llama\.example\.com)(:[0-9]+)?",
            "inference-pool-qwen": r"(qwen\.example\.com|[^.]+\.qwen\.example\.com)(:[0-9]+)?",
            "inference-pool-mistral": r"(mistral\.example\.com)(:[0-9]+)?",
            "inference-pool-fixed": None,
        }
        self.assertEqual(dict(zip(pools, hosts)), expected)
        self.assertEqual(routes[-1]["match"], {"prefix": "/"})


class RealEnvoy(ChartTest):
    def setUp(self) -> None:
        super().setUp()
        if why := processes.missing():
            helm.skipped(self.id(), why)
            self.skipTest(why)
        self.machine = processes.Machine()
        self.addCleanup(self.machine.close)

    def secrets(self, found: dict[tuple[str, str, str], helm.Object]) -> None:
        """Mounts the Secrets of these manifests."""
        self.machine.daemon_tls.write(found["Secret", helm.NAMESPACE, "sp-daemon-tls"]["data"])
        self.machine.proxy_tls.write(found["Secret", helm.NAMESPACE, "sp-proxy-tls"]["data"])

    def test_envoy_accepts_the_configuration(self) -> None:
        for name in ("defaults.yaml", "many-pools.yaml"):
            with self.subTest(name):
                found = helm.objects(*APIS, values=values(name))
                self.secrets(found)
                self.accepted(self.machine.envoy_config(found))

    def test_envoy_accepts_the_fragments_for_a_sidecar(self) -> None:
        found = helm.objects(*APIS, values=values("many-pools.yaml"))
        self.secrets(found)
        data = found["ConfigMap", "edge", "sp-sidecar"]["data"]
        text = self.machine.localised("".join(f"{name.removesuffix('.yaml')}:\n{indented(text)}" for name, text in data.items()))
        [parts] = helm.read_yaml(text)
        for name in ("certificate", "ca"):
            (self.machine.folder / "switchpoint").mkdir(exist_ok=True)
            (self.machine.folder / "switchpoint" / f"{name}.yaml").write_text(json.dumps(parts[name]))
        manager = parts["connection_manager"] | {
            "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "own",
            "http_filters": parts["http_filters"],
            "route_config": {"virtual_hosts": parts["virtual_hosts"]},
        }
        listener = {
            "address": {"socket_address": {"address": "127.0.0.1", "port_value": self.machine.envoy_port}},
            "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
        }
        config = self.machine.folder / "envoy.json"
        config.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": parts["clusters"]}}))
        self.accepted(config)

    def accepted(self, config: pathlib.Path) -> None:
        command = [processes.ENVOY, "--mode", "validate", "--service-node", "test", "--service-cluster", "test", "-c", config]
        done = subprocess.run(command, capture_output=True, text=True, timeout=processes.SECONDS_MAX, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("deprecated", done.stderr)

    def test_certificates_change_without_a_restart(self) -> None:
        machine = self.machine
        server = processes.ModelServer()
        self.addCleanup(server.close)
        settings = ["--set", f"pools[0].name=default,pools[0].hosts[0]={HOST},pools[0].objects=false,pools[0].endpoints[0]=127.0.0.1:{server.port}"]
        found = helm.objects(*settings)
        self.secrets(found)
        arguments = [argument for argument in machine.daemon_arguments(found) if not argument.startswith("--lease-kubernetes")]
        daemon = machine.start("daemon", [processes.DAEMON, *arguments])
        gateway = machine.start("envoy", *machine.gateway_command(found))
        try:
            self.run_and_renew(daemon, [processes.DAEMON, *arguments], settings)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{machine.log('daemon')}\n{machine.log('envoy')}") from error
        self.assertEqual(self.helm_test(found), "/switchpoint/ready: HTTP/1.1 200 OK\n/v1/models: HTTP/1.1 200 OK\n")
        self.assertIsNone(gateway.poll(), "Envoy has not restarted")
        gateway.terminate()
        self.assertEqual(gateway.wait(processes.SECONDS_MAX), 0, machine.log("envoy"))

    def helm_test(self, found: dict[tuple[str, str, str], helm.Object]) -> str:
        """Runs the script of the pod of `helm test` on this machine, and returns the output."""
        [container] = found["Pod", helm.NAMESPACE, "sp-test"]["spec"]["containers"]
        service = "/dev/tcp/sp-gateway.switchpoint.svc.cluster.local/80"
        [script] = [text.replace(service, f"/dev/tcp/127.0.0.1/{self.machine.envoy_port}") for text in container["args"]]
        done = subprocess.run([*container["command"], script], capture_output=True, text=True, timeout=processes.SECONDS_MAX, check=False)
        return done.stdout if done.returncode == 0 else f"{done.stdout}{done.stderr}"

    def run_and_renew(self, daemon: subprocess.Popen, again: list[Any], settings: list[str]) -> None:
        machine = self.machine

        def models(host: str = f"{HOST}:8080") -> int:
            return processes.get(machine.envoy_port, "/v1/models", host)[0]

        def ready() -> bool:
            return processes.get(machine.envoy_port, "/switchpoint/ready")[0] == 200

        processes.wait("the picker has state", ready)
        self.assertEqual(models(), 200)
        self.assertEqual(models("other.example.com"), 404, "no pool has this host")
        self.assertEqual(processes.get(machine.envoy_port, "/sleep", HOST)[0], 404)
        self.assertEqual(processes.get(machine.metrics_port, "/ready"), (200, "LIVE\n"))
        self.assertIn("envoy_cluster_upstream_cx_total", processes.get(machine.metrics_port, "/stats/prometheus")[1])
        self.assertEqual(processes.get(machine.metrics_port, "/quitquitquit")[0], 404)
        self.assertEqual(processes.get(machine.admin_port, "/config_dump")[0], 403)
        before = machine.daemon_certificate()

        # Another CA and other certificates, as if an operator had replaced both in the Secrets.
        self.secrets(helm.objects(*settings, "--set", "tls.generation=2"))
        processes.wait("the daemon shows its new certificate", lambda: machine.daemon_certificate() != before)
        # Open connections continue with the old certificates. A new daemon requires the new certificates.
        daemon.terminate()
        daemon.wait()
        machine.start("daemon", again)
        state = "cluster.switchpoint-state.ssl.handshake"
        handshakes = processes.get(machine.admin_port, f"/stats?filter={state}")[1]
        processes.wait("Envoy connects with its new certificate", lambda: processes.get(machine.admin_port, f"/stats?filter={state}")[1] != handshakes)
        processes.wait("the picker has state", ready)
        self.assertEqual(models(), 200)


if __name__ == "__main__":
    unittest.main()
