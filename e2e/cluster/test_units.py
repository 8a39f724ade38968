"""Tests the pure parts of the cluster's tests, and translates the files of Envoy Gateway where its translator is built. Standard
library only; needs no node."""

import base64
import dataclasses
import itertools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import dns
import drills
import envoy_gateway
import envoy_gateway_drills
import envoy_gateway_pools
import ext_proc_gateway
import images
import istio
import istio_conformance
import istio_faults
import istio_steps
import paths
import previous
import refused
import table
from arrivals import STREAM_SECONDS, TOKENS_PER_SECOND, Arrival, Report, Result, arrivals, longest_gap, summarize
from paths import BIN, ROOT

EGCTL = BIN / "egctl"
SERVICE = {"metadata": {"name": "a", "namespace": "n"}, "spec": {"clusterIP": "10.96.0.7"}}
HEADLESS = {"metadata": {"name": "h", "namespace": "n"}, "spec": {"clusterIP": "None"}}
SLICE = {
    "metadata": {"namespace": "n", "labels": {"kubernetes.io/service-name": "h"}},
    "endpoints": [
        {"addresses": ["10.244.0.2"], "conditions": {"ready": True}},
        {"addresses": ["10.244.0.3"], "conditions": {"ready": False}},
    ],
}


def row(result: str, requests: int | None = None, failed: int | None = None, gap: float | None = None) -> table.Row:
    return table.Row("drill", result, requests, failed, gap, 2.4, "why")


class Load(unittest.TestCase):
    def test_arrivals_have_a_fixed_rate_and_both_protocols(self) -> None:
        plan = list(itertools.islice(arrivals(50.0, 0.1, 1), 5000))
        self.assertEqual([arrival.at for arrival in plan[:3]], [0.0, 0.02, 0.04])
        self.assertEqual(sum(arrival.protocol == "http/2" for arrival in plan), 2500)
        streams = [arrival for arrival in plan if arrival.stream_tokens]
        self.assertTrue(400 < len(streams) < 600)
        low, high = (seconds * TOKENS_PER_SECOND for seconds in STREAM_SECONDS)
        self.assertTrue(all(low - 3 <= arrival.stream_tokens <= high for arrival in streams))

    def test_the_same_seed_gives_the_same_load(self) -> None:
        first, second, other = (list(itertools.islice(arrivals(50.0, 0.1, seed), 200)) for seed in (1, 1, 2))
        self.assertEqual(first, second)
        self.assertNotEqual(first, other)

    def test_the_longest_gap_includes_start_and_end(self) -> None:
        self.assertEqual(longest_gap([1.0, 1.5, 4.0], 5.0), 2.5)
        self.assertEqual(longest_gap([3.0], 4.0), 3.0)
        self.assertEqual(longest_gap([1.0], 9.0), 8.0)
        self.assertEqual(longest_gap([], 7.0), 7.0)
        # Answers after the last arrival are not part of the load.
        self.assertEqual(longest_gap([1.0, 2.0, 30.0], 3.0), 1.0)

    def test_a_failed_stream_that_had_begun_counts_as_both(self) -> None:
        good = Result(Arrival(0.0, "http/1.1", 0), ended=0.5, status=200, began=True, served_by="a")
        cut = Result(Arrival(0.1, "http/2", 18), ended=1.5, status=200, began=True, served_by="b", error="cut")
        refused = Result(Arrival(0.2, "http/2", 0), ended=0.3, error="refused")
        report = summarize([good, cut, refused], 2.0)
        self.assertEqual((report.requests, report.failed, report.failed_begun, report.streams), (3, 2, 1, 1))
        self.assertEqual(report.longest_gap, 1.5)
        self.assertEqual(report.statuses, {"200": 2, "0": 1})
        self.assertEqual([failure["error"] for failure in report.failures], ["cut", "refused"])


class Killed(unittest.TestCase):
    """Tests which failures a drill forgives when the drill kills the daemon of a gateway without the module, 5 s after the start of the
    load."""

    def outcome(self, *failures: tuple[float, float, int]) -> drills.Outcome:
        failed = [Result(Arrival(at, "http/2", 0), ended, status, began=True, error="refused") for at, ended, status in failures]
        good = Result(Arrival(1.0, "http/2", 0), ended=1.1, status=200, began=True)
        report = json.loads(json.dumps(dataclasses.asdict(summarize([good, *failed], 9.0))))  # as the load's process writes it
        return drills.picks_begun(drills.Outcome(Report(**report | {"started": 100.0}), 9.0, "done"), 105.0)

    def test_requests_in_flight_at_the_kill_are_forgiven_and_printed(self) -> None:
        forgiven = self.outcome((4.99, 5.01, 503), (5.02, 5.03, 503))
        remarks = "done; 2 in flight at the SIGKILL were answered 503, and nothing else failed"
        self.assertEqual((forgiven.report.failed, forgiven.remarks), (0, remarks))
        self.assertEqual(self.outcome().remarks, "done")

    def test_all_else_is_a_failure(self) -> None:
        for other in [(4.9, 4.99, 503), (5.2, 5.21, 503), (5.0, 5.01, 500), (5.0, 5.01, 0)]:
            self.assertEqual(self.outcome((5.0, 5.01, 503), other).report.failed, 2, other)


class Table(unittest.TestCase):
    def test_rows_without_load_have_empty_cells(self) -> None:
        text = table.markdown([row("passed", 1234, 0, 0.0871), row("passed")])
        self.assertIn("| drill | passed | 1,234 | 0 | 87 | 2 | why |", text)
        self.assertIn("| drill | passed |  |  |  | 2 | why |", text)

    def test_the_last_line_counts(self) -> None:
        self.assertEqual(table.last_line([row("passed"), row("failed"), row("passed")]), "2 passed, 1 failed")
        self.assertEqual(table.last_line([row("skipped")]), "0 passed, 0 failed, 1 skipped")


class Previous(unittest.TestCase):
    def test_the_newest_release_before_this_version(self) -> None:
        tags = ["v0.1.0", "v0.9.0", "v0.10.0", "v0.10.1-rc.1", "v1.0.0", "nightly"]
        self.assertEqual(previous.newest(tags, "0.11.0"), "v0.10.0")
        self.assertEqual(previous.newest(tags, "0.10.0"), "v0.9.0")
        self.assertIsNone(previous.newest(tags, "0.1.0"))

    def test_a_tag_comes_before_the_table_and_the_table_before_nothing(self) -> None:
        table = '[releases]\n"0.1.0" = "aaaa"\n"0.2.0" = "bbbb"\n'
        known = previous.revisions(["v0.1.0", "v0.3.0"], table)
        self.assertEqual(known, {"v0.1.0": "refs/tags/v0.1.0", "v0.2.0": "bbbb", "v0.3.0": "refs/tags/v0.3.0"})
        self.assertEqual(previous.newest(previous.revisions([], table), "0.3.0"), "v0.2.0")

    def test_the_release_before_this_version_is_found_without_tags(self) -> None:
        def git(*command: object, **_: object) -> str:
            self.assertEqual(command[0], "git")
            return "" if command[1] == "tag" else str(command[-1]).removesuffix("^{commit}") + "\n"

        with mock.patch.object(previous, "run", git):
            self.assertEqual(previous.find("0.2.0"), ("v0.1.0", "003a6c41288e2d644d5b404610a8076562912f3a"))
            with self.assertRaisesRegex(paths.Skipped, "no release before 0.1.0"):
                previous.find("0.1.0")

    def test_a_clone_without_the_commit_skips(self) -> None:
        def git(*command: object, **_: object) -> str:
            if command[1] == "tag":
                return ""
            raise previous.node.NodeError("ended with 128")

        with mock.patch.object(previous, "run", git), self.assertRaisesRegex(paths.Skipped, "git fetch --unshallow"):
            previous.find("0.2.0")


class Dns(unittest.TestCase):
    def test_a_headless_service_has_the_addresses_of_ready_endpoints(self) -> None:
        records = dns.records([SERVICE, HEADLESS], [SLICE])
        self.assertEqual(records["a.n.svc.cluster.local"], ["10.96.0.7"])
        self.assertEqual(records["h.n.svc.cluster.local"], ["10.244.0.2"])

    def test_an_answer_repeats_the_question(self) -> None:
        question = b"\x01h\x01n\x03svc\x07cluster\x05local\x00\x00\x01\x00\x01"
        query = b"id\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + question
        reply = dns.answer(query, {"h.n.svc.cluster.local": ["10.244.0.2"]})
        self.assertTrue(reply.startswith(b"id\x85\x80\x00\x01\x00\x01"))
        self.assertIn(question, reply)
        self.assertTrue(reply.endswith(bytes([10, 244, 0, 2])))
        self.assertTrue(dns.answer(query, {}).startswith(b"id\x85\x83\x00\x01\x00\x00"))


class Configuration(unittest.TestCase):
    def test_the_shipped_file_still_has_the_lines_that_change(self) -> None:
        text = ext_proc_gateway.configuration("picker.n.svc.cluster.local", 9002, "pods.n.svc.cluster.local", 8000)
        self.assertIn("address: picker.n.svc.cluster.local, port_value: 9002", text)
        self.assertIn('authority: "picker.n.svc:9002"', text)
        self.assertIn("address: pods.n.svc.cluster.local, port_value: 8000", text)
        self.assertIn("address: 0.0.0.0, port_value: 8080", text)
        self.assertNotIn("x-switchpoint-pool", text)

    def test_layers_are_reproducible(self) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        for name in ("first", "second"):
            images.write_layer({"b": b"2", "a": "b", "tmp/": b""}, folder / name)
        self.assertEqual((folder / "first").read_bytes(), (folder / "second").read_bytes())

    def test_the_pool_names_the_service_of_the_second_release(self) -> None:
        pool = {"metadata": {"name": "p", "namespace": "n"}, "spec": {"selector": {"matchLabels": {"app": "x"}}, "targetPorts": [{"number": 8000}], "endpointPickerRef": {"name": "e", "port": {"number": 9002}}}}
        items = json.loads(ext_proc_gateway.manifests(pool))["items"]
        self.assertEqual([item["kind"] for item in items], ["ConfigMap", "Deployment", "Service", "Service"])


class EnvoyGateway(unittest.TestCase):
    def test_the_old_form_has_the_daemons_cluster_in_the_patches(self) -> None:
        old = envoy_gateway_drills.without_bootstrap(envoy_gateway.shipped("gateway.yaml"))
        self.assertNotIn("  bootstrap:\n", old)
        policy = old[old.index("kind: EnvoyPatchPolicy") :]
        self.assertIn('    name: switchpoint-state\n    operation:\n      op: add\n      path: ""\n      value:\n        name: switchpoint-state\n', policy)
        self.assertIn("provider:", old)

    def test_the_digest_goes_beside_the_address_of_the_module(self) -> None:
        text = envoy_gateway_drills.with_sha256(envoy_gateway.shipped("extension-policy.yaml"), "ab")
        self.assertEqual(text.count("image: {sha256: ab, url: 10.199.0.2:5000/switchpoint:"), 1)

    def test_the_drills_run_the_commands_of_the_page(self) -> None:
        shown = named_in(ROOT / "docs/how-to/envoy-gateway.md", "# Run in Envoy Gateway")
        applied = []
        for name in ("gateway.yaml", "extension-policy.yaml", "ext-proc.yaml"):
            kube = mock.Mock()
            with mock.patch.multiple(envoy_gateway, kube=kube, install=kube, install_daemon=kube, ready=kube, address=kube):
                with mock.patch.object(envoy_gateway_drills, "chat"):
                    envoy_gateway_drills.install(name)
            applied += [file for call in kube.mock_calls for file in files_of(call.args, call.kwargs.get("stdin"))]
        self.assertEqual(applied, shown)

    def test_the_second_route_has_its_own_pool_and_servers(self) -> None:
        route = {"kind": "HTTPRoute", "metadata": {"name": "inference"}, "spec": {"rules": [{"backendRefs": [{"name": "model-servers", "port": 8000}], "matches": [1]}]}}
        self.assertEqual(envoy_gateway_pools.changed(route)["spec"], {"rules": [{"backendRefs": [{"name": "second-servers", "port": 8000}], "matches": [1]}], "hostnames": ["second.example.com"]})
        policy = {"kind": "EnvoyExtensionPolicy", "metadata": {"name": "switchpoint"}, "spec": {"targetRefs": [{"name": "inference"}], "wasm": [{"config": {"pools": [{"name": "default"}], "decide_at": "headers"}}]}}
        self.assertEqual(envoy_gateway_pools.changed(policy)["spec"], {"targetRefs": [{"name": "qwen"}], "wasm": [{"config": {"pools": [{"name": "qwen"}], "decide_at": "headers"}}]})

    def test_an_endpoint_of_another_pool_is_a_failure(self) -> None:
        pool = envoy_gateway_pools.Target("gateway:80", "n")
        found = {"conversations": [[{"served_by": "10.0.0.1:8000"}, {"served_by": "10.0.0.2:8000"}]]}
        with mock.patch.object(envoy_gateway_pools.Target, "engines", lambda _: "10.0.0.1:8000,10.0.0.2:8000"):
            self.assertIs(envoy_gateway_pools.within(pool, found), found)
        with mock.patch.object(envoy_gateway_pools.Target, "engines", lambda _: "10.0.0.1:8000"), self.assertRaises(istio_steps.Failed):
            envoy_gateway_pools.within(pool, found)

    def test_all_files_remove_the_same_headers_and_serve_the_same_paths(self) -> None:
        files = [(envoy_gateway.CONFIG / name).read_text() for name in ("gateway.yaml", "extension-policy.yaml", "ext-proc.yaml")]
        removed = [sorted(re.findall(r"^      - (x-\S+)$", text, re.MULTILINE)) for text in files]
        self.assertTrue(len(removed[0]) > 10)
        self.assertEqual(removed[1:], [removed[0]] * 2)
        patched = {path.rstrip("/") for path in re.findall(r"match: \{(?:path|path_separated_prefix|prefix): (/[^}]+)\}", files[0])}
        routed = [set(re.findall(r"type: (?:Exact|PathPrefix), value: (/[^}]+)\}", text)) for text in files[1:]]
        # Only the module answers for the picker's health, and upgrades need no separate route in these files.
        self.assertEqual(patched - {"/v1/realtime"}, routed[0])
        self.assertEqual(routed[0] - {"/switchpoint/ready"}, routed[1])


def translated(file: str, folder: pathlib.Path) -> dict:
    """Returns the result of Envoy Gateway's translator for a shipped file, the daemon's Service and the daemon's certificate."""
    pem = folder / "ca.pem"
    subject = ["-subj", "/CN=switchpoint", "-keyout", str(folder / "ca.key"), "-out", str(pem)]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *subject], check=True, capture_output=True)
    port = {"name": "grpc-ext-proc", "port": 9002, "targetPort": 9002, "protocol": "TCP"}
    place = {"namespace": "switchpoint"}
    more = [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "switchpointd"} | place, "spec": {"clusterIP": "10.96.0.9", "ports": [port]}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "switchpointd-tls"} | place, "data": {"ca.crt": base64.b64encode(pem.read_bytes()).decode()}},
    ]
    manifest = folder / "manifest.yaml"
    manifest.write_text((envoy_gateway.CONFIG / file).read_text() + "".join(f"\n---\n{json.dumps(one)}" for one in more))
    words = ["experimental", "translate", "--from=gateway-api", "--to=gateway-api,xds", "--type=all", "--add-missing-resources", "-o=json", f"-f={manifest}"]
    return json.loads(subprocess.run([str(EGCTL), *words], check=True, capture_output=True, text=True).stdout)


def refusals(translation: dict) -> list[str]:
    """Returns the messages of all conditions of policies that are not true."""
    policies = [policy for kind, found in translation.items() if kind.endswith("Policies") for policy in found]
    conditions = [one for policy in policies for ancestor in policy["status"]["ancestors"] or [] for one in ancestor["conditions"]]
    return [one["message"] for one in conditions if one["status"] != "True"]


@unittest.skipUnless(EGCTL.exists() and shutil.which("openssl"), "no .tools/bin/egctl (.ci/cluster_tools.py envoy-gateway) or no openssl")
class Translated(unittest.TestCase):
    """The files without patches. The patches of `gateway.yaml` run on a real Envoy in the test `translated` of `make e2e-long`."""

    def test_the_daemon_decides_by_ext_proc(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = translated("ext-proc.yaml", pathlib.Path(folder))
        self.assertEqual(refusals(made), [])
        configs = made["xds"]["default/inference"]["configs"]
        listeners = [entry["activeState"]["listener"] for config in configs for entry in config.get("dynamicListeners", [])]
        [chain] = [listener["defaultFilterChain"] for listener in listeners if listener["name"] == envoy_gateway_drills.LISTENER]
        processor, router = chain["filters"][0]["typedConfig"]["httpFilters"]
        self.assertEqual(router["name"], "envoy.filters.http.router")
        settings = processor["typedConfig"]
        # The daemon finds the pool of a Service by this name.
        self.assertEqual(settings["grpcService"]["envoyGrpc"]["authority"], "switchpointd.switchpoint:9002")
        self.assertEqual((settings["failureModeAllow"], settings["processingMode"]["requestBodyMode"]), (True, "BUFFERED"))
        clusters = {entry["cluster"]["name"]: entry["cluster"] for config in configs for entry in config.get("dynamicActiveClusters", [])}
        policy = clusters["httproute/default/inference/rule/0"]["loadBalancingPolicy"]["policies"][0]["typedExtensionConfig"]["typedConfig"]
        self.assertEqual(policy["overrideHostSources"], [{"header": "x-gateway-destination-endpoint"}])

    def test_only_the_module_is_missing(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = translated("extension-policy.yaml", pathlib.Path(folder))
        # The translator fetches no module; the controller of the drills does.
        self.assertEqual(refusals(made), ["Wasm: wasm cache is not initialized."])


def files_of(arguments: tuple, stdin: str | None) -> list[str]:
    """Returns the shipped files that a command of kubectl or helm applies."""
    named = [str(pathlib.Path(file).relative_to(ROOT)) for flag, file in zip(arguments, arguments[1:]) if flag == "-f" and str(file).startswith(str(ROOT))]
    given = (stdin or "").replace(f"{paths.REGISTRY}/", f"{istio.SHIPPED_REGISTRY}/")
    return named + [str(file.relative_to(ROOT)) for file in sorted((ROOT / "envoy-config").glob("*/*.yaml")) if given == file.read_text()]


def named_in(page: pathlib.Path, heading: str) -> list[str]:
    """Returns the files in the commands below a heading, in their order."""
    text = page.read_text().partition(f"{heading}\n")[2]
    text = re.split(r"^#", text, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"(?:apply|upgrade) .*-f (envoy-config/\S+)", "\n".join(text.split("```")[1::2]))


class Istio(unittest.TestCase):
    def test_kubectl_prints_one_document_after_another(self) -> None:
        self.assertEqual(istio.several('{"kind": "A"}\n{\n"kind": "B"\n}\n'), [{"kind": "A"}, {"kind": "B"}])

    def test_an_old_cluster_is_a_patch(self) -> None:
        text = istio_faults.old_state_cluster()
        self.assertIn("\n          name: switchpoint-state\n", text)
        self.assertNotIn("- name: switchpoint-state", text)

    def test_a_report_of_several_loads_adds_them(self) -> None:
        runs = [(Report(requests=10, failed=1, longest_gap=0.2), "a"), (Report(requests=5, longest_gap=0.1), "b")]
        report, _, remarks = istio_steps.outcome(0.0, runs, "first")
        self.assertEqual((report.requests, report.failed, report.longest_gap, remarks), (15, 1, 0.2, "first; a; b"))

    def test_repeated_requests_of_engines_count_and_those_of_control_planes_do_not(self) -> None:
        clusters = {"outbound|54321||llama-ip-1.serving.svc.cluster.local;": 3, "httproute/default/inference/rule/0": 4, "xds-grpc;": 5}
        clusters |= {"outbound|9002||ext-proc-picker-llama.serving.svc.cluster.local;": 6, "envoyextensionpolicy/default/switchpoint/extproc/0": 7}
        page = "".join(f"cluster.{name}.upstream_rq_retry: {number}\ncluster.{name}.upstream_rq_retry_success: 9\n" for name, number in clusters.items())
        self.assertEqual(istio_steps.repeated(page), 7)

    def test_attempts_are_those_that_the_module_counts_where_there_is_one(self) -> None:
        pages = {"stats?filter=failed_attempts": "wasmcustom.switchpoint_failed_attempts_total: 2\n"}
        self.assertEqual(istio_steps.failed_attempts(istio_steps.Target("gateway:80", "n", admin=pages.__getitem__)), 2)

    def test_a_walk_needs_a_repeated_request_and_an_engine_that_serves_again(self) -> None:
        a, b, failed = ({"status": 200, "served_by": "a"}, {"status": 200, "served_by": "b"}, {"status": 503, "text": ""})
        good = {"engine": "a", "before": [a, b], "meanwhile": [b, b], "packets": 1, "after": [b, a], "return_seconds": 1.0}
        self.assertIn("1 of 2 requests repeated", istio_steps.walked(good, 1))
        for count, change in ((0, {}), (1, {"packets": 0}), (1, {"meanwhile": [a]}), (1, {"meanwhile": [b, failed]}), (1, {"after": [b]})):
            with self.subTest(change), self.assertRaises(istio_steps.Failed):
                istio_steps.walked(good | change, count)

    def test_only_packets_of_the_gateway_are_refused(self) -> None:
        self.assertIn("ip saddr { 10.0.0.1, 10.0.0.2 } tcp dport 8000 counter reject with tcp reset", refused.rules(["10.0.0.1", "10.0.0.2"], "8000"))
        self.assertEqual(refused.refused("ip saddr 10.0.0.1 tcp dport 8000 counter packets 3 bytes 180 reject with tcp reset"), 3)

    def test_the_drill_runs_the_commands_of_the_page(self) -> None:
        called = mock.Mock()
        with mock.patch.multiple(istio, kube=called, manifests=called, credentials=called, chat=called, install=called, replace_engines=called, address=called):
            with mock.patch.object(istio, "write_values", lambda name, _: f"{name}.json"):
                istio.install_shipped("envoyfilter.yaml")
        files = [file for call in called.mock_calls for file in files_of(call.args, call.kwargs.get("stdin"))]
        self.assertEqual(files, named_in(ROOT / "docs/how-to/istio.md", "# Run in Istio"))

    def test_a_turn_that_moved_has_not_stayed(self) -> None:
        turns = [{"served_by": engine} for engine in ("a", "a", "b")]
        self.assertEqual(istio_steps.stayed({"conversations": [turns]}), 0.5)


class Conformance(unittest.TestCase):
    OUTPUT = """
=== RUN   TestConformance/A
    --- PASS: TestConformance/A (1.23s)
        --- PASS: TestConformance/A/step_one (0.20s)
    --- FAIL: TestConformance/B (300.00s)
        --- FAIL: TestConformance/B/step (300.00s)
    --- SKIP: TestConformance/C (0.00s)
--- FAIL: TestConformance (301.23s)
"""

    def test_tests_count_and_their_steps_do_not(self) -> None:
        found = istio_conformance.results(self.OUTPUT)
        self.assertEqual(found, {"PASS": ["A"], "FAIL": ["B"], "SKIP": ["C"]})
        self.assertEqual(istio_conformance.told(found), "1 passed: A; 1 failed: B; 1 skipped: C")

    def test_counters_of_all_labels_add_up(self) -> None:
        page = '# TYPE switchpoint_endpoint_served_total counter\nswitchpoint_endpoint_served_total{pool="a"} 3\nswitchpoint_endpoint_served_total{pool="b"} 4\nother 9\n'
        self.assertEqual(istio_conformance.counters(page), {"llm_d_epp_extproc_streams_total": 0, "switchpoint_endpoint_served_total": 7})

    def test_each_picker_has_a_patch_beside_the_gateway_and_a_rule_beside_its_service(self) -> None:
        texts = list(istio_conformance.istio_objects())
        self.assertEqual(len(texts), len(istio_conformance.PICKERS))
        rule, patch = texts[0].split("\n---\n")
        self.assertIn("metadata: {name: primary-endpoint-picker-svc, namespace: inference-conformance-app-backend}", rule)
        self.assertIn("metadata: {name: primary-endpoint-picker-svc, namespace: inference-conformance-infra}", patch)
        service = "primary-endpoint-picker-svc.inference-conformance-app-backend.svc"
        self.assertIn(f"host: {service}.cluster.local", rule)
        self.assertIn(f"cluster: {{service: {service}.cluster.local, portNumber: 9002}}", patch)
        self.assertIn(f'replace(":authority", "{service}:9002")', patch)


if __name__ == "__main__":
    unittest.main()
