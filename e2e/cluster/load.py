"""An open-loop load: requests arrive at a fixed rate, however slow the answers are. SIGTERM ends the arrivals; requests in flight
finish, then the report is written.

    load.py HOST:PORT REPORT [--rate 50] [--streams 0.1] [--seed 1]
"""

import argparse
import asyncio
import dataclasses
import json
import pathlib
import random
import signal
import time

from arrivals import Arrival, Report, Result, arrivals, summarize
from clients import Address, Broken, Http1Client, Http2Client, Reply

RATE = 50.0
STREAM_SHARE = 0.1
# The time limit of a stream. The longest stream lasts 20 s.
STREAM_SECONDS_MAX = 60
REQUEST_SECONDS_MAX = 20
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
PATH = "/v1/chat/completions"
REPLY_TOKENS = 8
# The number of different beginnings of prompts. Prompts share beginnings, as conversations do.
PREFIXES = 16
PREFIX_WORDS = 200


class Load:
    """Sends requests to one address and collects the results."""

    def __init__(self, address: Address, rate: float, stream_share: float, seed: int):
        self.plan = arrivals(rate, stream_share, seed)
        self.clients: dict[str, Http1Client | Http2Client] = {"http/1.1": Http1Client(address), "http/2": Http2Client(address)}
        self.began = 0.0
        self.results: list[Result] = []
        self.running: set[asyncio.Task[None]] = set()
        self.stop = asyncio.Event()
        generator = random.Random(seed)
        self.prefixes = [" ".join(f"word{generator.randrange(1000)}" for _ in range(PREFIX_WORDS)) for _ in range(PREFIXES)]

    async def run(self) -> Report:
        self.began = time.monotonic()
        for arrival in self.plan:
            try:
                await asyncio.wait_for(self.stop.wait(), max(0.0, arrival.at - self.now()))
                break
            except TimeoutError:
                pass
            task = asyncio.create_task(self.request(arrival))
            self.running.add(task)
            task.add_done_callback(self.running.discard)
        seconds = self.now()
        if self.running:
            await asyncio.wait(self.running)
        return dataclasses.replace(summarize(self.results, seconds), started=self.began)

    def now(self) -> float:
        return time.monotonic() - self.began

    def body(self, arrival: Arrival) -> bytes:
        prompt = f"{self.prefixes[round(arrival.at * 1000) % PREFIXES]} question {arrival.at}"
        tokens = arrival.stream_tokens or REPLY_TOKENS
        return json.dumps(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": tokens,
                "min_tokens": tokens,
                "stream": arrival.stream_tokens > 0,
            }
        ).encode()

    async def request(self, arrival: Arrival) -> None:
        result, reply = Result(arrival), Reply()
        limit = STREAM_SECONDS_MAX if arrival.stream_tokens else REQUEST_SECONDS_MAX
        post = self.clients[arrival.protocol].post(PATH, {"content-type": "application/json"}, self.body(arrival), reply)
        try:
            await asyncio.wait_for(post, limit)
            result.error = judge(arrival, reply)
        except TimeoutError:
            result.error = f"no complete answer within {limit} s"
        except (Broken, OSError) as error:
            result.error = f"{type(error).__name__}: {error}"
        except Exception as error:  # a client that fails is a failed request, not the end of the load
            result.error = f"client: {type(error).__name__}: {error}"
        result.ended, result.status, result.began = self.now(), reply.status, reply.status != 0
        result.served_by = reply.headers.get("x-served-by", "")
        self.results.append(result)


def judge(arrival: Arrival, reply: Reply) -> str:
    """Returns the error of a complete reply, or nothing."""
    if reply.status != 200:
        return f"status {reply.status}: {bytes(reply.body[:200]).decode(errors='replace')}"
    if arrival.stream_tokens:
        return "" if reply.body.endswith(b"data: [DONE]\n\n") else "the stream has no end"
    try:
        json.loads(reply.body)["choices"]
    except (ValueError, KeyError):
        return "the body is not a completion"
    return ""


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("report", type=pathlib.Path)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--streams", type=float, default=STREAM_SHARE)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    host, _, port = args.address.rpartition(":")
    load = Load(Address(host, int(port)), args.rate, args.streams, args.seed)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, load.stop.set)
    report = await load.run()
    args.report.write_text(json.dumps(dataclasses.asdict(report), indent=1))


if __name__ == "__main__":
    asyncio.run(main())
