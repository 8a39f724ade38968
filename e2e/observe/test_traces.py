"""Traces in a real OpenTelemetry collector: Envoy's span with the filter's tags, and the span of the ext_proc server in its trace.

    python3 .ci/cluster_tools.py otelcol
    make release && python3 -m unittest discover e2e/observe -p test_traces.py

The collector receives OTLP from Envoy (gRPC) and from the daemon (HTTP), and passes the data on to this test as JSON. Standard library
only.
"""

import concurrent.futures
import http.client
import http.server
import json
import pathlib
import secrets
import socket
import tempfile
import textwrap
import threading
import unittest
import uuid
from typing import Any

from stack import BIN, ENGINES, ROOT, START_SECONDS_MAX, Stack, check_built, free_ports, note, wait

SPAN_SECONDS_MAX = 30
PROMPT_WORDS = 800
# Flow control with one seat at each engine, so that a burst is held.
CONFIG = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {type: marginal-cost-scorer}
- {type: concurrency-detector, parameters: {maxConcurrency: 1}}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: marginal-cost-scorer}]}
flowControl:
  saturationDetector: {pluginRef: concurrency-detector}
"""
REASON_AT = 14
BURST = 2 * ENGINES
# The headers of a client that forges what the picker writes.
FORGED = "203.0.113.66:1"
FORGERY = {
    "x-gateway-destination-endpoint": FORGED,
    "x-switchpoint-candidates": FORGED,
    "switchpoint_candidates": FORGED,
    "x-switchpoint-explain": "1",
    "baggage": f"switchpoint.destination={FORGED}",
}
FILTER, EXT_PROC = 0, 1
PROXY = "switchpoint-proxy"
OF_ENVOY, OF_DAEMON = f"{PROXY} ingress", "switchpointd switchpoint.pick"
# A word that only the prompts have.
SECRET = "confidential"
Span = dict[str, Any]


def missing() -> str | None:
    """Returns the reason why the collector cannot run here, if there is one."""
    if not (BIN / "otelcol").exists():
        return "there is no otelcol; `.ci/cluster_tools.py otelcol` builds it where Go is installed"
    check_built()
    return None


class Sink:
    """Receives what the collector exports."""

    def __init__(self) -> None:
        spans = self.spans = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                message = json.loads(self.rfile.read(int(self.headers["content-length"])))
                for resource in message["resourceSpans"]:
                    service = attributes(resource["resource"])["service.name"]
                    for scope in resource["scopeSpans"]:
                        spans.extend(span | {"service": service, "tags": attributes(span)} for span in scope["spans"])
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def of(self, trace: str) -> dict[str, Span]:
        """Returns the spans of a trace that have ended, by service and name."""
        return {f"{span['service']} {span['name']}": span for span in self.spans if span["traceId"] == trace}

    def of_request(self, request: str) -> list[Span]:
        """Returns the spans of the request with this id. Envoy changes one digit of the id to note that Envoy traces the request."""
        same = lambda other: other[:REASON_AT] == request[:REASON_AT] and other[REASON_AT + 1 :] == request[REASON_AT + 1 :]
        return [span for span in self.spans if same(span["tags"].get("guid:x-request-id", ""))]


def attributes(holder: dict[str, Any]) -> dict[str, str]:
    return {one["key"]: str(next(iter(one["value"].values()))) for one in holder.get("attributes", [])}


class TracedStack(Stack):
    """The first proxy has the filter, the second one calls the daemon by ext_proc. Both have the shipped fragment for traces."""

    def __init__(self, folder: pathlib.Path, sink: Sink):
        super().__init__(folder, CONFIG)
        self.sink = sink
        self.otlp, self.otlp_http = free_ports(2)
        self.daemon_options = ["--otlp-endpoint", f"http://127.0.0.1:{self.otlp_http}"]

    def start_collector(self) -> None:
        listen = {"grpc": {"endpoint": f"127.0.0.1:{self.otlp}"}, "http": {"endpoint": f"127.0.0.1:{self.otlp_http}"}}
        config = {
            "receivers": {"otlp": {"protocols": listen}},
            "exporters": {"otlp_http": {"endpoint": f"http://127.0.0.1:{self.sink.server.server_port}", "encoding": "json", "compression": "none"}},
            "service": {
                "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["otlp_http"]}},
                "telemetry": {"metrics": {"level": "none"}},
            },
        }
        file = self.folder / "otelcol.yaml"
        file.write_text(json.dumps(config))
        self.run("otelcol", BIN / "otelcol", "--config", f"file:{file}")

    def envoy_config(self, number: int) -> str:
        text = (ROOT / "envoy-config" / ("standalone.yaml" if number == FILTER else "ext_proc.yaml")).read_text()
        fragment = (ROOT / "envoy-config" / "tracing.yaml").read_text().replace("port_value: 4317", f"port_value: {self.otlp}")
        fragment = fragment.replace("random_sampling: {value: 1}", "random_sampling: {value: 100}")
        tracing, cluster = fragment[fragment.index("tracing:") :].split("clusters:\n")
        text = insert(text, "          access_log:\n", textwrap.indent(tracing, " " * 10))
        text = insert(text, "  - name: switchpoint-state\n", textwrap.indent(cluster, "  "))
        if number == FILTER:
            text = insert(text, '                     "pools":', '                     "trace_tags": true,\n')
        return text


def insert(text: str, before: str, lines: str) -> str:
    if text.count(before) != 1:
        raise ValueError(f"{before!r} occurs {text.count(before)} times")
    return text.replace(before, lines + before)


class Traces(unittest.TestCase):
    def setUp(self) -> None:
        if why := missing():
            print(f"SKIPPED {self.id().replace('.', '::')}: {why}", flush=True)
            self.skipTest(why)
        folder = tempfile.TemporaryDirectory(prefix="switchpoint-traces-")
        self.addCleanup(folder.cleanup)
        self.sink = Sink()
        self.addCleanup(self.sink.server.shutdown)
        self.stack = TracedStack(pathlib.Path(folder.name), self.sink)
        self.addCleanup(self.stack.stop)
        self.stack.start_collector()
        self.stack.start(prometheus=False)
        wait("the collector", START_SECONDS_MAX, lambda: listens(self.stack.otlp) and listens(self.stack.otlp_http))

    def ask(self, proxy: int, prompt: str, sampled: bool | None = True, tokens: int = 8) -> str:
        """Sends a request with a new trace, and returns the trace. If `sampled` is None, sends no trace, and returns the request's id."""
        trace, request = secrets.token_hex(16), str(uuid.uuid4())
        headers = FORGERY | {"content-type": "application/json", "x-request-id": request}
        if sampled is not None:
            headers["traceparent"] = f"00-{trace}-{secrets.token_hex(8)}-0{int(sampled)}"
        body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection("127.0.0.1", self.stack.listeners[proxy], timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        reply.read()
        connection.close()
        self.assertEqual(reply.status, 200)
        return request if sampled is None else trace

    def spans(self, trace: str, *names: str) -> dict[str, Span]:
        """Returns the spans of a trace, as soon as the spans with these names have ended."""
        wait(f"spans {names}", SPAN_SECONDS_MAX, lambda: {*names} <= {*self.sink.of(trace)})
        return self.sink.of(trace)

    def check_facts(self, tags: dict[str, str], causes: tuple[str, ...]) -> None:
        """Checks the tags that both proxies report for a streamed request."""
        candidates = json.loads(tags["switchpoint.candidates"])
        ranked = tags["switchpoint.destination"].split(",")
        self.assertEqual([one["endpoint"] for one in candidates], ranked)
        self.assertLessEqual({*ranked}, {f"127.0.0.1:{port}" for port in self.stack.engines})
        for one in candidates:
            self.assertTrue(one["cost"] and all(isinstance(ms, int | float) for ms in one["cost"].values()), one)
        number = lambda name: int(tags[f"switchpoint.{name}"])
        self.assertGreater(number("predicted_duration_ms"), 0)
        self.assertGreaterEqual(number("duration_ms"), number("ttft_ms"))
        self.assertGreaterEqual(number("predicted_duration_ms"), number("predicted_ttft_ms"))
        self.assertGreater(number("prompt_tokens"), PROMPT_WORDS // 2)
        self.assertEqual(number("cached_tokens") + number("missed_tokens"), number("prompt_tokens"))
        self.assertIn(tags["switchpoint.miss_cause"], causes)
        self.assertNotIn("switchpoint.held_ms", tags)

    def test_spans_have_the_decision_and_its_outcome(self) -> None:
        prompt = " ".join(f"{SECRET}{number}" for number in range(PROMPT_WORDS))
        with self.subTest("the filter"):
            for causes in (("never_seen",), ("rounding",)):
                spans = self.spans(self.ask(FILTER, prompt), OF_ENVOY)
                self.check_facts(spans[OF_ENVOY]["tags"], causes)
                self.assertEqual(spans[OF_ENVOY]["tags"]["switchpoint.pool"], "default")
            note(json.dumps(spans, indent=1))
        with self.subTest("the ext_proc server"):
            spans = self.spans(self.ask(EXT_PROC, f"again {prompt}"), OF_ENVOY, OF_DAEMON)
            note(json.dumps(spans, indent=1))
            self.check_facts(spans[OF_DAEMON]["tags"], ("never_seen",))
            self.assertIn(spans[OF_DAEMON]["parentSpanId"], {span["spanId"] for span in spans.values() if span["service"] == PROXY})
        with self.subTest("a trace that Envoy begins"):
            request = self.ask(FILTER, prompt, sampled=None)
            [span] = wait("a span", SPAN_SECONDS_MAX, lambda: self.sink.of_request(request))
            self.check_facts(span["tags"], ("rounding",))
        with self.subTest("a trace that is not sampled"):
            before = [self.ask(proxy, prompt, sampled=False) for proxy in (FILTER, EXT_PROC)]
            for proxy in (FILTER, EXT_PROC):
                self.spans(self.ask(proxy, prompt), OF_ENVOY)
            self.assertEqual([self.sink.of(trace) for trace in before], [{}, {}])
        for proxy, name in ((FILTER, OF_ENVOY), (EXT_PROC, OF_DAEMON)):
            with self.subTest("held requests", name=name), concurrent.futures.ThreadPoolExecutor(BURST) as pool:
                traces = list(pool.map(lambda number: self.ask(proxy, f"{number} {prompt}", tokens=200), range(BURST)))
                tags = [self.spans(trace, name)[name]["tags"] for trace in traces]
                held = [int(of["switchpoint.held_ms"]) for of in tags if "switchpoint.held_ms" in of]
                note(f"{name}: held {held} ms")
                self.assertGreaterEqual(len(held), BURST - ENGINES)
                self.assertLess(len(held), BURST, "the first ones are not held")
                self.assertGreater(max(held), 0)
        with self.subTest("what no span has"):
            everything = json.dumps(self.sink.spans)
            for text in (SECRET, FORGED):
                self.assertNotIn(text, everything)


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    unittest.main()
