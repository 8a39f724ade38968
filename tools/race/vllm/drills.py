"""What the race does to each router: sessions, clients that leave, an engine that starts again, adapters."""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import chat
import counters
import processes
import routers
import sessions
from engines import Engines, LocalEngines
from sessions import Shape

# The number of clients that leave, the pieces of the reply that these clients read, and the length of the whole reply.
LEAVERS = 12
LEAVE_AFTER = 3
LONG_TOKENS = 300
# The time within which engines must be idle. An engine that still generates for a client that has left is busy for longer.
IDLE_WITHIN_SECONDS = 20
# The time of load before the end of the engine, and the time of load after the engine's return.
BEFORE_SECONDS = 15
AFTER_SECONDS = 40
ADAPTER_CHATS = 24
ADAPTER_TOKENS = 4
BUSY_RATE = Shape(sessions=sessions.SESSIONS_MAX, rate=0.2)


def salt(part: str, seed: int) -> str:
    """Returns a word that no other run uses."""
    return f"{part}{seed}{time.time_ns() % 1_000_000}"


def with_router(name: str, engines: Engines, run: str, act: Callable[[str], Any]) -> Any:
    """Starts the router, calls `act` with its URL, and stops it."""
    front = routers.start(name, engines.urls, run)
    try:
        return act(front.url)
    finally:
        front.stop()


def race(name: str, engines: Engines, shape: Shape, seed: int) -> dict[str, Any]:
    """Runs sessions from empty caches. Returns what the clients saw, and what the engines counted meanwhile."""
    emptied = engines.empty()

    def act(url: str) -> dict[str, Any]:
        before = engines.settled()
        report = sessions.summarize(sessions.run(url, engines.model, shape, seed, salt("r", seed)))
        rows = [after - old for old, after in zip(before, engines.settled())]
        return {"router": name, "seed": seed, "caches_emptied": emptied, **dataclasses.asdict(report), **counted(rows)}

    return with_router(name, engines, f"race-{seed}", act)


def counted(rows: list[counters.Counted]) -> dict[str, Any]:
    """Returns the engines' own figures, as members of a result."""
    whole = counters.total(rows)
    return {
        "hit_rate": whole.hit_rate,
        "requests_by_engine": [round(row.requests) for row in rows],
        "engines": {name: round(value) for name, value in dataclasses.asdict(whole).items() if name != "running"},
    }


def leaving(name: str, engines: Engines) -> dict[str, Any]:
    """Runs clients that close the connection in the middle of a stream. The engines must become idle soon."""

    def act(url: str) -> dict[str, Any]:
        before = engines.settled()
        answers: list[chat.Answer] = []

        def leave(number: int) -> None:
            text = f"{salt('c', number)} Tell me a long story about a river."
            answers.append(chat.ask(url, chat.body(engines.model, [{"role": "user", "content": text}], LONG_TOKENS), LEAVE_AFTER))

        threads = [threading.Thread(target=leave, args=(number,)) for number in range(LEAVERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        began = time.monotonic()
        try:
            processes.wait("idle engines", IDLE_WITHIN_SECONDS, lambda: counters.total(engines.counted()).running == 0)
            seconds: float | None = round(time.monotonic() - began, 2)
        except processes.Late:
            seconds = None
        whole = counters.total([after - old for old, after in zip(before, engines.settled())])
        return {
            "router": name, "clients": LEAVERS, "left": sum(answer.left for answer in answers), "idle_after_s": seconds,
            "generated": round(whole.generation_tokens), "requested": LEAVERS * LONG_TOKENS,
            "failures": [answer.error for answer in answers if answer.failed][: sessions.FAILURES_SHOWN_MAX],
        }  # fmt: skip

    return with_router(name, engines, "leaving", act)


def restart(name: str, engines: LocalEngines) -> dict[str, Any]:
    """Ends one engine under load, and starts the engine again at the same address."""

    def act(url: str) -> dict[str, Any]:
        stop, answers = threading.Event(), []
        shape = BUSY_RATE
        load = threading.Thread(target=lambda: answers.extend(sessions.run(url, engines.model, shape, 1, salt("s", 1), stop)))
        load.start()
        try:
            time.sleep(BEFORE_SECONDS)
            ended = time.monotonic()
            engines.end(0)
            engines.again(0)
            engines.wait_until_ready(0)
            away = time.monotonic() - ended
            back = engines.counted()[0]
            time.sleep(AFTER_SECONDS)
            served = engines.counted()[0] - back
        finally:
            stop.set()
            load.join()
        report = sessions.summarize(answers)
        return {
            "router": name, "requests": report.requests, "failed": report.failed, "failures": report.failures,
            "away_s": round(away), "after_s": AFTER_SECONDS, "requests_after": round(served.requests),
        }  # fmt: skip

    return with_router(name, engines, "restart", act)


def adapters(name: str, engines: Engines, names: list[str]) -> dict[str, Any]:
    """Sends chats with each adapter in turn, one chat after the other."""

    def act(url: str) -> dict[str, Any]:
        rows: dict[str, list[int]] = {adapter: [0] * len(engines.urls) for adapter in names}
        failures = []
        for number in range(ADAPTER_CHATS):
            adapter = names[number % len(names)]
            before = engines.counted()
            text = f"{salt('l', number)} Name a colour."
            answer = chat.ask(url, chat.body(adapter, [{"role": "user", "content": text}], ADAPTER_TOKENS))
            if answer.failed:
                failures.append(answer.error)
            deltas = [after - old for old, after in zip(before, engines.settled())]
            for at, delta in enumerate(deltas):
                rows[adapter][at] += round(delta.requests)
        return {"router": name, "chats": ADAPTER_CHATS, "failed": len(failures), "failures": failures[: sessions.FAILURES_SHOWN_MAX], "by_adapter": rows}

    return with_router(name, engines, "adapters", act)


def one_answer(engines: Engines) -> chat.Answer:
    """Shows that the model gives sensible answers."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    return chat.ask(engines.urls[0], chat.body(engines.model, question, 24, exact=False))




def ask_adapters(url: str, names: list[str]) -> None:
    """Sends one short chat with each adapter, so that the metrics page shows all adapters."""
    for name in names:
        chat.ask(url, chat.body(name, [{"role": "user", "content": "Name a colour."}], ADAPTER_TOKENS))
