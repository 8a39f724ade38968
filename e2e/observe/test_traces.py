"""Traces in a real OpenTelemetry collector: Envoy's span with the filter's tags, and the span of the ext_proc server in its trace.

    python3 .ci/cluster_tools.py otelcol
    make release && python3 -m unittest discover e2e/observe -p test_traces.py

The collector receives OTLP from Envoy (gRPC) and from the daemon (HTTP), and passes it on to this test as JSON. Standard library only.
"""

import http.client
import http.server
import json
import pathlib
import secrets
import socket
import sys
import tempfile
import textwrap
import threading
import unittest
from typing import Any

from stack import BIN, MODULE, RELEASE, ROOT, START_SECONDS_MAX, Stack, free_ports, wait

SPAN_SECONDS_MAX = 30
PROMPT_WORDS = 800
CONFIG = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: marginal-cost-scorer}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: marginal-cost-scorer}]}
"""
FILTER, EXT_PROC = 0, 1
Span = dict[str, Any]


def missing() -> str | None:
    """The reason why the collector cannot run here, if there is one."""
    if not (BIN / "otelcol").exists():
        return "there is no otelcol; `.ci/cluster_tools.py otelcol` builds it where Go is installed"
    for file in (RELEASE / "switchpointd", RELEASE / "model-server", MODULE):
        if not file.exists():
            raise FileNotFoundError(f"{file.relative_to(ROOT)} is missing: run `make release`")
    return None


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
        """The spans of a trace that have ended, by service and name."""
        return {f"{span['service']} {span['name']}": span for span in self.spans if span["traceId"] == trace}


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

    def ask(self, proxy: int, prompt: str, sampled: bool = True) -> str:
        """Sends a request with a trace of its own. Returns the trace."""
        trace = secrets.token_hex(16)
        headers = {"content-type": "application/json", "traceparent": f"00-{trace}-{secrets.token_hex(8)}-0{int(sampled)}"}
        body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection("127.0.0.1", self.stack.listeners[proxy], timeout=30)
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        reply.read()
        connection.close()
        self.assertEqual(reply.status, 200)
        return trace

    def check_facts(self, tags: dict[str, str], cause: str) -> None:
        """Checks what both fronts say of a streamed request."""
        candidates = json.loads(tags["switchpoint.candidates"])
        ranked = tags["switchpoint.destination"].split(",")
        self.assertEqual([one["endpoint"] for one in candidates][: len(ranked)], ranked)
        self.assertTrue(candidates[0]["cost"], "the terms of the cost")
        for name in ("ttft_ms", "predicted_ttft_ms", "duration_ms", "predicted_duration_ms", "prompt_tokens", "cached_tokens", "missed_tokens"):
            self.assertGreaterEqual(int(tags[f"switchpoint.{name}"]), 0, name)
        self.assertEqual(int(tags["switchpoint.cached_tokens"]) + int(tags["switchpoint.missed_tokens"]), int(tags["switchpoint.prompt_tokens"]))
        self.assertEqual(tags["switchpoint.miss_cause"], cause)

    def test_spans_have_the_decision_and_its_outcome(self) -> None:
        prompt = " ".join(f"word{number}" for number in range(PROMPT_WORDS))
        with self.subTest("the filter"):
            traces = [self.ask(FILTER, prompt), self.ask(FILTER, prompt)]
            for trace, cause in zip(traces, ("never_seen", "rounding")):
                spans = wait("a span", SPAN_SECONDS_MAX, lambda trace=trace: self.sink.of(trace))
                note(json.dumps(spans, indent=1))
                [span] = [span for span in spans.values() if span["service"] == "switchpoint-proxy" and "switchpoint.candidates" in span["tags"]]
                self.check_facts(span["tags"], cause)
                self.assertEqual(span["tags"]["switchpoint.pool"], "default")
        with self.subTest("the ext_proc server"):
            trace = self.ask(EXT_PROC, prompt + " again")
            both = lambda: "switchpointd switchpoint.pick" in self.sink.of(trace) and len(self.sink.of(trace)) > 1
            wait("the spans of both", SPAN_SECONDS_MAX, both)
            spans = self.sink.of(trace)
            note(json.dumps(spans, indent=1))
            ours = spans["switchpointd switchpoint.pick"]
            self.assertIn(ours["tags"]["switchpoint.miss_cause"], ("never_seen", "rounding"))
            self.check_facts(ours["tags"], ours["tags"]["switchpoint.miss_cause"])
        with self.subTest("a trace that is not sampled"):
            trace = self.ask(EXT_PROC, prompt, sampled=False)
            later = self.ask(EXT_PROC, prompt)
            wait("a later span", SPAN_SECONDS_MAX, lambda: self.sink.of(later))
            self.assertEqual(self.sink.of(trace), {})


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    unittest.main()
