"""A running stack on loopback: simulated engines, `switchpointd`, Envoy with the filter, and a Prometheus that scrapes both."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DASHBOARDS = ROOT / "deploy/dashboards"
BIN = ROOT / ".tools" / "bin"
# The folder of the binaries. Set SWITCHPOINT_PROFILE=debug to try a change without an optimised build.
RELEASE = ROOT / "target" / os.environ.get("SWITCHPOINT_PROFILE", "release")
MODULE = ROOT / "target" / "wasm32-wasip1" / "release" / "switchpoint.wasm"
ENGINES = 3
# The number of proxies, which is two so that proxies share state.
PROXIES = 2
START_SECONDS_MAX = 90
STOP_SECONDS_MAX = 20
SCRAPE = "1s"
# The test shortens the windows of the rules, so that an alert fires within seconds. `[5m]` becomes `[10s]`.
WINDOWS = {"[5m]": "[10s]", "[15m]": "[30s]", "[1d]": "[60s]"}
RATE_WINDOW = "10s"
FOR = "3s"

CONFIG = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {type: concurrency-detector, parameters: {maxConcurrency: 2}}
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: prefix-cache-scorer}
- {type: slo-request-tracker}
- {type: slo-scorer}
- {type: slo-aware-profile-handler, parameters: {sloMissing: default}}
- {type: weighted-random-picker}
flowControl: {saturationDetector: {pluginRef: concurrency-detector}, noEndpointRequestTTL: 1s}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: slo-request-tracker}, {pluginRef: queue-scorer}, {pluginRef: kv-cache-utilization-scorer}, {pluginRef: prefix-cache-scorer}]
- name: slo
  plugins: [{pluginRef: slo-request-tracker}, {pluginRef: slo-scorer}, {pluginRef: weighted-random-picker}]
"""


class Late(Exception):
    """Something did not happen in time."""


def wait(what: str, seconds: float, condition: Callable[[], Any]) -> Any:
    """Returns the first true result of `condition`. Raises Late after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        if result := condition():
            return result
        if time.monotonic() > end:
            raise Late(f"not within {seconds} s: {what}")
        time.sleep(0.2)


def fetch(url: str, body: Any = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=10) as reply:
        return reply.read().decode()


def answers(url: str) -> bool:
    try:
        fetch(url)
    except (OSError, urllib.error.URLError):
        return False
    return True


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def scaled(rules: str) -> str:
    """Returns the rules with windows of seconds. Raises Late for a window that `WINDOWS` lacks."""
    unknown = set(re.findall(r"\[\w+\]", rules)) - set(WINDOWS)
    if unknown:
        raise Late(f"WINDOWS lacks {unknown}")
    for window, short in WINDOWS.items():
        rules = rules.replace(window, short)
    return re.sub(r"for: \w+", f"for: {FOR}", rules)


def note(text: str) -> None:
    """Shows progress beside unittest's own output."""
    print(text, file=sys.stderr, flush=True)


def check_built() -> None:
    """Raises FileNotFoundError if a program of the stack is not built."""
    for file in (RELEASE / "switchpointd", RELEASE / "model-server", MODULE):
        if not file.exists():
            raise FileNotFoundError(f"{file.relative_to(ROOT)} is missing: run `make release`")


class Stack:
    """The running stack. `stop` ends its processes."""

    def __init__(self, folder: pathlib.Path, config: str = CONFIG):
        self.folder = folder
        self.config = config
        self.daemon_options: list[str] = []
        self.processes: dict[str, subprocess.Popen] = {}
        self.state, self.admin, self.engine_admin, self.prometheus, ext_proc, health = free_ports(6)
        self.engines = free_ports(ENGINES)
        self.listeners, self.envoys = free_ports(PROXIES), free_ports(PROXIES)
        self.unused = [ext_proc, health]

    def start(self, prometheus: bool = True) -> None:
        listen = [argument for port in self.engines for argument in ("--listen", f"127.0.0.1:{port}")]
        self.run("engines", RELEASE / "model-server", *listen, "--admin", f"127.0.0.1:{self.engine_admin}", "--model", "demo", "--speed", "2", "--num-gpu-blocks", "1500")
        self.write_endpoints()
        (self.folder / "config.yaml").write_text(self.config)
        self.start_daemon()
        for number in range(PROXIES):
            self.start_envoy(number)
        if prometheus:
            self.start_prometheus()
        ready = lambda: all(answers(f"http://127.0.0.1:{port}/switchpoint/ready") for port in self.listeners)
        wait("pickers that have state", START_SECONDS_MAX, ready)
        if prometheus:
            wait("Prometheus", START_SECONDS_MAX, lambda: answers(f"http://127.0.0.1:{self.prometheus}/-/ready"))

    def run(self, name: str, *command: Any) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, cwd=self.folder)
        log.close()

    def start_daemon(self) -> None:
        at = "127.0.0.1:"
        self.run(
            "daemon", RELEASE / "switchpointd", "serve", "--local-endpoints", "--endpoints-file", self.folder / "endpoints.yaml",
            "--snapshot-file", self.folder / "snapshot", "--config", self.folder / "config.yaml", "--latency-prediction",
            "--listen-state", f"{at}{self.state}", "--listen-admin", f"{at}{self.admin}",
            "--listen-ext-proc", f"{at}{self.unused[0]}", "--listen-health", f"{at}{self.unused[1]}", *self.daemon_options,
        )  # fmt: skip

    def start_envoy(self, number: int) -> None:
        """Starts a proxy with the shipped file, with other ports."""
        text = self.envoy_config(number)
        for old, new in ((8080, self.listeners[number]), (9901, self.envoys[number]), (9004, self.state), (9002, self.unused[0])):
            text = text.replace(f"port_value: {old}}}", f"port_value: {new}}}")
        file = self.folder / f"envoy-{number}.yaml"
        file.write_text(text.replace("target/wasm32-wasip1/release/switchpoint.wasm", str(MODULE)))
        envoy = ROOT / ".venv" / "bin" / "envoy"
        self.run(f"envoy-{number}", envoy, "-c", file, "--service-node", f"proxy-{number}", "--concurrency", "1", "--disable-hot-restart")

    def envoy_config(self, _number: int) -> str:
        text = (ROOT / "envoy-config" / "standalone.yaml").read_text()
        return text.replace('{"state": {', '{"slo_headers": "trust", "state": {', 1)

    def start_prometheus(self) -> None:
        (self.folder / "rules.yaml").write_text(scaled((DASHBOARDS / "rules.yaml").read_text()))

        def job(name: str, path: str, *ports: int) -> dict[str, Any]:
            return {"job_name": name, "metrics_path": path, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}

        config = {
            "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [job("daemon", "/metrics", self.admin), job("proxy", "/stats/prometheus", *self.envoys)],
        }
        (self.folder / "prometheus.yaml").write_text(json.dumps(config))
        self.run(
            "prometheus", BIN / "prometheus", f"--config.file={self.folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self.folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{self.prometheus}",
        )  # fmt: skip

    def write_endpoints(self, text: str | None = None) -> None:
        """Replaces the endpoints file: by all engines, or by this text."""
        rows = [{"name": f"gpu-{index}", "address": "127.0.0.1", "port": str(port)} for index, port in enumerate(self.engines)]
        draft = self.folder / "endpoints.draft"
        draft.write_text(text or json.dumps({"endpoints": rows}))
        draft.rename(self.folder / "endpoints.yaml")

    def order(self, what: str, body: dict[str, Any], engines: list[int] | None = None) -> None:
        """Sends an order to these engines, or to all."""
        for index in range(ENGINES) if engines is None else engines:
            fetch(f"http://127.0.0.1:{self.engine_admin}/servers/127.0.0.1:{self.engines[index]}/{what}", body)

    def end(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self) -> None:
        for name in reversed(list(self.processes)):
            self.end(name)

    def query(self, path: str, **parameters: Any) -> Any:
        """Returns the data of an answer of Prometheus' API."""
        url = f"http://127.0.0.1:{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        return json.loads(fetch(url))["data"]

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.query("alerts")["alerts"] if alert["state"] == "firing"}
