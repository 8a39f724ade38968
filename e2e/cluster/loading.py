"""Runs the load generator inside the node's network while a drill works."""

import contextlib
import json
import subprocess
import sys
import time
from typing import Iterator

import node
from arrivals import Report
from machine import die_with_parent
from paths import HERE, RUN

WARM_UP_SECONDS = 4
# The time for which the load continues after the drill's work, so that the load meets late effects too.
SETTLE_SECONDS = 4
END_SECONDS_MAX = 90
# The reports of the running drill's loads, in the order of their ends, for a drill that ends by an exception.
REPORTS: list[Report] = []


class Loading:
    """A running load. `report` is filled when it has ended."""

    def __init__(self, address: str, number: int):
        self.report = Report()
        self.file = RUN / f"load-{number}.json"
        # The load enters only the network of the node, because the node's mounts may hide python and this folder.
        command = ["nsenter", "-t", str(node.init_pid()), "-n", sys.executable, str(HERE / "load.py"), address, str(self.file)]
        self.process = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(END_SECONDS_MAX)
        self.report = Report(**json.loads(self.file.read_text()))
        REPORTS.append(self.report)


_numbers = iter(range(1_000_000))


@contextlib.contextmanager
def loading(address: str) -> Iterator[Loading]:
    """Sends load before, during and after the body of the `with` statement."""
    load = Loading(address, next(_numbers))
    try:
        time.sleep(WARM_UP_SECONDS)
        yield load
        time.sleep(SETTLE_SECONDS)
        load.end()
    except Exception:
        if load.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired, OSError, ValueError):
                load.end()
        raise
    finally:
        if load.process.poll() is None:
            load.process.kill()
            load.process.wait()
