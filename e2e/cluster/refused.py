"""Makes one engine refuse the gateway's connections while conversations with it go on, and prints the outcome of the conversations, as
JSON. It runs inside the node's network.

    refused.py HOST:PORT GATEWAY,GATEWAY... ENGINE=PID...

GATEWAY is the address of a pod of the gateway, and PID a process of the ENGINE. The rule is in the engine's own network, and for the
gateway's packets only, so probes and the daemon's scrapes go on, and the first to notice is the gateway's own request."""

import collections
import contextlib
import json
import re
import subprocess
import sys
import time
from typing import Iterator

from conversations import Conversation

TABLE = "inet refused"
CONVERSATIONS = 9
# The maximum number of turns. The picker avoids the engine after the first refusal; without prefixes, the picker sends a third of the
# requests to the engine.
TURNS_MAX = 40
RETURN_SECONDS_MAX = 60
PAUSE_SECONDS = 0.3


def rules(gateways: list[str], port: str) -> str:
    """Returns the rules that reset each connection from the gateway to the engine's port, whether the connection is new or from the
    gateway's pool."""
    rule = f"ip saddr {{ {', '.join(gateways)} }} tcp dport {port} counter reject with tcp reset"
    return f"table {TABLE} {{\n chain input {{\n  type filter hook input priority filter;\n  {rule}\n }}\n}}\n"


def nft(pid: str, *arguments: str, stdin: str = "") -> str:
    """Runs nft in the network of a process, and returns the output."""
    return subprocess.run(["nsenter", "-t", pid, "-n", "nft", *arguments], input=stdin, stdout=subprocess.PIPE, text=True, check=True).stdout


@contextlib.contextmanager
def refusing(pid: str, gateways: list[str], port: str) -> Iterator[None]:
    nft(pid, "-f", "-", stdin=rules(gateways, port))
    try:
        yield
    finally:
        nft(pid, "delete", "table", *TABLE.split())


def refused(listing: str) -> int:
    """Returns how many packets were refused."""
    return int(re.search(r"counter packets (\d+)", listing)[1])


def returned(address: str, engine: str, name: str) -> tuple[float, list[dict]]:
    """Starts new conversations until the engine serves a turn. Returns the seconds, and all turns of these conversations."""
    began, turns = time.monotonic(), []
    while time.monotonic() - began < RETURN_SECONDS_MAX:
        turns.append(Conversation(address, {}, f"{name}-{len(turns)}").turn())
        if turns[-1].get("served_by") == engine:
            break
        time.sleep(PAUSE_SECONDS)
    return time.monotonic() - began, turns


def main(address: str, gateways: list[str], pids: dict[str, str]) -> dict:
    run = f"{time.time_ns():x}"
    held = [Conversation(address, {}, f"{run}-{number}") for number in range(CONVERSATIONS)]
    before = [(one, [one.turn(), one.turn()]) for one in held]
    last = {one: turns[-1].get("served_by") for one, turns in before}
    engine = collections.Counter(name for name in last.values() if name in pids).most_common(1)[0][0]
    own = [one for one in held if last[one] == engine]
    others = [one for one in held if last[one] != engine]
    meanwhile, packets = [], 0
    with refusing(pids[engine], gateways, engine.rpartition(":")[2]):
        while len(meanwhile) < len(own) or not packets and len(meanwhile) < TURNS_MAX:
            meanwhile.append((own + others)[len(meanwhile) % len(held)].turn())
            packets = refused(nft(pids[engine], "list", "table", *TABLE.split()))
    seconds, after = returned(address, engine, f"{run}-after")
    return {
        "engine": engine, "before": [turn for _, turns in before for turn in turns], "meanwhile": meanwhile, "packets": packets,
        "after": after, "return_seconds": seconds,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2].split(","), dict(text.split("=") for text in sys.argv[3:]))))
