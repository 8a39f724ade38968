"""The daemon, Envoy and mounted Secrets, as the chart's pods have them, on this machine."""

import base64
import http.client
import http.server
import json
import os
import pathlib
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from typing import Any, Callable

import cluster
import helm

TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", helm.ROOT / "target"))
DAEMON = TARGET / "debug" / "switchpointd"
MODULE = TARGET / "wasm32-wasip1" / "release" / "switchpoint.wasm"
# The Envoy binary. As in the end-to-end tests, the variable SWITCHPOINT_ENVOY can name another binary.
ENVOY = pathlib.Path(os.environ.get("SWITCHPOINT_ENVOY", helm.ROOT / ".venv" / "bin" / "envoy"))
SECONDS_MAX = 60
STOP_SECONDS_MAX = 20


def missing() -> str | None:
    """Returns the reason why Envoy and the daemon cannot run here, if there is one."""
    for path, command in ((ENVOY, "make setup"), (MODULE, "make wasm"), (DAEMON, "cargo build -p control-plane")):
        if not path.exists():
            return f"there is no {path.name}; `{command}` makes it"
    return None


def wait(what: str, condition: Callable[[], Any]) -> Any:
    """Waits until `condition` returns a true value, and returns it. An OSError means false."""
    until = time.monotonic() + SECONDS_MAX
    last: Any = None
    while time.monotonic() < until:
        try:
            if last := condition():
                return last
        except (OSError, http.client.HTTPException) as error:
            last = error
        time.sleep(0.1)
    raise AssertionError(f"not within {SECONDS_MAX} s: {what}; last: {last}")


def get(port: int, path: str, host: str = "") -> tuple[int, str]:
    """Sends one request on loopback, and returns the status and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path, headers={"host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class MountedSecret:
    """A folder that looks like a Secret's volume: the kubelet replaces the link `..data` when the Secret changes."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._count = 0
        folder.mkdir()

    def write(self, data: dict[str, str]) -> None:
        """Replaces all files by those of this Secret, whose values are base64."""
        self._count += 1
        version = self.folder / f"..version-{self._count}"
        version.mkdir()
        for name, value in data.items():
            (version / name).write_bytes(base64.b64decode(value))
        temporary = self.folder / "..data_tmp"
        temporary.symlink_to(version.name)
        temporary.rename(self.folder / "..data")
        for name in data:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")


class ModelServer:
    """Answers every request with 200, and /metrics as an idle vLLM does."""

    def __init__(self) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802: the name that http.server calls
                body = b"vllm:num_requests_waiting 0\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\n"
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Machine:
    """The processes of one test, and its folder. `close` ends them."""

    def __init__(self) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self._running: list[subprocess.Popen] = []
        self.envoy_port, self.admin_port, self.metrics_port, self.state_port, self.debug_port, self.health_port, self.page_port = cluster.free_ports(7)
        self.daemon_tls = MountedSecret(self.folder / "daemon-tls")
        self.proxy_tls = MountedSecret(self.folder / "proxy-tls")

    def start(self, name: str, command: list[Any], environment: dict[str, str] | None = None) -> subprocess.Popen:
        """Starts a process whose output goes to a file `NAME.log`."""
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(command, env=os.environ | (environment or {}), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._running.append(process)
        return process

    def log(self, name: str) -> str:
        return "\n".join((self.folder / f"{name}.log").read_text().splitlines()[-30:])

    def daemon_arguments(self, objects: dict[tuple[str, str, str], helm.Object], name: str = "sp-daemon") -> list[str]:
        """Returns the arguments of the daemon's container, with the ports and folders of this machine. Writes its ConfigMap."""
        config = self.folder / "switchpointd"
        config.mkdir(exist_ok=True)
        for file, text in objects["ConfigMap", helm.NAMESPACE, name]["data"].items():
            (config / file).write_text(text.replace("/etc/switchpointd", str(config)))
        (self.folder / "state").mkdir(exist_ok=True)
        container = objects["Deployment", helm.NAMESPACE, name]["spec"]["template"]["spec"]["containers"][0]
        replaced = {
            "/etc/switchpointd-tls": str(self.daemon_tls.folder),
            "/etc/switchpointd/": f"{config}/",
            "/var/lib/switchpointd": str(self.folder / "state"),
            "0.0.0.0:9004": f"127.0.0.1:{self.state_port}",
            "0.0.0.0:9003": f"127.0.0.1:{self.health_port}",
            "0.0.0.0:9091": f"127.0.0.1:{self.page_port}",
            "127.0.0.1:9090": f"127.0.0.1:{self.debug_port}",
        }
        arguments = container["args"]
        for old, new in replaced.items():
            arguments = [argument.replace(old, new) for argument in arguments]
        return arguments

    def envoy_config(self, objects: dict[tuple[str, str, str], helm.Object], name: str = "sp-gateway") -> pathlib.Path:
        """Writes the ConfigMap of the gateway, with the ports and folders of this machine; returns Envoy's configuration."""
        config = self.folder / "switchpoint"
        shutil.rmtree(config, ignore_errors=True)
        config.mkdir()
        for file, text in objects["ConfigMap", helm.NAMESPACE, name]["data"].items():
            text = self.localised(json.dumps(helm.read_yaml(text)[0]))
            (config / file).write_text(text)
        return config / "envoy.yaml"

    def localised(self, text: str) -> str:
        """Returns Envoy's configuration (JSON or YAML) with the ports and folders of this machine."""
        replaced = {
            "/etc/switchpoint-tls": str(self.proxy_tls.folder),
            "/etc/switchpoint-module/switchpoint.wasm": str(MODULE),
            "/etc/switchpoint/": f"{self.folder / 'switchpoint'}/",
            '"/switchpoint.wasm"': f'"{MODULE}"',
            '"address": "0.0.0.0"': '"address": "127.0.0.1"',
            '"address": "sp-daemon.switchpoint.svc.cluster.local"': '"address": "127.0.0.1"',
            '"port_value": 8080': f'"port_value": {self.envoy_port}',
            '"port_value": 9901': f'"port_value": {self.admin_port}',
            '"port_value": 9902': f'"port_value": {self.metrics_port}',
            '"port_value": 9004': f'"port_value": {self.state_port}',
        }
        for old, new in replaced.items():
            text = text.replace(old, new)
        return text

    def gateway_command(self, objects: dict[tuple[str, str, str], helm.Object], name: str = "sp-gateway") -> tuple[list[Any], dict[str, str]]:
        """Returns the command and the environment of the gateway's container, for this machine. The drain time is 0, so that the gateway
        stops immediately."""
        config = self.envoy_config(objects, name)
        container = objects["Deployment", helm.NAMESPACE, name]["spec"]["template"]["spec"]["containers"][0]
        replaced = {"/etc/switchpoint/envoy.yaml": str(config), "$(POD_NAME)": "pod-1"}
        arguments = [replaced.get(argument, argument) for argument in container["args"]]
        environment = {row["name"]: row.get("value", "") for row in container["env"]}
        environment |= {"ENVOY": str(ENVOY), "ENVOY_ADMIN": f"127.0.0.1:{self.admin_port}", "DRAIN_SECONDS": "0"}
        return [helm.ROOT / "envoy-config" / "start.sh", *arguments, "--disable-hot-restart"], environment

    def daemon_certificate(self) -> bytes:
        """Returns the certificate that the daemon shows to a proxy with the present Secret."""
        context = ssl.create_default_context(cafile=str(self.proxy_tls.folder / "ca.crt"))
        context.check_hostname = False
        context.load_cert_chain(self.proxy_tls.folder / "tls.crt", self.proxy_tls.folder / "tls.key")
        with socket.socket() as plain:
            plain.settimeout(5)
            plain.connect(("127.0.0.1", self.state_port))
            with context.wrap_socket(plain, server_hostname="sp-daemon.switchpoint.svc.cluster.local") as connection:
                return connection.getpeercert(binary_form=True) or b""

    def close(self) -> None:
        for process in reversed(self._running):
            # Terminates the process instead of killing it, because start.sh ends Envoy on SIGTERM, but leaves Envoy running after SIGKILL.
            process.terminate()
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                cluster.stop(process)
        shutil.rmtree(self.folder, ignore_errors=True)
