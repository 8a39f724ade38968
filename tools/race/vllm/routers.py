"""The routers that race: each is started in front of the engines, and stopped before the next one."""

import json
import pathlib
import shutil
from typing import Any, NamedTuple

import install
import paths
from paths import Skipped
from processes import Process, answers, free_ports, wait

READY_SECONDS_MAX = 90


class Front(NamedTuple):
    """A running router."""

    url: str
    processes: list[Process]

    def stop(self) -> None:
        """Ends the proxy before the daemon that it asks."""
        for process in reversed(self.processes):
            process.stop()


def hosts(urls: list[str]) -> list[tuple[str, int]]:
    """Returns the address and the port of each URL."""
    pairs = []
    for url in urls:
        host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
        pairs.append((host, int(port or 80)))
    return pairs


def profile() -> str:
    """Returns the profile of the optimised build if this build exists, otherwise the profile of `make demo`."""
    for name in ("release", "demo"):
        if (paths.TARGET / name / "switchpointd").exists() and module(name).exists():
            return name
    raise Skipped("switchpointd and switchpoint.wasm are not built: run `make release` or `make quick`")


def module(name: str) -> pathlib.Path:
    return paths.TARGET / f"wasm32-wasip1/{name}/switchpoint.wasm"


def envoy() -> pathlib.Path:
    found = paths.ROOT / ".venv/bin/envoy"
    if not found.exists():
        raise Skipped("no Envoy: run `make setup`")
    return found


# --- Switchpoint.


def switchpoint(urls: list[str], folder: pathlib.Path) -> Front:
    built = profile()
    rows = [{"name": f"engine-{at}", "address": host, "port": str(port)} for at, (host, port) in enumerate(hosts(urls))]
    (folder / "endpoints.yaml").write_text(json.dumps({"endpoints": rows}))
    state, admin, ext_proc, health, listener, envoy_admin = free_ports(6)
    at = "127.0.0.1:"
    daemon = Process("switchpointd", [
        paths.TARGET / built / "switchpointd", "serve", "--local-endpoints", "--endpoints-file", folder / "endpoints.yaml",
        "--snapshot-file", folder / "snapshot",
        "--listen-state", f"{at}{state}", "--listen-admin", f"{at}{admin}", "--listen-ext-proc", f"{at}{ext_proc}", "--listen-health", f"{at}{health}",
    ], folder / "switchpointd.log")  # fmt: skip
    text = (paths.ROOT / "envoy-config/standalone.yaml").read_text()
    for old, new in ((8080, listener), (9901, envoy_admin), (9004, state), (9002, ext_proc)):
        text = text.replace(f"port_value: {old}}}", f"port_value: {new}}}")
    (folder / "envoy.yaml").write_text(text.replace("target/wasm32-wasip1/release/switchpoint.wasm", str(module(built))))
    proxy = Process("envoy", [envoy(), "-c", folder / "envoy.yaml", "--concurrency", "1", "--disable-hot-restart"], folder / "envoy.log")
    return ready(Front(f"http://{at}{listener}", [daemon, proxy]), "/switchpoint/ready")


# --- Envoy alone.


def round_robin_config(urls: list[str], listener: int) -> dict[str, Any]:
    """Returns an Envoy that spreads requests by round robin, with the time limits of long replies."""
    endpoints = [{"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}} for host, port in hosts(urls)]
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}
    types = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "ingress",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {
        "static_resources": {
            "listeners": [{"name": "ingress", "address": {"socket_address": {"address": "127.0.0.1", "port_value": listener}}, "filter_chains": [chain]}],
            "clusters": [{
                "name": "engines", "type": "STRICT_DNS", "lb_policy": "ROUND_ROBIN", "connect_timeout": "1s",
                "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": endpoints}]},
            }],
        }
    }  # fmt: skip


def round_robin(urls: list[str], folder: pathlib.Path) -> Front:
    (listener,) = free_ports(1)
    file = folder / "envoy.json"
    file.write_text(json.dumps(round_robin_config(urls, listener)))
    proxy = Process("envoy", [envoy(), "-c", file, "--concurrency", "1", "--disable-hot-restart"], folder / "envoy.log")
    return ready(Front(f"http://127.0.0.1:{listener}", [proxy]), "/v1/models")


# --- Others' routers.


def smg(urls: list[str], folder: pathlib.Path) -> Front:
    install.install("smg")
    port, metrics = free_ports(2)
    command = [paths.program("smg", "smg"), "launch", "--worker-urls", *urls, "--policy", "cache_aware", "--host", "127.0.0.1", "--port", port, "--prometheus-port", metrics, "--prometheus-host", "127.0.0.1"]
    return ready(Front(f"http://127.0.0.1:{port}", [Process("smg", command, folder / "smg.log")]), "/v1/models")


def vllm_router(urls: list[str], folder: pathlib.Path) -> Front:
    install.install("vllm-router")
    port, metrics = free_ports(2)
    command = [paths.program("vllm-router", "vllm-router"), "--worker-urls", *urls, "--policy", "cache_aware", "--host", "127.0.0.1", "--port", port, "--prometheus-port", metrics, "--prometheus-host", "127.0.0.1"]
    return ready(Front(f"http://127.0.0.1:{port}", [Process("vllm-router", command, folder / "vllm-router.log")]), "/v1/models")


def ready(front: Front, path: str) -> Front:
    """Waits until the router answers on `path`."""
    try:
        wait(f"{front.processes[-1].name} to be ready", READY_SECONDS_MAX, lambda: answers(front.url + path), tuple(front.processes))
    except BaseException:
        front.stop()
        raise
    return front


ROUTERS = {
    "switchpoint": switchpoint,
    "smg cache_aware": smg,
    "vllm-router cache_aware": vllm_router,
    "round robin": round_robin,
}


def start(name: str, urls: list[str], run: str) -> Front:
    """Starts a router with a folder of its own for files and logs."""
    folder = paths.LOGS / f"{run}-{name.replace(' ', '-')}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return ROUTERS[name](urls, folder)
