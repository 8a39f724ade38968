"""The page of results, made from target/race/vllm.json."""

import json
import textwrap
from typing import Any

from generators import apart

# The maximum difference between a tool's count and the engines' count, as a share, because a tool may send an extra request before it
# starts.
APART_MAX = 0.02
COLUMNS = 120

HEAD = """# Race on real vLLM engines

`make race-vllm` runs real vLLM engines behind one router after the other, with the same sessions at the same times, and
writes this page. Counts come from the engines' own counters, unless a column says otherwise.

"""

GAP = """
**What this page does not show.** The engines share CPU cores with the router and the load generator. So times are
printed but not judged, and spreading load gains nothing. To repeat the race with GPUs, in an hour:

"""

AGAIN = """```sh
make race-vllm ENGINES=http://10.0.0.1:8000,http://10.0.0.2:8000 MODEL=NAME RACE_ARGS='--rate 4 --sessions 200 --tokens 100'
```

The engines need `--enable-prompt-tokens-details`. With `VLLM_SERVER_DEV_MODE=1`, the race empties their prefix caches
between routers; otherwise each router gets other prompts. `--tokenizer FOLDER` in `RACE_ARGS` adds the load generators.
The parts on restarts and adapters need engines that the race itself starts.
"""


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def split(counts: list[int]) -> str:
    return " ".join(str(count) for count in counts)


def failures(rows: list[dict[str, Any]]) -> str:
    """Returns the first failure of each router that had a failure."""
    first: dict[str, str] = {}
    for row in rows:
        for text in row["failures"][:1]:
            first.setdefault(row["router"], text.replace("`", "'"))
    lines = (textwrap.fill(f"First failure with {router}: `{text}`", COLUMNS, break_long_words=False, break_on_hyphens=False) for router, text in first.items())
    return "".join(f"\n{line}\n" for line in lines)


def races(rows: list[dict[str, Any]]) -> str:
    head = ("router", "seed", "hit rate, %", "requests by engine", "requests", "failed", "TTFT mean, ms", "E2E mean, ms", "cached tokens, by replies")
    cells = [
        (row["router"], row["seed"], percent(row["hit_rate"]), split(row["requests_by_engine"]), row["requests"], row["failed"], f"{row['first_ms']:,.0f}",
         f"{row['whole_ms']:,.0f}", f"{row['cached_tokens']:,} of {row['engines']['hit_tokens']:,}")
        for row in rows
    ]  # fmt: skip
    text = "## Sessions\n\nThe hit rate is `vllm:prefix_cache_hits_total` over `vllm:prefix_cache_queries_total`, in tokens. The last column\ncompares what the replies' `usage` said with what the engines counted.\n\n"
    return text + table(head, cells) + failures(rows)


def leaving(rows: list[dict[str, Any]]) -> str:
    text = "## Clients that leave\n\nClients close the connection after the third piece of a stream. \"Idle after\" is the time from the last client's end\nuntil no engine has a request.\n\n"
    head = ("router", "clients", "left in the stream", "idle after, s", "tokens generated", "tokens requested")
    shown = lambda seconds: "never" if seconds is None else f"{seconds:.1f}"
    return text + table(head, [(row["router"], row["clients"], row["left"], shown(row["idle_after_s"]), row["generated"], row["requested"]) for row in rows])


def restarts(rows: list[dict[str, Any]]) -> str:
    text = "## An engine starts again under load\n\nAll processes of the first engine get SIGTERM at once, and the engine is started again. The engine is away until it\nanswers `/health`. A stream that it was sending fails, since no router can repeat a stream. The last column has the\nrequests that the engine got after its return.\n\n"
    head = ("router", "requests", "failed", "away, s", "requests at the engine after its return")
    return text + table(head, [(row["router"], row["requests"], row["failed"], row["away_s"], f"{row['requests_after']} in {row['after_s']} s") for row in rows])


def adapters(rows: list[dict[str, Any]]) -> str:
    text = "## LoRA adapters\n\nChats run one after the other and use two adapters (with random weights) and the base model in turn. The engines run\nwith `--max-loras 1`. Figures are requests per engine.\n\n"
    names = list(rows[0]["by_adapter"])
    return text + table(("router", "chats", "failed", *names), [(row["router"], row["chats"], row["failed"], *(split(row["by_adapter"][name]) for name in names)) for row in rows]) + failures(rows)


def verdict(tool: float | None, engine: float) -> str:
    """Returns both counts, and whether the counts agree."""
    share = apart(tool, engine)
    if share is None:
        return f"- of {engine:,}"
    return f"{tool:,} of {engine:,}{'' if share <= APART_MAX else f' ({percent(share)} % apart)'}"


# The text on guidellm, which the race does not install, because guidellm's package brings 5.9 GB.
GUIDELLM = """
We ran guidellm 0.8.1 by hand with three simulated engines, first streamed, then not. Both times it counted the same as
the engines: 240 requests in sessions of four turns, 151,766 prompt tokens and 7,200 generated tokens.
"""


def generators(rows: list[dict[str, Any]]) -> str:
    text = "## Load generators of others\n\nEach tool sends requests through Switchpoint, as its users do. \"A of B\" means that the tool counted A, and the engines\ncounted B. `-` means that the tool does not report the count. A difference over 2 % is marked.\n\n"
    head = ("tool", "streamed", "requests", "failed", "prompt tokens", "generated tokens", "cached tokens")
    cells = []
    for row in rows:
        engines = row["engines"]
        pairs = ((row["prompt_tokens"], engines["prompt_tokens"]), (row["completion_tokens"], engines["generation_tokens"]), (row["cached_tokens"], engines["hit_tokens"]))
        cells.append((row["tool"], "yes" if row["streamed"] else "no", verdict(row["requests"], engines["requests"]), row["failed"], *(verdict(*pair) for pair in pairs)))
    return text + table(head, cells) + GUIDELLM


def skipped(rows: list[str]) -> str:
    return "## Not run\n\n" + "".join(f"- {row}\n" for row in rows)


PARTS = {"races": races, "leaving": leaving, "restarts": restarts, "adapters": adapters, "generators": generators, "skipped": skipped}


def markdown(results: dict[str, Any]) -> str:
    about = "".join(f"- {line}\n" for line in results["about"])
    parts = [make(results[part]) for part, make in PARTS.items() if results.get(part)]
    repeat = (GAP if results["own_engines"] else "\n") + AGAIN
    return HEAD + about + repeat + "".join(f"\n{part}" for part in parts)


def from_file(text: str) -> str:
    return markdown(json.loads(text))
