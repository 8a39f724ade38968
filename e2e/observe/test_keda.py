"""The external scaler as KEDA calls it: KEDA's own code of `external` and `external-push` triggers against a real daemon under load.

    python3 .ci/cluster_tools.py keda-scaler
    make release && python3 -m unittest discover e2e/observe -p test_keda.py

Standard library only; `keda/main.go` is the client.
"""

import json
import pathlib
import re
import subprocess
import tempfile
import threading
import unittest

from load import Load
from stack import BIN, ENGINES, Stack, check_built, fetch, free_ports, wait

SCALER = BIN / "keda-scaler"
ASK_SECONDS_MAX = 30
# The time limit for the daemon's first figures. The daemon measures arrivals for 20 s before the daemon reports how many replicas the
# arrivals need.
MEASURE_SECONDS_MAX = 60
# The time limit for a pushed change. A stream ends after an error, and KEDA opens the next stream 2 s later, then 4 s later.
PUSH_SECONDS_MAX = 30
# The minimum number of requests of the load, which runs for at least the 20 s above.
SERVED_MIN = 100
METRIC = "s3-desired-replicas"


class ScaledStack(Stack):
    def __init__(self, folder: pathlib.Path):
        super().__init__(folder)
        (self.scaler,) = free_ports(1)

    def run(self, name: str, *command: object) -> None:
        more = ("--listen-scaler", f"127.0.0.1:{self.scaler}") if name == "daemon" else ()
        super().run(name, *command, *more)

    def ask(self, *metadata: str) -> dict:
        done = subprocess.run(
            [SCALER, "ask", f"127.0.0.1:{self.scaler}", *metadata], capture_output=True, text=True, timeout=ASK_SECONDS_MAX, check=True
        )
        return json.loads(done.stdout)

    def gauge(self) -> float:
        page = fetch(f"http://127.0.0.1:{self.admin}/metrics")
        return float(re.search(r"^switchpoint_desired_replicas\{.*\} (\S+)$", page, re.M)[1])


class Watch:
    """An `external-push` trigger, and the values that KEDA received from the trigger."""

    def __init__(self, stack: ScaledStack, *metadata: str):
        self.heard: list[bool] = []
        command = [SCALER, "watch", f"127.0.0.1:{stack.scaler}", *metadata]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.heard.append(line.strip() == "true")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()


class Keda(unittest.TestCase):
    def setUp(self) -> None:
        check_built()
        if not SCALER.exists():
            why = "KEDA's client could not be built (it needs Go): python3 .ci/cluster_tools.py keda-scaler"
            print(f"SKIPPED {self.id().replace('.', '::')}: {why}", flush=True)
            self.skipTest(why)

    def test_keda_reads_the_desired_replicas(self) -> None:
        with tempfile.TemporaryDirectory(prefix="switchpoint-keda-") as name:
            stack = ScaledStack(pathlib.Path(name))
            self.addCleanup(stack.stop)
            stack.start(prometheus=False)
            idle = Watch(stack, "minReplicas=0")
            self.addCleanup(idle.stop)
            load = Load(stack.listeners)
            load.start()
            self.addCleanup(load.stop)
            self.polls(stack)
            self.refusals(stack)
            self.pushes(stack, load, idle)

    def polls(self, stack: ScaledStack) -> None:
        """Checks that a poll reads the gauge's number, for a target of one."""

        def found() -> dict | None:
            """Returns the answer, if the gauge stood still while KEDA asked."""
            before, told, after = stack.gauge(), stack.ask(), stack.gauge()
            self.assertEqual((told["error"], told["metric"], told["target"], told["active"]), ("", METRIC, 1.0, True))
            # KEDA rounds to thousandths.
            return told if min(before, after) - 0.001 <= told["value"] <= max(before, after) + 0.001 else None

        wait("an answer like the gauge", MEASURE_SECONDS_MAX, found)
        # A goal of a millisecond needs more replicas once arrivals are measured, which shows that KEDA sends the metadata.
        steady, hurried = ("minReplicas=0", "spare=0"), ("minReplicas=0", "spare=0", "ttft=1ms")
        wait("arrivals that were measured", MEASURE_SECONDS_MAX, lambda: stack.ask(*hurried)["value"] > 1.2 * stack.ask(*steady)["value"] > 0.0)
        spared = lambda: stack.ask("minReplicas=0", "spare=9")["value"] - stack.ask(*steady)["value"]
        wait("nine replicas to spare", MEASURE_SECONDS_MAX, lambda: abs(spared() - 9.0) < 0.5)
        self.assertEqual(stack.ask("minReplicas=7")["value"], 7.0)
        self.assertEqual(stack.ask("minReplicas=1", "maxReplicas=1")["value"], 1.0)

    def refusals(self, stack: ScaledStack) -> None:
        """Checks that KEDA gets an error for a trigger that the daemon cannot read."""
        for metadata in ("pool=unknown", "ttft=soon", "start-up=1m"):
            told = stack.ask(metadata)
            self.assertIn("metric specs", told["error"], metadata)

    def pushes(self, stack: ScaledStack, load: Load, idle: Watch) -> None:
        """Checks that a stream reports when work begins and ends, and that the stream continues after a restart of the daemon."""
        wait("a pool with work is active", PUSH_SECONDS_MAX, lambda: idle.heard[-1:] == [True])
        load.stop()
        self.assertGreater(load.served, SERVED_MIN)
        # The pool becomes inactive after a minute without arrivals.
        wait("a pool without work is inactive", 60 + PUSH_SECONDS_MAX, lambda: idle.heard[-1:] == [False])
        heard = len(idle.heard)
        stack.end("daemon")
        stack.start_daemon()
        wait("KEDA hears the next daemon", PUSH_SECONDS_MAX, lambda: len(idle.heard) > heard)
        self.assertEqual(stack.ask("minReplicas=2")["value"], max(2.0, ENGINES))


if __name__ == "__main__":
    unittest.main()
