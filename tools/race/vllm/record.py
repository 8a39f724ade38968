"""Records once what a vLLM engine answers, for the tests: pages, replies, a stream and errors. Machine-specific words are
replaced."""

import http.client
import json
import pathlib
import re
from typing import Any

import chat
from engines import Engines

HOST = "engine.example:8000"
# The maximum number of bytes that are kept of each reply. The whole folder has at most 100 KB.
BYTES_MAX = 48_000
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# Matches the lines that a recording leaves out: figures of interpreter, files and process differ by machine, and the picker reads only the
# start time.
OMITTED = re.compile(r"^(# (HELP|TYPE) )?(python_|process_(?!start_time)|http_)")
BUCKET = re.compile(r'^\S+_bucket\{.*le="(?!\+Inf)')


def exchange(url: str, method: str, path: str, body: Any = None) -> tuple[int, str, bytes]:
    """Sends a request. Returns the status, the content type and the body."""
    client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=chat.SECONDS_MAX)
    raw = body if isinstance(body, (str, type(None))) else json.dumps(body)
    client.request(method, path, raw, {"content-type": "application/json"} if raw else {})
    reply = client.getresponse()
    result = (reply.status, reply.getheader("content-type", ""), reply.read())
    client.close()
    return result


def neutral(text: str, url: str, folder: pathlib.Path) -> str:
    """Replaces the address, the folder of the model, and ids and times that differ with each run."""
    text = text.replace(url.removeprefix("http://"), HOST).replace(str(folder), "/models/smollm2").replace(str(folder.parent), "/models")
    text = re.sub(r"(chatcmpl|cmpl|modelperm)-[0-9a-f-]{12,}", r"\1-0", text)
    return re.sub(r'"(created|created_at)":\s?\d{9,}', r'"\1":1790000000', text)


def smaller(page: str) -> str:
    """Returns a metrics page without what differs by machine, and of histograms only the last bucket. The times of adapters stay: the
    newest row counts."""
    kept = [line for line in page.splitlines() if not OMITTED.match(line) and not BUCKET.match(line)]
    text = "\n".join(kept) + "\n"
    text = re.sub(r"(_created\{[^}]*\}|_created|process_start_time_seconds) 1\.\d+e\+09", r"\1 1.79e+09", text)
    return re.sub(r"(?m)^(\S+_(?:seconds|per_token_seconds)_sum\{[^}]*\}) \S+$", r"\1 1.0", text)


# The replies that the tests of reading responses use unchanged: path, and how the file is read.
GOLDENS = {
    "stream.txt": "/v1/chat/completions streamed",
    "reply.json": "/v1/chat/completions unstreamed",
    "completion-stream.txt": "/v1/completions streamed",
    "completion.json": "/v1/completions unstreamed",
    "error-unknown-model.json": "/v1/chat/completions unstreamed",
}
GOLDENS_HEAD = "# Recorded from vLLM 0.32 by `tools/race/vllm record`: "

REQUESTS = {
    "models.json": ("GET", "/v1/models", None),
    "version.json": ("GET", "/version", None),
    "reply.json": ("POST", chat.PATH, chat.body("smollm2", QUESTION, 16, stream=False, exact=False)),
    "stream.txt": ("POST", chat.PATH, chat.body("smollm2", QUESTION, 16, exact=False)),
    "completion.json": ("POST", "/v1/completions", {"model": "smollm2", "prompt": "Paris is", "max_tokens": 4, "temperature": 0}),
    "completion-stream.txt": (
        "POST", "/v1/completions",
        {"model": "smollm2", "prompt": "Paris is", "max_tokens": 4, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "error-unknown-model.json": ("POST", chat.PATH, chat.body("absent", QUESTION, 4, stream=False)),
    "error-too-long.json": ("POST", chat.PATH, chat.body("smollm2", [{"role": "user", "content": "water " * 6000}], 4, stream=False)),
    "error-bad-value.json": ("POST", chat.PATH, chat.body("smollm2", QUESTION, 4, stream=False) | {"temperature": -1}),
    "error-no-json.json": ("POST", chat.PATH, "{"),
    "error-render.json": ("POST", "/v1/chat/completions/render", chat.body("smollm2", QUESTION, 4, stream=False)),
    "error-absent-path.json": ("GET", "/v1/absent", None),
    "metrics.txt": ("GET", "/metrics", None),
}  # fmt: skip


def record(engines: Engines, folder: pathlib.Path, model: pathlib.Path, names: list[str], prefix: str = "") -> dict[str, int]:
    """Writes the files, and an index with path, status and content type of each. Returns their sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    index_file, sizes = folder / "index.json", {}
    index = json.loads(index_file.read_text()) if index_file.exists() else {}
    for name in names:
        method, path, body = REQUESTS[name]
        status, kind, raw = exchange(engines.urls[0], method, path, body)
        text = neutral(raw.decode(), engines.urls[0], model)
        text = smaller(text) if name == "metrics.txt" else text
        if len(text) > BYTES_MAX:
            raise ValueError(f"{name} has {len(text)} bytes")
        (folder / (prefix + name)).write_text(text)
        index[prefix + name] = {"method": method, "path": path, "status": status, "content_type": kind}
        sizes[prefix + name] = len(text)
    index_file.write_text(json.dumps(dict(sorted(index.items())), indent=1) + "\n")
    return sizes


def golden(folder: pathlib.Path) -> str:
    """Returns the recorded replies as cases of `crates/exchange/tests/golden/responses`, without outcomes."""
    cases = []
    for name, head in GOLDENS.items():
        text = (folder / name).read_text().rstrip("\n")
        cases.append(f"{GOLDENS_HEAD}{name}\n{head}\n{text}\n")
    return "\n".join(cases)
