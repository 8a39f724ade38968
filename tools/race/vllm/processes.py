"""Starts processes with log files, finds free ports, and waits for conditions. `Process.stop` signals only its own process
group."""

import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

STOP_SECONDS_MAX = 30
FETCH_SECONDS_MAX = 20
TAIL_LINES = 8


class Late(Exception):
    """Raised if a condition did not become true in time, or if a process ended too early."""


class Process:
    """One child process in a session of its own, so that `stop` also ends its children."""

    def __init__(self, name: str, command: list[Any], log: pathlib.Path, environment: dict[str, str] | None = None):
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self.child = subprocess.Popen(
                [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=log.parent,
                env=os.environ | (environment or {}), start_new_session=True,
            )  # fmt: skip

    def check_running(self) -> None:
        if self.child.poll() is not None:
            tail = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            raise Late(f"{self.name} ended with {self.child.returncode}: {' | '.join(tail)}")

    def signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.child.pid, number)
        except ProcessLookupError:
            pass

    def stop(self) -> None:
        self.signal(signal.SIGTERM)
        try:
            self.child.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            pass
        self.signal(signal.SIGKILL)
        self.child.wait()


def wait(what: str, seconds: float, condition: Callable[[], Any], processes: tuple[Process, ...] = ()) -> Any:
    """Waits for and returns the first true result of `condition`. Raises Late after `seconds`, or if one of `processes` ends."""
    end = time.monotonic() + seconds
    while True:
        if result := condition():
            return result
        for process in processes:
            process.check_running()
        if time.monotonic() > end:
            raise Late(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.25)


def fetch(url: str, method: str = "GET") -> str:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=FETCH_SECONDS_MAX) as reply:
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
