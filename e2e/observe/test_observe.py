"""The dashboards and alerts on a real Prometheus that scrapes a real stack under load.

    python3 .ci/cluster_tools.py prometheus
    make release && python3 -m unittest discover e2e/observe

Every alert fires in a drill and clears after it. Then every query of every dashboard must have series, and no series may be constant over
the run. The same holds for the queries of a dashboard of llm-d. UPDATE_DOCS=1 replaces the picture of docs/how-to/observe.md. Otherwise
standard library only.
"""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator

import picture
from load import PREFIXES, Load
from stack import BIN, DASHBOARDS, RATE_WINDOW, ROOT, Stack, check_built, note, wait

FIRE_SECONDS_MAX = 60
CLEAR_SECONDS_MAX = 120
# The time for which the load runs before the first drill, so that the latency model and the mean of the hit rate exist.
WARM_SECONDS = 40
STEP = "1s"
# The number of prompts that have twice the tokens of the engines' caches, and the time for which the load sends these prompts.
MANY_PREFIXES = 120
EVICT_SECONDS = 15
# The time until the earlier prompts are cached again.
SETTLE_SECONDS = 5
# The time within which the daemon notices the restart.
RESTART_SECONDS = 4
# The causes of misses that the load produces. `wrong_belief` and `rounding` depend on the moment.
CAUSES = {"never_seen", "moved", "evicted", "restart"}
# The labels that may be empty, because the endpoints of this stack name no model.
MAY_BE_EMPTY = {"model_name"}
# The panels by reason, of which only one series must change, because a reason that occurs once in the run has a constant rate.
BY_REASON = {"Failed scrapes", "Errors", "Missed prompt tokens by cause"}


@contextlib.contextmanager
def no_endpoint(stack: Stack, _load: Load) -> Iterator[None]:
    stack.write_endpoints('{"endpoints": []}')
    yield
    stack.write_endpoints()


@contextlib.contextmanager
def unusable_file(stack: Stack, _load: Load) -> Iterator[None]:
    stack.write_endpoints("endpoints: [")
    yield
    stack.write_endpoints()


@contextlib.contextmanager
def no_daemon(stack: Stack, _load: Load) -> Iterator[None]:
    stack.end("daemon")
    yield
    stack.start_daemon()


def faulty(paths: str, engines: list[int] | None) -> Callable[[Stack, Load], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def drill(stack: Stack, _load: Load) -> Iterator[None]:
        stack.order("faults", {"mode": "status", "status": 503, "paths": paths}, engines)
        yield
        stack.order("faults", {"mode": "none"}, engines)

    return drill


def lying(name: str, value: float) -> Callable[[Stack, Load], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def drill(stack: Stack, _load: Load) -> Iterator[None]:
        stack.order("lie", {name: value})
        yield
        stack.order("lie", {})

    return drill


@contextlib.contextmanager
def restarts(stack: Stack, _load: Load) -> Iterator[None]:
    stack.order("restart", {"for_ms": 500})
    yield


@contextlib.contextmanager
def new_prompts(_stack: Stack, load: Load) -> Iterator[None]:
    load.shared = False
    yield
    load.shared = True


@contextlib.contextmanager
def tight_slo(_stack: Stack, load: Load) -> Iterator[None]:
    before, load.ttft_ms = load.ttft_ms, 1
    yield
    load.ttft_ms = before


# The queries of llm-d's dashboard "Failure & Saturation Indicators" that ask its picker (repository llm-d/llm-d, Apache-2.0,
# guides/recipes/observability/grafana/dashboards/llm-d-failure-saturation-dashboard.json), except the query by plugin, which has no
# counterpart in Switchpoint. The other queries of that dashboard ask the engines.
LLM_D_QUERIES = [
    'sum(rate(llm_d_epp_request_error_total{namespace=~"$namespace"}[5m])) / sum(rate(llm_d_epp_request_total{namespace=~"$namespace"}[5m]))',
    'sum by(model_name) (rate(llm_d_epp_request_error_total{namespace=~"$namespace",model_name=~"$model_name"}[5m])) '
    '/ sum by(model_name) (rate(llm_d_epp_request_total{namespace=~"$namespace",model_name=~"$model_name"}[5m]))',
    *(
        f'histogram_quantile({share}, sum by(le) (rate(llm_d_epp_request_duration_seconds_bucket{{namespace=~"$namespace",model_name=~"$model_name"}}[5m])))'
        for share in ("0.50", "0.90", "0.99")
    ),
    'sum by(model_name, target_model_name) (rate(llm_d_epp_request_total{namespace=~"$namespace",model_name=~"$model_name"}[5m]))',
    'histogram_quantile(0.99, sum by(le) (rate(llm_d_epp_scheduler_e2e_duration_seconds_bucket{namespace=~"$namespace"}[5m])))',
]

# The drill that makes each alert fire.
DRILLS: dict[str, Callable[[Stack, Load], contextlib.AbstractContextManager[None]]] = {
    "SwitchpointHitRateFell": new_prompts,
    "SwitchpointSloMissed": tight_slo,
    "SwitchpointEnginesQueue": lying("num_requests_waiting", 50),
    "SwitchpointKvCacheFull": lying("kv_cache_usage_perc", 0.98),
    "SwitchpointScrapesFail": faulty("metrics", None),
    "SwitchpointSourceUnusable": unusable_file,
    "SwitchpointEndpointFailing": faulty("inference", [0]),
    "SwitchpointServerErrors": faulty("inference", None),
    "SwitchpointEnginesRestart": restarts,
    "SwitchpointNoReadyEndpoints": no_endpoint,
    "SwitchpointProxyWithoutDaemon": no_daemon,
}


def missing() -> str | None:
    """Returns the reason why the stack cannot run here, if there is one."""
    for file in (BIN / "prometheus", BIN / "promtool"):
        if not file.exists():
            return f"there is no {file.name}; `.ci/cluster_tools.py prometheus` builds it where Go is installed"
    check_built()
    return None


class Observed(unittest.TestCase):
    def setUp(self) -> None:
        if why := missing():
            print(f"SKIPPED {self.id().replace('.', '::')}: {why}", flush=True)
            self.skipTest(why)

    def test_promtool_accepts_rules_and_alerts(self) -> None:
        for arguments in (["check", "rules", "rules.yaml"], ["test", "rules", "alerts_test.yaml"]):
            done = subprocess.run([BIN / "promtool", *arguments], cwd=DASHBOARDS, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_every_alert_has_a_drill(self) -> None:
        alerts = re.findall(r"- alert: (\w+)", (DASHBOARDS / "rules.yaml").read_text())
        self.assertEqual(set(alerts), set(DRILLS))

    def test_alerts_fire_and_clear_and_panels_move(self) -> None:
        with tempfile.TemporaryDirectory(prefix="switchpoint-observe-") as folder:
            stack = Stack(pathlib.Path(folder))
            self.addCleanup(stack.stop)
            stack.start()
            load, began = Load(stack.listeners), time.time()
            load.start()
            self.addCleanup(load.stop)
            time.sleep(WARM_SECONDS)
            self.assertGreater(load.served, 100)
            self.assertEqual(stack.firing(), set(), "alerts fire without an incident")
            spans = []
            for alert, drill in DRILLS.items():
                with self.subTest(alert):
                    spans.append((time.time(), self.drill(stack, load, alert, drill)))
            self.causes_of_misses(stack, load, began)
            self.panels(stack, began, spans)
            self.dashboard_of_llm_d(stack, began)
            load.stop()
            stack.stop()

    def drill(self, stack: Stack, load: Load, alert: str, drill: Callable[[Stack, Load], contextlib.AbstractContextManager[None]]) -> float:
        """Returns when the drill ended, in seconds since 1970."""
        began = time.monotonic()
        with drill(stack, load):
            wait(f"{alert} fires", FIRE_SECONDS_MAX, lambda: alert in stack.firing())
            also = stack.firing() - {alert}
        fired, ended = time.monotonic(), time.time()
        wait(f"{alert} clears", CLEAR_SECONDS_MAX, lambda: not stack.firing())
        cleared = time.monotonic()
        note(f"{alert}: fired after {fired - began:.0f} s, cleared after {cleared - fired:.0f} s; also firing: {sorted(also)}")
        return ended

    def causes_of_misses(self, stack: Stack, load: Load, began: float) -> None:
        """Checks that the daemon counts misses of these causes: sends more prompts than the caches hold, and then restarts an engine."""
        load.prefixes = MANY_PREFIXES
        time.sleep(EVICT_SECONDS)
        load.prefixes = PREFIXES
        time.sleep(SETTLE_SECONDS)
        stack.order("restart", {"for_ms": 1000 * RESTART_SECONDS}, [0])
        time.sleep(RESTART_SECONDS + SETTLE_SECONDS)
        counted = "sum by (cause) (switchpoint_missed_tokens_total)"
        series = stack.query("query_range", query=counted, start=began, end=time.time(), step=STEP)["result"]
        moved = {one["metric"]["cause"] for one in series if len({value for _, value in one["values"]}) > 1}
        note(f"causes of misses that were counted: {sorted(moved)}")
        self.assertLessEqual(CAUSES, moved)

    def dashboard_of_llm_d(self, stack: Stack, began: float) -> None:
        for query in LLM_D_QUERIES:
            with self.subTest(query=query):
                expression = query.replace("$namespace", ".*").replace("$model_name", "demo").replace("[5m]", f"[{RATE_WINDOW}]")
                series = stack.query("query_range", query=expression, start=began, end=time.time(), step=STEP)["result"]
                values = [{value for _, value in one["values"] if value != "NaN"} for one in series]
                self.assertTrue(values, "no series")
                self.assertGreater(min(map(len, values)), 1, "series are constant")

    def panels(self, stack: Stack, began: float, spans: list[tuple[float, float]]) -> None:
        """Checks every query of every dashboard over the whole run, in which something was broken in these spans."""
        answers = {}
        for file in sorted(DASHBOARDS.glob("*.json")):
            for panel in json.loads(file.read_text())["panels"]:
                for target in panel["targets"]:
                    with self.subTest(dashboard=file.stem, panel=panel["title"], query=target["expr"]):
                        expression = target["expr"].replace("$__rate_interval", RATE_WINDOW).replace("$pool", ".+")
                        series = stack.query("query_range", query=expression, start=began, end=time.time(), step=STEP)["result"]
                        self.assertTrue(series, "no series")
                        named = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) - MAY_BE_EMPTY
                        self.assertTrue(all(named <= set(one["metric"]) for one in series), f"no series has all labels of {target['legendFormat']}")
                        answers[target["expr"]] = series
                        values = [{value for _, value in one["values"] if value != "NaN"} for one in series]
                        constant = [one["metric"] for one, found in zip(series, values) if len(found) < 2]
                        if panel["title"] in BY_REASON and len(constant) < len(series):
                            continue
                        self.assertEqual(constant, [], "series are constant")
        if os.environ.get("UPDATE_DOCS"):
            overview = json.loads((DASHBOARDS / "overview.json").read_text())["panels"]
            picture.draw(ROOT / "docs" / "how-to" / "observe.png", overview, answers, spans)


if __name__ == "__main__":
    unittest.main()
