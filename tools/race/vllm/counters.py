"""Reads vLLM's own counters, by which the race compares routers, whatever the routers report."""

import dataclasses
import re

SAMPLE = re.compile(r"(?m)^(vllm:\w+)(?:\{([^}\n]*)\})? (\S+)")
# The finish reasons of requests without a complete reply.
UNFINISHED = ("abort", "error")
FINISHED = re.compile(r'finished_reason="(\w+)"')


@dataclasses.dataclass(frozen=True)
class Counted:
    """Counters of one engine at one time, or the difference of two times, or a sum over engines."""

    requests: float = 0
    aborted: float = 0
    prompt_tokens: float = 0
    generation_tokens: float = 0
    queried_tokens: float = 0
    hit_tokens: float = 0
    running: float = 0

    def __add__(self, other: "Counted") -> "Counted":
        return Counted(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def __sub__(self, other: "Counted") -> "Counted":
        return Counted(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


FIELDS = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prefix_cache_queries_total": "queried_tokens",
    "vllm:prefix_cache_hits_total": "hit_tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "running",
}


def read(page: str) -> Counted:
    """Reads a metrics page. Several series of one name, such as those of data-parallel ranks, are added. A request without a
    whole reply counts as aborted and not as one of `requests`."""
    sums = dict.fromkeys((field.name for field in dataclasses.fields(Counted)), 0.0)
    for name, labels, value in SAMPLE.findall(page):
        if name == "vllm:request_success_total":
            reason = FINISHED.search(labels)
            sums["aborted" if reason and reason[1] in UNFINISHED else "requests"] += float(value)
        elif name in FIELDS:
            sums[FIELDS[name]] += float(value)
    return Counted(**sums)


def total(rows: list[Counted]) -> Counted:
    return sum(rows, Counted())
