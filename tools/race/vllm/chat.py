"""One chat over HTTP/1.1 by the standard library, streamed or not."""

import dataclasses
import http.client
import json
import time
from typing import Any

PATH = "/v1/chat/completions"
SECONDS_MAX = 180
ERROR_CHARACTERS_MAX = 200
DATA = b"data: "
END = b"[DONE]"


@dataclasses.dataclass
class Answer:
    """The outcome of one request. Times are in seconds; `first` is 0 if nothing came."""

    status: int = 0
    error: str = ""
    first: float = 0.0
    whole: float = 0.0
    text: str = ""
    finish: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    left: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.error)


def ask(url: str, body: dict[str, Any], leave_after: int = 0) -> Answer:
    """Sends a chat. `leave_after`: closes the connection after this many pieces of text."""
    answer, began = Answer(), time.monotonic()
    client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=SECONDS_MAX)
    try:
        client.request("POST", PATH, json.dumps(body), {"content-type": "application/json"})
        reply = client.getresponse()
        answer.status = reply.status
        if reply.status != 200:
            answer.error = f"status {reply.status}: {reply.read(ERROR_CHARACTERS_MAX).decode(errors='replace')}"
        elif body.get("stream"):
            read_stream(reply, answer, began, leave_after)
        else:
            whole = json.loads(reply.read())
            take(answer, whole, whole["choices"][0]["message"].get("content"))
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX]
    finally:
        client.close()
    answer.whole = time.monotonic() - began
    return answer


def read_stream(reply: http.client.HTTPResponse, answer: Answer, began: float, leave_after: int) -> None:
    pieces = 0
    while line := reply.readline():
        data = line.strip().removeprefix(DATA)
        if data == END:
            return
        if not line.startswith(DATA):
            continue
        event = json.loads(data)
        if "error" in event:
            answer.error = f"in the stream: {event['error']}"[:ERROR_CHARACTERS_MAX]
            return
        choices = event.get("choices") or [{}]
        piece = choices[0].get("delta", {}).get("content")
        take(answer, event, piece)
        if piece:
            pieces += 1
            answer.first = answer.first or time.monotonic() - began
        if leave_after and pieces >= leave_after:
            answer.left = True
            return
    answer.error = "the stream has no end"


def take(answer: Answer, event: dict[str, Any], piece: str | None) -> None:
    """Adds an event of a stream, or a whole reply."""
    answer.text += piece or ""
    for choice in event.get("choices") or []:
        answer.finish = choice.get("finish_reason") or answer.finish
    if usage := event.get("usage"):
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage.get("completion_tokens") or 0
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def body(model: str, messages: list[dict[str, str]], tokens: int, stream: bool = True, exact: bool = True) -> dict[str, Any]:
    """Returns the body of a request. If `exact`, the reply has exactly `tokens` tokens, whatever the model generates."""
    made: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": stream}
    if exact:
        made |= {"min_tokens": tokens, "ignore_eos": True}
    if stream:
        made["stream_options"] = {"include_usage": True}
    return made
