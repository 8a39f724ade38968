"""A steady load on the proxies: clients with one request at a time, most of them streams, with shared prompts and an SLO."""

import http.client
import json
import random
import threading
import time

CLIENTS = 10
PAUSE_SECONDS = 0.05
REQUEST_SECONDS_MAX = 30
PREFIXES = 6
PREFIX_WORDS = 600
OUTPUT_TOKENS = 24
# One request in INVALID_EVERY requests has a body that is not JSON.
INVALID_EVERY = 40


class Load:
    """`ttft_ms` is the SLO of the requests. While `shared` is false, all prompts have different beginnings. Otherwise prompts have one
    of `prefixes` beginnings."""

    def __init__(self, ports: list[int]):
        self.ports = ports
        self.shared = True
        self.prefixes = PREFIXES
        self.ttft_ms = 20_000
        self.over = threading.Event()
        self.served = 0
        self.threads = [threading.Thread(target=self.client, args=(number,), daemon=True) for number in range(CLIENTS)]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(REQUEST_SECONDS_MAX)

    def client(self, number: int) -> None:
        generator = random.Random(number)
        sent = 0
        while not self.over.is_set():
            sent += 1
            try:
                was_served = self.request(generator, sent % INVALID_EVERY == 0)
                self.served += was_served
            except (OSError, http.client.HTTPException):
                pass  # drills break requests on purpose
            time.sleep(PAUSE_SECONDS * generator.uniform(0, 4))

    def request(self, generator: random.Random, invalid: bool) -> bool:
        """Sends one request. Returns whether it was served."""
        seed = generator.randrange(self.prefixes) if self.shared else generator.random()
        words = random.Random(seed)
        prompt = " ".join(f"word{words.randrange(1000)}" for _ in range(PREFIX_WORDS)) + f" {generator.random()}"
        body = {"model": "demo", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": generator.random() < 0.8}
        headers = {
            "content-type": "application/json",
            "x-llm-d-slo-ttft-ms": str(self.ttft_ms),
            "x-llm-d-slo-tpot-ms": "20000",
            "PredictionBasedRouting": "true",
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        connection = http.client.HTTPConnection("127.0.0.1", generator.choice(self.ports), timeout=REQUEST_SECONDS_MAX)
        try:
            connection.request("POST", "/v1/completions", "{" if invalid else json.dumps(body), headers)
            reply = connection.getresponse()
            reply.read()
            return reply.status == 200
        finally:
            connection.close()
