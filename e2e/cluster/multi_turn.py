"""Sends a trace of several conversations at once to a gateway and prints the hit rate of the engines' prefix caches and the times to
the first token, as JSON. It runs inside the node's network.

    multi_turn.py HOST:PORT ENGINE,ENGINE... [HEADER: VALUE]...

All conversations have one system prompt, and each conversation has a different document. Each turn sends all messages before it. Each
run has words of its own. CONVERSATION in a header's value stands for the name of the conversation."""

import concurrent.futures
import json
import random
import statistics
import sys
import time

from conversations import COUNTERS, counted, turn, words

CONVERSATIONS = 24
AT_ONCE = 6
TURNS = 5
# The numbers of words of the system prompt and of a document. A word is about two tokens, so a first prompt has about 17,000 tokens.
SYSTEM_WORDS = 500
DOCUMENT_WORDS = 8_000
TURN_WORDS = 100
# The pause between two turns, like that of a reader, so that turns of different conversations alternate.
PAUSE_SECONDS = 0.3


def converse(address: str, headers: dict[str, str], system: str, name: str) -> list[dict]:
    generator = random.Random(name)
    document = words(generator, DOCUMENT_WORDS)
    messages = [{"role": "system", "content": system}]
    own = {header: value.replace("CONVERSATION", name) for header, value in headers.items()}
    turns = []
    for position in range(TURNS):
        asked = words(generator, TURN_WORDS)
        messages.append({"role": "user", "content": asked if position else f"{document} {asked}"})
        turns.append(turn(address, own, messages))
        messages.append({"role": "assistant", "content": f"answer {position}"})
        time.sleep(PAUSE_SECONDS * generator.random() * 2)
    return turns


def main(address: str, engines: list[str], headers: dict[str, str]) -> dict:
    before = [counted(engines, name) for name in COUNTERS]
    run = f"{time.time_ns():x}"
    system = words(random.Random(run), SYSTEM_WORDS)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        trace = list(pool.map(lambda number: converse(address, headers, system, f"{run}-{number}"), range(CONVERSATIONS)))
    queries, hits = (counted(engines, name) - old for name, old in zip(COUNTERS, before))
    refused = [one for turns in trace for one in turns if one["status"] != 200]
    if refused:
        raise SystemExit(f"{len(refused)} chats were refused: {refused[0]}")
    first = [one["first"] * 1000 for turns in trace for one in turns[1:]]
    pairs = [(a["served_by"], b["served_by"]) for turns in trace for a, b in zip(turns, turns[1:])]
    return {
        "hit_rate": hits / queries,
        "stayed": sum(a == b for a, b in pairs) / len(pairs),
        "first_ms": {"mean": statistics.mean(first), "p50": statistics.median(first), "p90": statistics.quantiles(first, n=10)[-1]},
    }


if __name__ == "__main__":
    chosen = dict(text.split(": ", 1) for text in sys.argv[3:])
    print(json.dumps(main(sys.argv[1], sys.argv[2].split(","), chosen)))
