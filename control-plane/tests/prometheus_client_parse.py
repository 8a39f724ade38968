"""Reads and writes pages with the real prometheus_client, to compare our exposition parser with it.

stdin:  {"lines": [text, ...], "seeds": [n, ...]}
stdout: {"lines": [samples | null, ...], "pages": [{"text", "text_samples", "openmetrics", "openmetrics_samples"}, ...]}
A sample is [name, {label: value}, value, timestamp in seconds or null], numbers as repr; null means that the line was refused.
"""
import json
import random
import sys

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text


def number(value):
    try:
        return repr(float(value))
    except OverflowError:  # an int beyond the range of a double
        return "inf" if value > 0 else "-inf"


def samples(families):
    return [[s.name, s.labels, number(s.value), None if s.timestamp is None else number(s.timestamp)] for f in families for s in f.samples]


def read_line(line):
    try:
        return samples(parse_text(line))
    except Exception:  # it raises exceptions of many types
        return None


NASTY = ["", " ", "a, b", "\\", '"', "\n", "{}", "}", "# ", "=", ",", "é", "漢字", "\\n", "tab\t", "meta-llama/Llama-3.1-8B", "-Inf", "\\\\\""]


def registry(seed, prefix):
    """Returns metrics of every type with label values that need escaping."""
    rng = random.Random(seed)
    made = CollectorRegistry()
    for index in range(rng.randint(1, 6)):
        kind, name = rng.choice([Counter, Gauge, Histogram, Info]), f"{prefix}metric_{index}"
        names = [f"l{n}" for n in range(rng.randint(0, 4))]
        metric = kind(name, rng.choice(NASTY), names, registry=made)
        for _ in range(rng.randint(1, 3)):
            child = metric.labels(*(rng.choice(NASTY) + rng.choice(NASTY) for _ in names)) if names else metric
            value = rng.choice([0, 1, 0.1, 1e300, 5e-324, float("inf"), rng.random() * 1e6])
            if kind is Counter:
                child.inc(value if value < 1e300 else 1, exemplar={"trace_id": "a b"} if rng.random() < 0.5 else None)
            elif kind is Gauge:
                child.set(rng.choice([value, -value, float("nan")]))
            elif kind is Histogram:
                child.observe(value, exemplar={"trace_id": "x # y"} if rng.random() < 0.5 else None)
            else:
                child.info({"cache_dtype": rng.choice(NASTY), "num_gpu_blocks": "None"})
    return made


def page(seed):
    """Returns a page in both formats, and the samples that prometheus_client reads from it."""
    text = generate_latest(registry(seed, "vllm:")).decode()
    om = openmetrics.generate_latest(registry(seed, "om_")).decode()  # its reader fails on colons, which its writer replaces
    return {"text": text, "text_samples": samples(parse_text(text)), "openmetrics": om, "openmetrics_samples": samples(parse_openmetrics(om))}


asked = json.load(sys.stdin)
json.dump({"lines": [read_line(line) for line in asked["lines"]], "pages": [page(seed) for seed in asked["seeds"]]}, sys.stdout)
