"""A real Kubernetes node in its own mount, network, pid, uts and ipc namespaces: up, exec, down."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import configuration
import credentials
import machine
from paths import ADMIN_KUBECONFIG, CGROUP, HERE, LOGS, RUN, STATE

START_SECONDS_MAX = 180
END_SECONDS_MAX = 10
# All pods together weigh as much as 16 processes outside the node. With the weight of one process, a build on the same machine takes the
# CPUs from the pods, so that probes get no answer within 1 s.
CPU_SHARES = 16 * 1024
INIT_PID = RUN / "init.pid"
UNSHARE_PID = RUN / "unshare.pid"


class NodeError(Exception):
    """The node did not start, or a command in it failed."""


def up(keep: bool) -> None:
    """Starts the node and waits until it is ready. Unless `keep`, the kernel kills the node when this process ends."""
    machine.check()
    down()
    shutil.rmtree(STATE, ignore_errors=True)
    for folder in (RUN, LOGS):
        folder.mkdir(parents=True)
    machine.unpack_packages()
    credentials.write()
    configuration.write()
    for root in machine.controllers():
        make_cgroup(root)
    command = ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child", sys.executable, str(HERE / "init.py")]
    with (LOGS / "init.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=machine.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, preexec_fn=None if keep else machine.die_with_parent,
        )  # fmt: skip
    UNSHARE_PID.write_text(str(process.pid))
    INIT_PID.write_text(str(first_child(process)))
    began = time.monotonic()
    while not (RUN / "ready").exists():
        if process.poll() is not None or time.monotonic() - began > START_SECONDS_MAX:
            down()
            raise NodeError(f"the node did not start: {(LOGS / 'init.log').read_text()[-2000:]}")
        time.sleep(0.1)


def make_cgroup(root: pathlib.Path) -> None:
    """Makes the parent of the pods' cgroups. A cpuset of cgroup v1 starts without CPUs, so the function copies the CPUs of the root."""
    group = root / CGROUP
    group.mkdir(exist_ok=True)
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (root / name).exists() and (group / name).exists():
            (group / name).write_text((root / name).read_text())
    if (group / "cpu.shares").exists():
        (group / "cpu.shares").write_text(str(CPU_SHARES))


def first_child(process: subprocess.Popen) -> int:
    """Returns the id of PID 1 of the node, as this machine counts."""
    file = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for _ in range(200):
        children = file.read_text().split() if file.exists() else []
        if children:
            return int(children[0])
        time.sleep(0.05)
    raise NodeError("unshare started no process")


def init_pid() -> int:
    """Returns the id of PID 1 of the running node. Raises NodeError if no node runs."""
    if not INIT_PID.exists():
        raise NodeError("no node runs: python3 e2e/cluster up")
    pid = int(INIT_PID.read_text())
    if not is_init(pid):
        raise NodeError("the node has ended")
    return pid


def is_init(pid: int) -> bool:
    """Whether the process is PID 1 of the node, and not another process that has the id now."""
    try:
        return str(HERE / "init.py") in pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def command(*arguments: str) -> list[str]:
    """Returns the command line that runs a command inside the node."""
    return ["nsenter", "-t", str(init_pid()), "-m", "-n", "-p", "-u", "-i", f"--wd={os.getcwd()}", "--", *arguments]


def environment() -> dict[str, str]:
    return machine.environment() | {"KUBECONFIG": str(ADMIN_KUBECONFIG)}


def run(*arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 300) -> str:
    """Runs a command inside the node and returns its output."""
    done = subprocess.run(command(*arguments), env=environment(), input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
    if check and done.returncode != 0:
        raise NodeError(f"{' '.join(arguments)}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def stop_component(name: str, signal_number: int = signal.SIGKILL) -> None:
    run(sys.executable, str(HERE / "components.py"), "stop", name, str(int(signal_number)))


def start_component(name: str) -> None:
    run(sys.executable, str(HERE / "components.py"), "start", name)


def down() -> None:
    """Kills PID 1 of the node, and with it everything in its namespaces. Removes the cgroups, which outlive the processes."""
    for file in (INIT_PID, UNSHARE_PID):
        if file.exists():
            end(int(file.read_text()))
            file.unlink()
    for root in machine.controllers():
        if (root / CGROUP).exists():
            remove_cgroups(root / CGROUP)


def end(pid: int) -> None:
    try:
        cmdline = pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return
    if str(HERE / "init.py") not in cmdline:
        return
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    while time.monotonic() - began < END_SECONDS_MAX:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass
        if not pathlib.Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)


def remove_cgroups(top: pathlib.Path) -> None:
    """Removes the cgroups below and including `top`. Processes that are still ending hold their cgroups for a moment."""
    for _ in range(50):
        for folder, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                pass
        if not top.exists():
            return
        time.sleep(0.1)
