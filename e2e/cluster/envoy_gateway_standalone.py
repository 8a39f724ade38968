"""Runs the controller of Envoy Gateway on the shipped files without Kubernetes: in its standalone mode it reads objects from a folder and
starts Envoy itself.

    .venv/bin/python e2e/cluster/envoy_gateway_standalone.py [FILE...]     files of envoy-config/envoy-gateway (default: all)

Controller, Envoy, daemon, engines and registry run in network, mount and pid namespaces of their own, so it needs root and no free port.
`Stand.text` lists what differs from a cluster: there are no Services and no pods. Ends with 3 if something is not built."""

import base64
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Callable

import arrivals
import chat
import conversations
import credentials
import engines
import envoy_gateway
import envoy_gateway_drills
import images
import table
from istio import OTHER_TAG
from istio_faults import REFUSED_CLUSTER
from istio_steps import STAYED_SHARE_MIN, SUBSET_KEY
from machine import die_with_parent
from paths import BIN, ETC, HERE, ROOT, TARGET

UNAVAILABLE = 3
STATE = ROOT / "target/envoy-gateway"
OBJECTS = STATE / "objects"
CERTIFICATES = STATE / "certificates"
MODULE = STATE / "switchpoint.wasm"
# The folder in which Envoy finds its certificates for the controller's module server, in a cluster and outside.
MOUNTED = pathlib.Path("/certs")
INSIDE = "SWITCHPOINT_STANDALONE"
ADDRESS = "127.0.0.1:80"
ENGINES = [f"127.7.0.{number}:8000" for number in (1, 2, 3)]
REGISTRY = "127.0.0.1:5000"
TAG = "shipped"
ENVOY_VERSION = "1.40.0"
# The names by which Envoy fetches the module from the controller in a cluster.
HOSTS = f"127.0.0.1 localhost {envoy_gateway.CONTROLLER} {envoy_gateway.CONTROLLER}.{envoy_gateway.NAMESPACE}.svc.cluster.local\n"
FIRST_SECONDS_MAX = 180
UPDATE_SECONDS = 12
LOAD_WARM_UP_SECONDS = 10
# The rate of the load in requests per second, which is lower than in a cluster, because the programs may be debug builds.
LOAD_RATE = 10
API = "gateway.envoyproxy.io/v1alpha1"
HOST_PROVIDER = {"type": "Host", "host": {"envoyVersion": ENVOY_VERSION}}
CONTROLLER_CONFIG = {
    "apiVersion": API,
    "kind": "EnvoyGateway",
    "gateway": {"controllerName": "gateway.envoyproxy.io/gatewayclass-controller"},
    "provider": {
        "type": "Custom",
        "custom": {
            "resource": {"type": "File", "file": {"paths": [str(OBJECTS)]}},
            "infrastructure": {"type": "Host", "host": {f"{name}Home": str(STATE) for name in ("config", "data", "state")} | {"runtimeDir": str(STATE / "run")}},
        },
    },
    "extensionApis": {"enableBackend": True, "enableEnvoyPatchPolicy": True},
    "envoyProxy": {"provider": HOST_PROVIDER},
}


class Failed(Exception):
    """A check did not show what it must show."""


def programs() -> pathlib.Path:
    """Returns the folder of the project's programs: those of a release, or else of a debug build."""
    return next((TARGET / name for name in ("release", "debug") if (TARGET / name / "model-server").exists()), TARGET / "release")


def missing() -> list[str]:
    needed = [BIN / "envoy-gateway", BIN / "crane", programs() / "switchpointd", programs() / "model-server", images.WASM]
    return [str(path) for path in needed if not path.exists()]


def prepare() -> None:
    """Prepares what does not change while the checks run: certificates, Envoy, and the controller's own certificates."""
    shutil.rmtree(STATE, ignore_errors=True)
    for folder in (OBJECTS, CERTIFICATES, ETC, STATE / f"envoy-versions/{ENVOY_VERSION}/bin"):
        folder.mkdir(parents=True, exist_ok=True)
    (STATE / f"envoy-versions/{ENVOY_VERSION}/bin/envoy").symlink_to(images.envoy())
    shutil.copy(images.WASM, MODULE)
    credentials.authority("state-ca", "switchpoint")
    credentials.certificate("daemon", "state-ca", "DNS:switchpointd.switchpoint.svc.cluster.local", "serverAuth")
    credentials.certificate("proxy", "state-ca", "DNS:inference-gateway", "clientAuth")
    for name, file in {"tls.crt": "proxy.pem", "tls.key": "proxy.key", "ca.crt": "state-ca.pem"}.items():
        shutil.copy(ETC / file, CERTIFICATES / name)
    (STATE / "controller.json").write_text(json.dumps(CONTROLLER_CONFIG))
    (STATE / "hosts").write_text(HOSTS)
    subprocess.run(["mount", "--bind", str(STATE / "hosts"), "/etc/hosts"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run([str(BIN / "envoy-gateway"), "certgen", "--local", "--config-home", str(STATE)], check=True, capture_output=True)
    subprocess.run(["mount", "--bind", str(STATE / "certs/envoy"), str(MOUNTED)], check=True)


def backend(name: str, namespace: str, endpoints: list[tuple[str, int]]) -> dict:
    rows = [{"ip": {"address": address, "port": port}} for address, port in endpoints]
    return {"apiVersion": API, "kind": "Backend", "metadata": {"name": name, "namespace": namespace}, "spec": {"endpoints": rows}}


def secret(name: str, namespace: str, files: dict[str, pathlib.Path]) -> dict:
    data = {key: base64.b64encode(file.read_bytes()).decode() for key, file in files.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": namespace}, "data": data}


def secrets() -> list[dict]:
    """Returns the daemon's certificate, and the proxies' certificate for the controller. Without Kubernetes the controller invents a
    proxy certificate that its own module server refuses."""
    daemon = {"tls.crt": ETC / "daemon.pem", "tls.key": ETC / "daemon.key", "ca.crt": ETC / "state-ca.pem"}
    proxy = {name: MOUNTED / name for name in daemon}
    return [secret("switchpointd-tls", "default", daemon), secret("envoy", envoy_gateway.NAMESPACE, proxy)]


class Stand:
    """One controller with one of the shipped files, and everything around it."""

    def __init__(self, name: str, change: Callable[[str], str] = str):
        self.name, self.change = name, change
        self.processes: dict[str, subprocess.Popen] = {}
        self.admin_address = ""
        for number in range(len(ENGINES)):
            self.engine(number)
        self.daemon()
        self.start("registry", str(BIN / "crane"), "registry", "serve", "--address", REGISTRY)
        self.digests = {TAG: self.push(TAG, MODULE.read_bytes()), OTHER_TAG: self.push(OTHER_TAG, MODULE.read_bytes() + envoy_gateway.CUSTOM_SECTION)}
        self.apply()
        self.start("controller", str(BIN / "envoy-gateway"), "server", "--config-path", str(STATE / "controller.json"))

    def start(self, name: str, *command: str) -> None:
        with (STATE / f"{name}.log").open("ab") as log:
            environment = os.environ | {"HOME": str(STATE)}
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment, preexec_fn=die_with_parent)

    def engine(self, number: int) -> None:
        self.start(f"engine-{number}", str(programs() / "model-server"), f"--listen={ENGINES[number]}", *engines.ARGUMENTS[1:])

    def daemon(self) -> None:
        self.start(
            "daemon", str(programs() / "switchpointd"), "serve", *(f"--endpoint={engine}" for engine in ENGINES),
            "--listen-state=127.0.0.1:9004", f"--state-tls-cert={ETC}/daemon.pem", f"--state-tls-key={ETC}/daemon.key", f"--state-tls-client-ca={ETC}/state-ca.pem",
            "--listen-ext-proc=127.0.0.1:9002", f"--ext-proc-tls-cert={ETC}/daemon.pem", f"--ext-proc-tls-key={ETC}/daemon.key",
            "--ext-proc-destination-format=list", f"--snapshot-file={STATE}/pool.json",
        )  # fmt: skip

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def end(self) -> None:
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            process.wait()

    def push(self, tag: str, module: bytes) -> str:
        """Pushes an image of a module, and returns the digest of its manifest."""
        reference = f"{REGISTRY}/switchpoint:{tag}"
        images.write_layer({"plugin.wasm": module}, STATE / "layer.tar.gz")
        append = [str(BIN / "crane"), "append", "--insecure", "--oci-empty-base", f"--new_layer={STATE}/layer.tar.gz", f"--new_tag={reference}"]
        wait_until("the registry takes an image", lambda: subprocess.run(append, capture_output=True, check=False).returncode == 0)
        return subprocess.run([str(BIN / "crane"), "digest", "--insecure", reference], check=True, capture_output=True, text=True).stdout.strip()

    def text(self, image: str) -> str:
        """Returns the shipped file, for a host instead of a cluster."""
        text = self.change((envoy_gateway.CONFIG / self.name).read_text())
        # The standalone mode has no Services: Backends take their place. The standalone mode starts a process in place of a Deployment.
        text = text.replace("{name: model-servers, port: 8000}", "{group: gateway.envoyproxy.io, kind: Backend, name: model-servers}")
        # All objects are in one namespace, because the translator refuses a Backend of another namespace, whatever a ReferenceGrant says.
        text = re.sub(r"namespace: switchpoint\b", "namespace: default", text)
        text = text.replace("{name: switchpointd, namespace: default, port: 9002}", "{group: gateway.envoyproxy.io, kind: Backend, name: switchpointd}")
        text = text.replace('{group: "", kind: Service, name: switchpointd', "{group: gateway.envoyproxy.io, kind: Backend, name: switchpointd").replace(", sectionName: grpc-ext-proc", "")
        text = re.sub(r"  provider:\n    type: Kubernetes\n(?:    .*\n)+", f"  provider: {json.dumps(HOST_PROVIDER)}\n", text)
        text = text.replace("/etc/switchpoint-tls", str(CERTIFICATES)).replace("/etc/switchpoint/switchpoint.wasm", str(MODULE))
        text = text.replace("address: switchpointd.switchpoint.svc.cluster.local, port_value: 9004", "address: 127.0.0.1, port_value: 9004")
        text = re.sub(r"image: \{url: \S+\}", f"image: {{{image}}}", text)
        namespaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in ("default", envoy_gateway.NAMESPACE)]
        servers = [(engine.partition(":")[0], 8000) for engine in ENGINES]
        more = [*namespaces, backend("model-servers", "default", servers), backend("switchpointd", "default", [("127.0.0.1", 9002)]), *secrets()]
        return text + "".join(f"\n---\n{json.dumps(one)}" for one in more)

    def apply(self, image: str = f"url: {REGISTRY}/switchpoint:{TAG}", *more: dict) -> None:
        """Replaces the controller's file in one step."""
        part = STATE / "part.yaml"
        part.write_text(self.text(image) + "".join(f"\n---\n{json.dumps(one)}" for one in more))
        part.rename(OBJECTS / "all.yaml")

    def log(self) -> str:
        return (STATE / "controller.log").read_text()

    def module(self) -> dict:
        """Returns the source from which Envoy has the module. The controller's log has Envoy's admin port in no fixed form, so
        `admin_address` finds the port."""
        return envoy_gateway_drills.module_of(self.dump())

    def dump(self) -> dict:
        """Returns Envoy's listeners."""
        if not self.admin_address:
            self.admin_address = admin_address()
        return json.loads(get(self.admin_address, "/config_dump?resource=dynamic_listeners")[1])


def get(address: str, path: str) -> tuple[int, str]:
    client = conversations.http.client.HTTPConnection(address, timeout=10)
    client.request("GET", path)
    reply = client.getresponse()
    text = reply.read().decode()
    client.close()
    return reply.status, text


def admin_address() -> str:
    """Returns the admin port that Envoy chose."""
    rows = subprocess.run(["ss", "-ltnpH"], check=True, capture_output=True, text=True).stdout.splitlines()
    return next(row.split()[3] for row in rows if '(("envoy",' in row and row.split()[3].startswith("127.0.0.1:"))


def wait_until(what: str, condition: Callable[[], bool], seconds_max: float = FIRST_SECONDS_MAX) -> float:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds_max:
            raise Failed(f"{what}: not within {seconds_max:.0f} s")
        time.sleep(0.3)
    return time.monotonic() - began


def answered() -> bool:
    return chat.main(ADDRESS)["status"] == 200


def module_answers() -> bool:
    """Whether a module answers its own path, and Envoy answers chats. Envoy answers chats also without the filter, until Envoy has the
    module."""
    try:
        return get(ADDRESS, "/switchpoint/ready")[0] == 200 and answered()
    except OSError:
        return False


def converse(*headers: str) -> list[list[dict]]:
    found = conversations.main(ADDRESS, ENGINES, dict(header.split(": ", 1) for header in headers))
    refused = [turn for turns in found["conversations"] for turn in turns if turn["status"] != 200]
    if refused:
        raise Failed(f"{len(refused)} chats were refused: {refused[:2]}")
    return found["conversations"]


def stayed(found: list[list[dict]]) -> float:
    pairs = [(a["served_by"], b["served_by"]) for turns in found for a, b in zip(turns, turns[1:])]
    return sum(a == b for a, b in pairs) / len(pairs)


def conversations_stay(stand: Stand) -> str:
    share = stayed(converse())
    if share < STAYED_SHARE_MIN:
        raise Failed(f"only {share:.0%} of turns stayed")
    return f"{share:.0%} of turns stayed on their engine"


def subset(stand: Stand) -> str:
    """Checks that only the endpoint of the subset hint is picked, which a filter before the picker writes."""
    stand.apply(f"url: {REGISTRY}/switchpoint:{TAG}", envoy_gateway_drills.SUBSET_POLICY)
    try:
        wait_until("the filter of the subset is there", lambda: envoy_gateway_drills.filters_of(stand.dump())[0]["name"] == "subset")
        used = {turn["served_by"] for turns in converse(f"{envoy_gateway_drills.SUBSET_HEADER}: {ENGINES[-1]}") for turn in turns}
    finally:
        stand.apply()
    if used != {ENGINES[-1]}:
        raise Failed(f"{SUBSET_KEY} is not obeyed: {used}")
    return "a subset of one endpoint is obeyed"


def under_load(work: Callable[[], str], broken_by: str = "") -> tuple[str, arrivals.Report]:
    """Does the work under load. Streams that the engine `broken_by` had begun may break."""
    file = STATE / "load.json"
    file.unlink(missing_ok=True)
    load = subprocess.Popen([sys.executable, str(HERE / "load.py"), ADDRESS, str(file), f"--rate={LOAD_RATE}"], preexec_fn=die_with_parent)
    time.sleep(LOAD_WARM_UP_SECONDS)
    remarks = work()
    time.sleep(UPDATE_SECONDS)
    load.terminate()
    load.wait(90)
    report = arrivals.Report(**json.loads(file.read_text()))
    lost = [failure for failure in report.failures if broken_by and failure["began"] and failure["served_by"] == broken_by]
    if lost and len(lost) == report.failed:
        remarks += f" ({report.failed} streams that it had begun broke, as expected)"
        report.failed, report.failures = 0, []
    return remarks, report


def engine_killed(stand: Stand) -> tuple[str, arrivals.Report]:
    def work() -> str:
        stand.kill("engine-0")
        time.sleep(3)
        stand.engine(0)
        return "an engine killed, back after 3 s"

    return under_load(work, ENGINES[0])


def daemon_killed(stand: Stand) -> tuple[str, arrivals.Report]:
    def work() -> str:
        stand.kill("daemon")
        time.sleep(5)
        stand.daemon()
        return "the daemon killed, back after 5 s"

    return under_load(work)


def wrong_digest(stand: Stand) -> str:
    """Checks that the controller refuses a wrong `sha256`, which must be the digest of the image's manifest."""
    stand.apply(f"url: {REGISTRY}/switchpoint:{TAG}, sha256: {hashlib.sha256(MODULE.read_bytes()).hexdigest()}")
    wait_until("the controller refuses the module's SHA-256", lambda: "does not match" in stand.log())
    stand.apply(f"url: {REGISTRY}/switchpoint:{TAG}, sha256: {stand.digests[TAG].removeprefix('sha256:')}")
    wait_until("the module answers with the manifest's digest", module_answers)
    return "the module's SHA-256 is refused, the manifest's digest is accepted"


def module_replaced(stand: Stand) -> tuple[str, arrivals.Report]:
    def work() -> str:
        seen = [stand.module()["remote"]]
        for image in (f"url: {REGISTRY}/switchpoint@{stand.digests[TAG]}", f"url: {REGISTRY}/switchpoint:{OTHER_TAG}"):
            stand.apply(image)
            wait_until("Envoy has the module by its other address", lambda: stand.module()["remote"] != seen[-1])
            seen.append(stand.module()["remote"])
            time.sleep(UPDATE_SECONDS)
        if seen[0]["sha256"] != seen[1]["sha256"] or seen[1]["sha256"] == seen[2]["sha256"]:
            raise Failed(f"other modules than expected: {seen}")
        return "the module by digest, then another module by tag"

    return under_load(work)


def old_form_refused(stand: Stand) -> str:
    """Checks that the form of an earlier release is refused, in a separate controller: the daemon's cluster comes by a patch."""
    wait_until("Envoy refuses the cluster", lambda: REFUSED_CLUSTER in stand.log())
    time.sleep(UPDATE_SECONDS)
    reply = chat.main(ADDRESS)
    if reply["status"] == 200:
        raise Failed(f"a chat is answered: {reply}")
    return f"{REFUSED_CLUSTER}; a chat gets {reply['status']}"


Check = Callable[[Stand], "str | tuple[str, arrivals.Report]"]
CHECKS: dict[str, tuple[Check, ...]] = {
    "gateway.yaml": (conversations_stay, subset, engine_killed, daemon_killed),
    "extension-policy.yaml": (wrong_digest, subset, module_replaced, engine_killed, daemon_killed),
    "ext-proc.yaml": (conversations_stay, subset, engine_killed, daemon_killed),
}


def first_chat(stand: Stand) -> str:
    seconds = wait_until("the first chat is answered", answered if stand.name == "ext-proc.yaml" else module_answers)
    names = [one["name"] for one in envoy_gateway_drills.filters_of(stand.dump())]
    # Envoy answers chats without the policy too.
    if len(names) < 2:
        raise Failed(f"the gateway has no picker: {names}")
    return f"after {seconds:.0f} s; filters {', '.join(names)}"


def row(stand: Stand, check: Check) -> table.Row:
    """Runs one check. A failed request or any exception fails it."""
    name, began = f"{stand.name}: {check.__name__}", time.monotonic()
    try:
        found = check(stand)
    except Exception as error:
        return table.Row(name, "failed", None, None, None, time.monotonic() - began, f"{type(error).__name__}: {error}"[:300])
    if isinstance(found, str):
        return table.Row(name, "passed", None, None, None, time.monotonic() - began, found)
    remarks, report = found
    result = "failed" if report.failed else "passed"
    failures = f"; {report.failures[:3]}" if report.failed else ""
    return table.Row(name, result, report.requests, report.failed, report.longest_gap, time.monotonic() - began, remarks + failures)


def rows(names: list[str]) -> list[table.Row]:
    found: list[table.Row] = []
    plans = [(name, str, (first_chat, *CHECKS[name])) for name in names]
    if "gateway.yaml" in names:
        plans.insert(0, ("gateway.yaml", envoy_gateway_drills.without_bootstrap, (old_form_refused,)))
    for name, change, checks in plans:
        stand = Stand(name, change)
        try:
            for check in checks:
                found.append(row(stand, check))
                print(f"{found[-1].result}: {found[-1].drill}: {found[-1].remarks}", flush=True)
        finally:
            stand.end()
    return found


def main(names: list[str]) -> int:
    if os.geteuid() != 0 or missing():
        print(f"SKIPPED standalone Envoy Gateway: {'not root' if os.geteuid() else f'not built: {missing()}'}")
        return UNAVAILABLE
    if INSIDE not in os.environ:
        apart = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, *sys.argv]
        there = MOUNTED.exists()
        MOUNTED.mkdir(exist_ok=True)
        try:
            return subprocess.run(apart, env=os.environ | {INSIDE: "1"}, check=False).returncode
        finally:
            if not there:
                MOUNTED.rmdir()
    prepare()
    found = rows(names or list(CHECKS))
    print("\n" + table.markdown(found) + "\n\n" + table.last_line(found))
    return 1 if any(one.result == "failed" for one in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
