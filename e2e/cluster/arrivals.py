"""The pure parts of the load generator: when requests arrive, and what the results add up to."""

import collections
import dataclasses
import random
from typing import Iterable, Iterator, NamedTuple

# The shortest and the longest duration of a stream, in seconds.
STREAM_SECONDS = (5.0, 20.0)
# The simulated engines send one token in each write and pause between writes.
TOKENS_PER_SECOND = 4
# The number of writes of a stream in addition to the writes of tokens.
EXTRA_WRITES = 2
PROTOCOLS = ("http/1.1", "http/2")
FAILURES_LISTED_MAX = 200


class Arrival(NamedTuple):
    """One request: seconds after the start, protocol, and the number of tokens to stream (0: not streamed)."""

    at: float
    protocol: str
    stream_tokens: int


def arrivals(rate: float, stream_share: float, seed: int) -> Iterator[Arrival]:
    """Generates requests at a fixed rate per second, without end. The protocols alternate; a share of requests is streamed."""
    generator = random.Random(seed)
    number = 0
    while True:
        streamed = generator.random() < stream_share
        seconds = generator.uniform(*STREAM_SECONDS)
        tokens = round(seconds * TOKENS_PER_SECOND) - EXTRA_WRITES if streamed else 0
        yield Arrival(number / rate, PROTOCOLS[number % len(PROTOCOLS)], tokens)
        number += 1


@dataclasses.dataclass
class Result:
    """The outcome of one request. Times are seconds after the start of the load."""

    arrival: Arrival
    ended: float = 0.0
    status: int = 0
    # Whether the head of the reply was received.
    began: bool = False
    served_by: str = ""
    # The error of the request; empty if the request succeeded.
    error: str = ""


@dataclasses.dataclass
class Report:
    """What a load saw. `longest_gap` is in seconds, between successes."""

    # The start of the load on the machine's monotonic clock, which all processes share.
    started: float = 0.0
    requests: int = 0
    failed: int = 0
    # The number of failures after the head of the reply.
    failed_begun: int = 0
    streams: int = 0
    seconds: float = 0.0
    longest_gap: float = 0.0
    statuses: dict[str, int] = dataclasses.field(default_factory=dict)
    by_protocol: dict[str, int] = dataclasses.field(default_factory=dict)
    served_by: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[dict] = dataclasses.field(default_factory=list)


def longest_gap(times: list[float], end: float) -> float:
    """Returns the longest time without an event, from 0 to `end`."""
    points = [0.0, *sorted(time for time in times if time <= end), end]
    return max(later - earlier for earlier, later in zip(points, points[1:]))


def summarize(results: list[Result], seconds: float) -> Report:
    """Computes the report of a load. `seconds` is the time during which requests arrived."""
    failed = [result for result in results if result.error]
    successes = [result.ended for result in results if not result.error]
    return Report(
        requests=len(results),
        failed=len(failed),
        failed_begun=sum(result.began for result in failed),
        streams=sum(result.arrival.stream_tokens > 0 for result in results),
        seconds=seconds,
        longest_gap=longest_gap(successes, seconds),
        statuses=dict(collections.Counter(str(result.status) for result in results)),
        by_protocol=dict(collections.Counter(result.arrival.protocol for result in results)),
        served_by=dict(collections.Counter(result.served_by for result in results if result.served_by)),
        failures=[dataclasses.asdict(result) for result in failed[:FAILURES_LISTED_MAX]],
    )


def added(reports: Iterable[Report]) -> Report:
    """Returns one report of several loads."""
    total = Report()
    for report in reports:
        for field in ("requests", "failed", "failed_begun", "streams"):
            setattr(total, field, getattr(total, field) + getattr(report, field))
        total.failures = [*total.failures, *report.failures]
        total.longest_gap = max(total.longest_gap, report.longest_gap)
    return total
