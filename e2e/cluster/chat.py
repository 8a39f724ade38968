"""One chat, by a client in the node's network."""

import json
import sys
import time
import urllib.error
import urllib.request

import node
from paths import HERE

SECONDS_MAX = 10
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Which GPU has room?"}], "max_tokens": 8}


class Refused(Exception):
    """The chat was not answered."""


def once(address: str) -> dict:
    """Sends one chat, and returns the text of the answer and the engine that answered. Raises Refused for anything but a completion."""
    output = json.loads(node.run(sys.executable, str(HERE / "chat.py"), address, timeout=SECONDS_MAX + 5))
    if output["status"] != 200:
        raise Refused(f"{address}: {output}")
    return output


def until_answered(address: str, seconds_max: float = 60) -> dict:
    """Repeats the chat until it is answered. Use this only in the time just after an installation."""
    began = time.monotonic()
    while True:
        try:
            return once(address)
        except Refused:
            if time.monotonic() - began > seconds_max:
                raise
            time.sleep(0.5)


def main(address: str) -> dict:
    request = urllib.request.Request(f"http://{address}/v1/chat/completions", json.dumps(BODY).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS_MAX) as reply:
            text = json.load(reply)["choices"][0]["message"]["content"]
            return {"status": reply.status, "served_by": reply.headers.get("x-served-by", ""), "text": text}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "text": error.read(300).decode(errors="replace")}
    except OSError as error:
        return {"status": 0, "text": str(error)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
