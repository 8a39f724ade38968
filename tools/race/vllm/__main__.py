"""Races routers over real vLLM engines.

    python3 tools/race/vllm run [--parts races,leaving,...] [--routers NAME,...] [--engines URL,... --model NAME]
    python3 tools/race/vllm record        record what a vLLM engine answers, for the tests
    python3 tools/race/vllm page          write docs/reference/race-vllm.md from target/race/vllm.json

A run replaces the parts that it measured in target/race/vllm.json and keeps the others. It ends with `N passed, N failed`.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import drills
import engines as engine_module
import generators
import page
import paths
import record
import routers
from engines import Engines, LocalEngines
from paths import Skipped
from processes import Late
from sessions import Shape

PARTS = ("races", "leaving", "generators", "restarts", "adapters")
RUNS = [("aiperf", True), ("aiperf", False), ("vllm bench serve", True)]
RESTARTED = ("switchpoint", "smg cache_aware")
UNAVAILABLE = 3

Job = tuple[str, Callable[[], Any]]


def say(text: str) -> None:
    print(text, flush=True)


class Results:
    """The file of results, which is written after each measurement, so that a run that is stopped loses at most one measurement."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = json.loads(paths.RESULTS.read_text()) if paths.RESULTS.exists() else {}
        self.passed = self.failed = self.skipped = 0

    def save(self) -> None:
        paths.OUT.mkdir(parents=True, exist_ok=True)
        paths.RESULTS.write_text(json.dumps(self.data, indent=1) + "\n")

    def begin(self, part: str) -> None:
        self.data[part] = []
        self.data["skipped"] = [row for row in self.data.get("skipped", []) if not row.startswith(f"{part}: ")]

    def skip(self, part: str, why: str) -> None:
        say(f"SKIPPED {part}: {why}")
        self.skipped += 1
        self.data.setdefault("skipped", []).append(f"{part}: {why}")
        self.save()

    def measure(self, part: str, jobs: Iterator[Job]) -> None:
        """Runs the jobs of a part and keeps their results. If a job ends with an error, the next job still runs."""
        self.begin(part)
        for name, job in jobs:
            try:
                row = job()
            except Skipped as why:
                self.skip(part, f"{name}: {why}")
                continue
            except (Late, OSError) as error:
                say(f"FAILED {part}, {name}: {error}")
                self.failed += 1
                self.data["skipped"].append(f"{part}: {name}: {str(error)[:200]}")
                continue
            say(f"{part}, {name}: {json.dumps(row)}")
            self.passed += 1
            self.data[part].append(row)
            self.save()


def jobs(part: str, args: argparse.Namespace, engines: Engines, shape: Shape) -> Iterator[Job]:
    """Returns the measurements of a part."""
    if part == "races":
        for seed in args.seeds:
            for name in args.routers:
                yield f"{name}, seed {seed}", lambda: drills.race(name, engines, shape, seed)
    elif part == "leaving":
        for name in args.routers:
            yield name, lambda: drills.leaving(name, engines)
    elif part == "generators":
        for tool, stream in RUNS:
            yield f"{tool}{', streamed' if stream else ''}", lambda: generators.drive(tool, stream, engines, tokenizer(args))
    elif part == "restarts":
        for name in args.routers:
            if name in RESTARTED:
                yield name, lambda: drills.restart(name, own(engines))
    elif part == "adapters":
        names = [engine_module.MODEL_NAME, *sorted(folder.name for folder in paths.ADAPTERS.iterdir())]
        for name in args.routers:
            yield name, lambda: drills.adapters(name, engines, names)


def own(engines: Engines) -> LocalEngines:
    if not isinstance(engines, LocalEngines):
        raise Skipped("needs engines that the race starts itself")
    return engines


def tokenizer(args: argparse.Namespace) -> pathlib.Path:
    if args.tokenizer is None and args.engines:
        raise Skipped("needs --tokenizer FOLDER, the engines' tokenizer")
    return args.tokenizer or paths.MODEL


def about(args: argparse.Namespace, engines: Engines, shape: Shape) -> list[str]:
    """Returns the lines at the head of the page."""
    pinned = [package for row in paths.versions().values() for package in row.get("packages", []) + row.get("bare", []) if package.startswith(("smg", "vllm", "aiperf"))]
    cores = f"{os.cpu_count()} cores"
    if engines.ours:
        vllm = f"{len(engines.urls)} engines vLLM 0.32 on one machine with {cores}, without a GPU, each bound to a core; model SmolLM2-135M-Instruct (135 million parameters) in float32, {engine_module.BLOCKS} blocks of {engine_module.BLOCK_TOKENS} tokens"
    else:
        vllm = f"{len(engines.urls)} engines of the caller, model `{engines.model}`"
    sizes = f"{shape.sessions} sessions of {shape.turns} turns, {shape.rate} new sessions a second, {shape.groups} groups that share a system prompt of {shape.system_words} words, {shape.turn_words} words a turn, {shape.reply_tokens} tokens a reply"
    lines = [vllm, sizes, f"programs: {', '.join(f'`{name}`' for name in pinned)}; Switchpoint is commit {commit()}, built as `{routers.profile()}`; Envoy has one worker"]
    if engines.ours:
        lines.append(f"the machine's load average before the first measurement: {os.getloadavg()[0]:.0f}")
    return ["\n  ".join(wrapped(line)) for line in lines]


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=paths.ROOT, text=True, capture_output=True, check=False)
    return done.stdout.strip() or "unknown"


def wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 116, break_long_words=False, break_on_hyphens=False)


def run(args: argparse.Namespace) -> int:
    results = Results()
    shape = Shape(args.sessions, args.turns, args.groups, args.system_words, args.turn_words, args.tokens, args.rate)
    routers.profile()
    common = [part for part in args.parts if part != "adapters"]
    if common:
        engines = Engines(args.engines, args.model, False) if args.engines else engine_module.local(args.count)
        try:
            results.data |= {"about": about(args, engines, shape), "own_engines": engines.ours}
            answer = drills.one_answer(engines)
            say(f"{len(engines.urls)} engines; the capital of France: {answer.text or answer.error}")
            for part in common:
                results.measure(part, jobs(part, args, engines, shape))
        finally:
            engines.stop()
    if "adapters" in args.parts:
        if args.engines:
            results.begin("adapters")
            results.skip("adapters", "needs engines that the race starts itself")
        else:
            engines = engine_module.local(args.count, lora=True)
            try:
                results.measure("adapters", jobs("adapters", args, engines, shape))
            finally:
                engines.stop()
    results.save()
    write_page()
    failed = sum(row["failed"] for row in results.data.get("races", []))
    say(f"requests that failed in the sessions: {failed}")
    say(f"{results.passed} passed, {results.failed} failed, {results.skipped} skipped")
    return 1 if results.failed else 0


def write_page() -> None:
    paths.PAGE.write_text(page.from_file(paths.RESULTS.read_text()))
    say(f"wrote {paths.PAGE.relative_to(paths.ROOT)}")


def record_all() -> int:
    """Records the answers of an engine without adapters, and the pages of an engine with adapters."""
    for lora in (False, True):
        engines = engine_module.local(1, lora)
        try:
            names = ["metrics.txt", "models.json"] if lora else list(record.REQUESTS)
            if lora:
                drills.ask_adapters(engines.urls[0], [folder.name for folder in sorted(paths.ADAPTERS.iterdir())])
            say(str(record.record(engines, paths.RECORDED, paths.MODEL, names, "lora-" if lora else "")))
        finally:
            engines.stop()
    paths.GOLDEN.write_text(record.golden(paths.RECORDED))
    say("now run: UPDATE_GOLDENS=1 cargo test -p exchange --test it responses")
    return 0


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",") if part]


def arguments(words: list[str]) -> argparse.Namespace:
    shape = Shape()
    parser = argparse.ArgumentParser(prog="tools/race/vllm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "record", "page"))
    parser.add_argument("--parts", type=listed(str), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--routers", type=listed(str), default=list(routers.ROUTERS), help=", ".join(routers.ROUTERS))
    parser.add_argument("--seeds", type=listed(int), default=[1, 2])
    parser.add_argument("--count", type=int, default=2, help="engines to start on this machine")
    parser.add_argument("--engines", type=listed(str), default=[], metavar="URL,...", help="engines that run already")
    parser.add_argument("--model", default=engine_module.MODEL_NAME, help="the model's name at these engines")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="folder with their tokenizer, for the load generators")
    parser.add_argument("--sessions", type=int, default=shape.sessions)
    parser.add_argument("--turns", type=int, default=shape.turns)
    parser.add_argument("--groups", type=int, default=shape.groups)
    parser.add_argument("--system-words", type=int, default=shape.system_words)
    parser.add_argument("--turn-words", type=int, default=shape.turn_words)
    parser.add_argument("--tokens", type=int, default=shape.reply_tokens, help="tokens of each reply")
    parser.add_argument("--rate", type=float, default=shape.rate, help="new sessions a second")
    args = parser.parse_args(words)
    for name, known in (("parts", PARTS), ("routers", routers.ROUTERS)):
        if unknown := set(getattr(args, name)) - set(known):
            parser.error(f"unknown {name}: {', '.join(unknown)}; there are {', '.join(known)}")
    return args


def main(words: list[str]) -> int:
    args = arguments(words)
    if args.command == "record":
        return record_all()
    if args.command == "page":
        write_page()
        return 0
    return run(args)


def interrupted(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, interrupted)
    try:
        sys.exit(main(sys.argv[1:]))
    except Skipped as why:
        say(f"SKIPPED race on vLLM: {why}")
        sys.exit(UNAVAILABLE)
    except Late as error:
        say(f"FAILED: {error}")
        sys.exit(1)
