"""A real etcd and kube-apiserver for the tests of the chart, on loopback with free ports."""

import json
import pathlib
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

import helm

BINARIES = helm.ROOT / ".tools" / "bin"
SCHEMAS = helm.ROOT / ".tools" / "schemas"
TOKEN = "token"
# The start takes about ten seconds, and much longer while compilers run.
START_SECONDS_MAX = 120


class Refused(Exception):
    """The API server refuses an object."""


def missing() -> str | None:
    """Returns the reason why a cluster cannot run here, if there is one."""
    for name in ("etcd", "kube-apiserver"):
        if not (BINARIES / name).exists():
            return f"there is no {name}; `.ci/cluster_tools.py {name}` builds it where Go is installed"
    return None if SCHEMAS.exists() else "there are no schemas; `.ci/cluster_tools.py schemas` fetches them where Go is installed"


def free_ports(count: int) -> list[int]:
    """Returns ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def stop(process: subprocess.Popen) -> None:
    """Ends a process that this test started."""
    process.kill()
    process.wait()


class Cluster:
    """A running API server with its etcd. `close` ends both."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(self._folder.name)
        client, peer, self.port = free_ports(3)
        (folder / "key.pem").write_text(helm.private_key())
        (folder / "tokens.csv").write_text(f'{TOKEN},admin,1,"system:masters"\n')
        self.kubeconfig = folder / "kubeconfig"
        self._write_kubeconfig(self.kubeconfig, TOKEN)
        self._tls = ssl._create_unverified_context()  # noqa: SLF001: the API server's certificate is its own
        etcd = [
            BINARIES / "etcd", f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync",
            f"--listen-client-urls=http://127.0.0.1:{client}", f"--advertise-client-urls=http://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}", f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
        ]
        server = [
            BINARIES / "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{client}", f"--cert-dir={folder / 'certs'}",
            f"--secure-port={self.port}", "--bind-address=127.0.0.1",
            f"--service-account-key-file={folder / 'key.pem'}", f"--service-account-signing-key-file={folder / 'key.pem'}",
            "--service-account-issuer=https://kubernetes.default.svc", f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC", "--service-cluster-ip-range=10.96.0.0/16", "--disable-admission-plugins=ServiceAccount",
        ]
        self._log = folder / "log"
        self._processes: list[subprocess.Popen] = []
        with self._log.open("w") as log:
            for command in (etcd, server):
                self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        self._wait_ready()

    def _write_kubeconfig(self, path: pathlib.Path, token: str) -> None:
        path.write_text(json.dumps({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": f"https://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }))

    def account(self, namespace: str, name: str) -> pathlib.Path:
        """Writes a kubeconfig with a token of this ServiceAccount, and returns the path."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = self.request("POST", path, request)["status"]["token"]
        kubeconfig = self.kubeconfig.with_name(f"{namespace}-{name}")
        self._write_kubeconfig(kubeconfig, token)
        return kubeconfig

    def _wait_ready(self) -> None:
        until = time.monotonic() + START_SECONDS_MAX
        while True:
            try:
                self.request("GET", "/readyz", raw=True)
                return
            except (OSError, urllib.error.URLError) as error:
                if time.monotonic() > until or any(process.poll() is not None for process in self._processes):
                    tail = "\n".join(self._log.read_text().splitlines()[-20:])
                    self.close()
                    raise AssertionError(f"the API server did not start: {error}\n{tail}") from error
            time.sleep(0.2)

    def request(self, method: str, path: str, body: Any = None, raw: bool = False) -> Any:
        """Sends one request to the API server, and returns the answer. Raises urllib.error.HTTPError for a refusal."""
        data = None if body is None else json.dumps(body).encode()
        kind = "application/apply-patch+yaml" if method == "PATCH" else "application/json"
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": kind}
        request = urllib.request.Request(f"https://127.0.0.1:{self.port}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30, context=self._tls) as answer:
            text = answer.read().decode()
        return text if raw else json.loads(text)

    def create_namespace(self, name: str) -> None:
        self.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})

    def define(self, *parts: str) -> None:
        """Installs the published definitions whose file name contains one of `parts`, and waits until they are served."""
        text = "\n---\n".join(file.read_text() for file in sorted(SCHEMAS.iterdir()) if any(part in file.name for part in parts))
        definitions = [one for one in helm.read_yaml(text) if one["kind"] == "CustomResourceDefinition"]
        paths = []
        for one in definitions:
            self.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", one)
            spec = one["spec"]
            paths.append(f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}?limit=1")
        until = time.monotonic() + START_SECONDS_MAX
        for path in paths:
            while True:
                try:
                    self.request("GET", path)
                    break
                except urllib.error.HTTPError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.2)

    def dry_run(self, one: helm.Object) -> None:
        """Applies an object without storing it: defaults, validation and admission run, and an unknown field is an error. `helm
        install --dry-run=server` sends no object to the server.

        Raises Refused with the server's reason."""
        base = f"/{'apis' if '/' in one['apiVersion'] else 'api'}/{one['apiVersion']}"
        found = [kind for kind in self.request("GET", base)["resources"] if kind["kind"] == one["kind"] and "/" not in kind["name"]]
        if not found:
            raise Refused(f"{base} has no {one['kind']}")
        namespace = one["metadata"].get("namespace", "default")
        folder = f"namespaces/{namespace}/{found[0]['name']}" if found[0]["namespaced"] else found[0]["name"]
        path = f"{base}/{folder}/{one['metadata']['name']}?fieldManager=test&dryRun=All&fieldValidation=Strict"
        try:
            self.request("PATCH", path, one)
        except urllib.error.HTTPError as error:
            raise Refused(error.read().decode()) from error

    def secret(self, namespace: str, name: str) -> dict[str, str]:
        """Returns the data of a Secret, in base64."""
        return self.request("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")["data"]

    def helm(self, *arguments: str) -> str:
        return helm.helm(*arguments, environment={"KUBECONFIG": str(self.kubeconfig)})

    def close(self) -> None:
        for process in reversed(self._processes):
            stop(process)
        self._folder.cleanup()
