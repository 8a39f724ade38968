"""Sends conversations to a gateway and prints the outcome of the conversations, as JSON. It runs inside the node's network.

    conversations.py HOST:PORT ENGINE,ENGINE... [HEADER: VALUE]... [CONVERSATIONS]

One conversation runs at a time, so its endpoints depend on the prefix caches and not on load. Each run has words of its own.
The share of prompt tokens that the engines had cached comes from their metrics.
CONVERSATION in a header's value stands for the name of the conversation."""

import http.client
import json
import random
import sys
import time
import urllib.request

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
CONVERSATIONS = 8
TURNS = 5
FIRST_WORDS = 400
TURN_WORDS = 60
PAUSE_SECONDS = 0.1
SECONDS_MAX = 30
# The engines of the drills pause 250 ms before each write of a stream.
REPLY_TOKENS = 1
COUNTERS = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")


def words(generator: random.Random, count: int) -> str:
    return " ".join(f"word{generator.randrange(10_000)}" for _ in range(count))


def turn(address: str, headers: dict[str, str], messages: list[dict[str, str]]) -> dict:
    """Sends one streamed chat. Returns the endpoint that answered, and the seconds to the first chunk."""
    body = {"model": MODEL, "messages": messages, "max_tokens": REPLY_TOKENS, "stream": True}
    client = http.client.HTTPConnection(address, timeout=SECONDS_MAX)
    began = time.monotonic()
    client.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json", **headers})
    reply = client.getresponse()
    first = reply.readline()
    seconds = time.monotonic() - began
    text = first + reply.read()
    client.close()
    if reply.status != 200:
        return {"status": reply.status, "text": text[:300].decode(errors="replace")}
    return {"status": 200, "served_by": reply.getheader("x-served-by", ""), "first": seconds}


def counted(engines: list[str], name: str) -> float:
    """Returns the sum of a counter over all engines."""
    total = 0.0
    for engine in engines:
        with urllib.request.urlopen(f"http://{engine}/metrics", timeout=SECONDS_MAX) as reply:
            rows = reply.read().decode().splitlines()
        total += sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith((f"{name}{{", f"{name} ")))
    return total


class Conversation:
    """Each turn sends all messages before it."""

    def __init__(self, address: str, headers: dict[str, str], name: str) -> None:
        self.address = address
        self.headers = {header: value.replace("CONVERSATION", name) for header, value in headers.items()}
        self.generator = random.Random(name)
        self.messages = [{"role": "system", "content": words(self.generator, FIRST_WORDS)}]

    def turn(self) -> dict:
        position = len(self.messages) // 2
        self.messages.append({"role": "user", "content": words(self.generator, TURN_WORDS)})
        answer = turn(self.address, self.headers, self.messages)
        self.messages.append({"role": "assistant", "content": f"answer {position}"})
        return answer


def converse(address: str, headers: dict[str, str], name: str) -> list[dict]:
    """Plays one whole conversation."""
    held = Conversation(address, headers, name)
    turns = []
    for _ in range(TURNS):
        turns.append(held.turn())
        time.sleep(PAUSE_SECONDS)
    return turns


def main(address: str, engines: list[str], headers: dict[str, str], conversations: int = CONVERSATIONS) -> dict:
    before = [counted(engines, name) for name in COUNTERS]
    run = f"{time.time_ns():x}"
    held = [converse(address, headers, f"{run}-{number}") for number in range(conversations)]
    queries, hits = (counted(engines, name) - old for name, old in zip(COUNTERS, before))
    return {"conversations": held, "hit_rate": hits / queries if queries else 0.0}


if __name__ == "__main__":
    chosen = dict(text.split(": ", 1) for text in sys.argv[3:] if not text.isdecimal())
    number = next((int(text) for text in sys.argv[3:] if text.isdecimal()), CONVERSATIONS)
    print(json.dumps(main(sys.argv[1], sys.argv[2].split(","), chosen, number)))
