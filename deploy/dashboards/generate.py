#!/usr/bin/env python3
"""Writes the Grafana dashboards: overview, capacity, cache and SLO.

    deploy/dashboards/generate.py        writes deploy/dashboards/*.json

A test compares the committed files with what this program makes. Standard library only.
"""

import json
import pathlib
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
WIDTH = 24
COLUMNS = 3
HEIGHT = 8
RATE = "[$__rate_interval]"
POOL = '{pool=~"$pool"}'
# The matcher of the pool in llm-d's pool metrics, whose label is `name`.
NAME = '{name=~"$pool"}'
# The matcher of the pool in llm-d's metrics of flow control, whose label is `inference_pool`.
INFERENCE_POOL = '{inference_pool=~"$pool"}'
BAND = "{{inference_pool}} {{priority}}"
GROUP = "{{pool}} {{role}} {{model_name}}"
ENDPOINT = "{{pool}} {{endpoint_name}}"


class Query(NamedTuple):
    """A query of a panel, and the name of its series."""

    expression: str
    legend: str


class Panel(NamedTuple):
    title: str
    meaning: str
    unit: str
    queries: list[Query]


def rate(name: str, by: str, matchers: str = POOL) -> str:
    """Returns the rate of a counter, summed over daemons or proxies."""
    return f"sum by ({by}) (rate({name}{matchers}{RATE}))"


def quantile(share: float, name: str, by: str = "pool", matchers: str = POOL) -> str:
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', f'{by}, le' if by else 'le', matchers)})"


def quantiles(name: str) -> list[Query]:
    return [Query(quantile(share, name), f"{{{{pool}}}} p{share * 100:.0f}") for share in (0.5, 0.95)]


OVERVIEW = [
    Panel("Requests", "Requests per second, by pool.", "reqps", [Query(rate("llm_d_epp_request_total", "pool"), "{{pool}}")]),
    Panel(
        "Errors",
        "Requests answered with an error per second, by HTTP status. No series: no error yet.",
        "reqps",
        [Query(rate("llm_d_epp_request_error_total", "pool, error_code"), "{{pool}} {{error_code}}")],
    ),
    Panel("Requests in progress", "Requests outstanding in all proxies.", "short", [Query(f"sum by (pool) (llm_d_epp_request_running{POOL})", "{{pool}}")]),
    Panel("Time to first token", "From pick to first token of streamed responses.", "s", quantiles("llm_d_epp_request_ttft_seconds")),
    Panel("Duration of requests", "From a request to the end of its response.", "s", quantiles("llm_d_epp_request_duration_seconds")),
    Panel(
        "Time of a pick",
        "From the last byte of a request to its decision, in the proxies.",
        "µs",
        [Query(quantile(share, "switchpoint_pick_us", "", ""), f"p{share * 100:.0f}") for share in (0.5, 0.99)],
    ),
    Panel(
        "Output tokens",
        "Tokens generated per second, by model.",
        "short",
        [Query(rate("llm_d_epp_request_output_tokens_sum", "pool, model_name"), "{{pool}} {{model_name}}")],
    ),
    Panel("Ready endpoints", "Endpoints that may be picked.", "short", [Query(f"max by (name) (llm_d_epp_ready_endpoints{NAME})", "{{name}}")]),
    Panel(
        "Picks by endpoint",
        "Picks per second, by the first endpoint of the ranked list.",
        "reqps",
        [Query(rate("llm_d_epp_scheduler_attempts_total", "pool, endpoint_name", '{pool=~"$pool", status="success"}'), ENDPOINT)],
    ),
    Panel(
        "Failed attempts",
        "Requests per second that an endpoint refused or reset before a response. Most are served by the next endpoint.",
        "reqps",
        [Query(rate("switchpoint_endpoint_failed_total", "pool, endpoint_name"), ENDPOINT)],
    ),
    Panel(
        "Refused requests",
        "Requests per second that the proxies refused: invalid, by policy (shed), or without an endpoint (unavailable).",
        "reqps",
        [Query(f"sum(rate(switchpoint_refused_{reason}_total{RATE}))", reason) for reason in ("invalid", "shed", "unavailable")],
    ),
    Panel(
        "Age of state in the proxies",
        "Time since the last message of the daemon. It grows while a proxy is disconnected.",
        "ms",
        [Query("max by (instance) (switchpoint_state_age_ms)", "{{instance}}")],
    ),
]

CAPACITY = [
    Panel("Queue in the engines, mean", "Requests that wait in an engine.", "short", [Query(f"max by (name) (llm_d_epp_average_queue_size{NAME})", "{{name}}")]),
    Panel(
        "Queue by endpoint",
        "Requests that wait in an engine.",
        "short",
        [Query(f"max by (name, model_server_endpoint) (llm_d_epp_per_endpoint_queue_size{NAME})", "{{name}} {{model_server_endpoint}}")],
    ),
    Panel("Running in the engines, mean", "Requests that an engine computes.", "short", [Query(f"max by (name) (llm_d_epp_average_running_requests{NAME})", "{{name}}")]),
    Panel(
        "KV-cache utilization, mean", "Share of the KV blocks in use.", "percentunit", [Query(f"max by (name) (llm_d_epp_average_kv_cache_utilization{NAME})", "{{name}}")]
    ),
    Panel(
        "KV-cache utilization, spread",
        "Standard deviation over the endpoints. A large one means unequal load.",
        "percentunit",
        [Query(f"max by (name) (llm_d_epp_std_dev_kv_cache_utilization{NAME})", "{{name}}")],
    ),
    Panel(
        "In flight by endpoint",
        "Requests that all proxies have outstanding at an endpoint.",
        "short",
        [Query(f"sum by (pool, endpoint_name) (llm_d_epp_inflight_requests{POOL})", ENDPOINT)],
    ),
    Panel(
        "Tokens in flight by endpoint",
        "Tokens of prompts and outputs that are outstanding at an endpoint.",
        "short",
        [Query(f"sum by (pool, endpoint_name) (llm_d_epp_inflight_tokens{POOL})", ENDPOINT)],
    ),
    Panel("Served by endpoint", "Requests per second that an endpoint answered.", "reqps", [Query(rate("switchpoint_endpoint_served_total", "pool, endpoint_name"), ENDPOINT)]),
    Panel(
        "Requests held",
        "Requests that flow control holds until an endpoint has room, by priority. No series: flow control is off.",
        "short",
        [Query(f"sum by (inference_pool, priority) (llm_d_epp_flow_control_queue_size{INFERENCE_POOL})", BAND)],
    ),
    Panel(
        "Time held, p95",
        "Time that requests were held before they were sent, by priority.",
        "s",
        [Query(quantile(0.95, "llm_d_epp_flow_control_request_queue_duration_seconds", "inference_pool, priority", INFERENCE_POOL), BAND)],
    ),
    Panel(
        "Outcomes of held requests",
        "Requests per second that flow control sent, refused or gave up, by outcome and priority.",
        "reqps",
        [Query(rate("llm_d_epp_flow_control_requests_total", "inference_pool, priority, outcome", INFERENCE_POOL), f"{BAND} {{{{outcome}}}}")],
    ),
    Panel(
        "Replicas desired",
        "Replicas that hold the goal of --scale-ttft, and those that arriving requests keep busy; by role and model.",
        "short",
        [
            Query(f"max by (pool, role, model_name) (switchpoint_desired_replicas{POOL})", f"{GROUP} desired"),
            Query(f"max by (pool, role, model_name) (switchpoint_busy_replicas{POOL})", f"{GROUP} busy"),
        ],
    ),
    Panel(
        "Backlog",
        "Time in which the replicas could do all outstanding work, held requests included; by role and model.",
        "s",
        [Query(f"max by (pool, role, model_name) (switchpoint_backlog_seconds{POOL})", GROUP)],
    ),
    Panel("Restarts of engines", "Restarts per second that the daemon noticed.", "short", [Query(f"max by (pool) (rate(switchpoint_endpoint_restarts_total{POOL}{RATE}))", "{{pool}}")]),
    Panel("Scrapes", "Reads of the engines' metrics per second.", "reqps", [Query(rate("switchpoint_scrapes_total", "pool"), "{{pool}}")]),
    Panel(
        "Failed scrapes",
        "Reads of the engines' metrics that failed per second, by reason. No series: none fails.",
        "reqps",
        [Query(rate("switchpoint_scrape_failures_total", "pool, reason") + " > 0", "{{pool}} {{reason}}")],
    ),
    Panel("Time of a scrape", "From the request to the end of the page.", "s", quantiles("switchpoint_scrape_duration_seconds")),
]

HITS = f"{rate('llm_d_epp_request_cached_tokens_sum', '@')} / {rate('llm_d_epp_request_input_tokens_sum', '@')}"
CACHE = [
    Panel("Hit rate", "Share of the prompt tokens that engines had cached, as they report it.", "percentunit", [Query(HITS.replace("@", "pool"), "{{pool}}")]),
    Panel("Hit rate by model", "Share of the prompt tokens that engines had cached, by model.", "percentunit", [Query(HITS.replace("@", "pool, model_name"), "{{pool}} {{model_name}}")]),
    Panel(
        "Missed prompt tokens by cause",
        "Prompt tokens per second that engines had to compute, by cause. With the cached ones they are all prompt tokens.",
        "short",
        [Query(rate("switchpoint_missed_tokens_total", "pool, cause") + " > 0", "{{pool}} {{cause}}")],
    ),
    Panel(
        "Prompt tokens",
        "Prompt tokens per second: all, and those that engines had cached.",
        "short",
        [
            Query(rate("llm_d_epp_request_input_tokens_sum", "pool"), "{{pool}} all"),
            Query(rate("llm_d_epp_request_cached_tokens_sum", "pool"), "{{pool}} cached"),
        ],
    ),
    Panel("Prefix index", "Entries of the fullest prefix index of a pool.", "short", [Query(f"max by (pool) (llm_d_epp_prefix_indexer_size{POOL})", "{{pool}}")]),
    Panel(
        "Delay of shared state",
        "Delay until other proxies receive a change, estimated from the round trip.",
        "µs",
        [Query(quantile(share, "switchpoint_share_delay_us", "", ""), f"p{share * 100:.0f}") for share in (0.5, 0.95)],
    ),
    Panel(
        "Restarts of engines",
        "Restarts per second. An engine starts with an empty cache.",
        "short",
        [Query(f"max by (pool) (rate(switchpoint_endpoint_restarts_total{POOL}{RATE}))", "{{pool}}")],
    ),
]

MET = rate("switchpoint_slo_requests_total", "pool", '{pool=~"$pool", outcome="met"}')
SLO = [
    Panel("Attainment", "Share of the requests with an SLO that met it.", "percentunit", [Query(f"{MET} / {rate('switchpoint_slo_requests_total', 'pool')}", "{{pool}}")]),
    Panel(
        "Requests with an SLO",
        "Requests with an SLO per second: met, missed, or shed because no endpoint could meet it.",
        "reqps",
        [Query(rate("switchpoint_slo_requests_total", "pool, outcome"), "{{pool}} {{outcome}}")],
    ),
    Panel("Time to first token", "From pick to first token of streamed responses.", "s", quantiles("llm_d_epp_request_ttft_seconds")),
    Panel("Time per further token", "Mean time between two tokens of a response.", "s", quantiles("llm_d_epp_request_streaming_tpot_seconds")),
    Panel(
        "Measured against predicted time",
        "Median of measured divided by predicted time; 1 is exact. Needs --latency-prediction.",
        "short",
        [Query(quantile(0.5, "switchpoint_latency_actual_to_predicted_ratio", "pool, target"), "{{pool}} {{target}}")],
    ),
    Panel(
        "Error of predictions",
        "Mean absolute error of the newest predictions, relative to the measurement. Needs --latency-prediction.",
        "percentunit",
        [Query('max by (pool, target) (switchpoint_latency_mape{pool=~"$pool", endpoint_name=""})', "{{pool}} {{target}}")],
    ),
]

DASHBOARDS = {
    "overview": ("Switchpoint: overview", OVERVIEW),
    "capacity": ("Switchpoint: capacity", CAPACITY),
    "cache": ("Switchpoint: prefix cache", CACHE),
    "slo": ("Switchpoint: SLO", SLO),
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def panel(index: int, one: Panel) -> dict[str, Any]:
    width = WIDTH // COLUMNS
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": one.title,
        "description": one.meaning,
        "datasource": SOURCE,
        "gridPos": {"x": index % COLUMNS * width, "y": index // COLUMNS * HEIGHT, "w": width, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": one.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": query.expression, "legendFormat": query.legend}
            for number, query in enumerate(one.queries)
        ],
    }


def dashboard(name: str) -> dict[str, Any]:
    """Returns the dashboard as Grafana imports it."""
    title, panels = DASHBOARDS[name]
    pools = "label_values(llm_d_epp_ready_endpoints, name)"
    return {
        "uid": f"switchpoint-{name}",
        "title": title,
        "tags": ["switchpoint"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "title": "Switchpoint", "tags": ["switchpoint"], "asDropdown": True, "keepTime": True, "includeVars": True}],
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "pool",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": {"query": pools, "refId": "pool"},
                    "definition": pools,
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".+",
                    "current": {"text": "All", "value": "$__all"},
                    "refresh": 2,
                    "sort": 1,
                },
            ]
        },
        "panels": [panel(index, one) for index, one in enumerate(panels)],
    }


def text(name: str) -> str:
    """Returns the committed text of a dashboard."""
    return json.dumps(dashboard(name), indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    for name in DASHBOARDS:
        (HERE / f"{name}.json").write_text(text(name))


if __name__ == "__main__":
    main()
