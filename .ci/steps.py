#!/usr/bin/env python3
"""Runs the named groups of steps, times each, shows what failed, and ends with `N passed, N failed`.

    .ci/steps.py lint scripts wasm tests

The counts are those of the `test result:` lines for test binaries, those of unittest for the chart, and one per step for
everything else. A step whose tool is unavailable (for example the advisory database) counts as skipped, with a message, and never
as passed. So does a test that prints `SKIPPED name: why` and returns. Standard library only.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from enum import Enum
from typing import IO, Callable, NamedTuple

import unsteady

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOGS = ROOT / "target" / "ci"
DENY = ".tools/bin/cargo-deny --locked"
# A step that runs longer counts as hung: a cold build of the whole workspace takes a few minutes on two cores.
STEP_SECONDS_MAX = 2_400
# Leaves out the tests in modules `slow`, which `make e2e-long` runs. `slow.toml` says why for each.
NOT_SLOW = "-- --skip slow::"
# Chooses the number of threads for each test program.
THREADS = f"""--config "target.'cfg(all())'.runner = '{ROOT}/.ci/test_threads.sh'" """.strip()
# The feature of the target `long`, which only `make e2e-long` runs. All commands have it, so that nothing is compiled twice.
LONG = "--features e2e/long"
# Clippy's driver is rustc with more lints. In place of rustc, it lints while it compiles. This saves the pass of
# `cargo clippy` over all crates and dependencies (4 of 15 minutes on two cores). A warning is an error.
WITH_CLIPPY = "RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__"
# Runs the test programs that PROGRAMS names to `test_threads.sh`.
TESTS = f"{WITH_CLIPPY} cargo test --locked --workspace --lib --bins --tests {LONG} --no-fail-fast {THREADS} {NOT_SLOW}"
# The tests on Envoy, and those of the daemon.
TIMED = "--test e2e --test daemon"
TIMED_TESTS = f"{WITH_CLIPPY} cargo test --locked --workspace {TIMED} {LONG} --no-fail-fast {THREADS} {NOT_SLOW}"
# Builds all other programs, and what `cargo bench` runs, at low priority, because the timed tests run at the same time. Cargo locks its
# folder while it builds, so the build begins when the timed tests no longer need the lock: a second or two after their start.
BUILD_ALL = f"sleep 5 && {WITH_CLIPPY} nice -n 19 cargo build --locked --workspace --lib --bins --tests --examples --benches {LONG}"
# What the group `charts` needs; `make e2e-cluster` builds the same and more.
CHART_TOOLS = "etcd kube-apiserver kube-controller-manager schemas helm crane"
# There are thousands of mutants, more than a night's work. Each run tests one of this many parts, on each day another one.
MUTANTS_SHARDS = 80
MUTANTS_SECONDS_MAX = 3_600
MUTANTS_ALL_SECONDS_MAX = 48 * 3_600
# Lines shown of a failing step's output; target/ci has all of it.
LINES_SHOWN_MAX = 400
# Lines of a panic's message in the list at the very end: enough for an assertion with both sides.
PANIC_LINES_MAX = 6
REMARK_CHARACTERS_MAX = 900
# At most this many failed tests run once more, alone. If more fail, a busy machine is not the cause.
AGAIN_MAX = 8
AGAIN_SECONDS_MAX = 600


class Counts(NamedTuple):
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other):
        return Counts(*(a + b for a, b in zip(self, other)))


Judge = Callable[[int, str], Counts]


class Begins(Enum):
    """When a step begins. Each step is reported in its turn."""

    IN_TURN = "after the step before it"
    # For a step that needs nothing that another step makes.
    FIRST = "with the first step, on cores that the other steps leave free"
    WITH_PREVIOUS = "together with the step before it"


class Running(NamedTuple):
    process: subprocess.Popen
    # A file, because nobody reads the output before the step's turn, and a pipe holds 64 KB.
    output: IO[str]
    began: float


class Step(NamedTuple):
    name: str
    command: str
    judge: Judge
    seconds_max: int = STEP_SECONDS_MAX
    begins: Begins = Begins.IN_TURN


def one(status: int, _output: str) -> Counts:
    """Counts the step as one check."""
    return Counts(passed=1) if status == 0 else Counts(failed=1)


def cargo_test(status: int, output: str) -> Counts:
    """Adds up the results of the test binaries. One that died without a result, or a build that failed, is a failure."""
    total = Counts()
    for row in binaries(output):
        total += row.counts
    if status != 0 and total.failed == 0:
        total += Counts(failed=1)
    if sum(total) == 0:
        total += Counts(failed=1)  # a run without tests proves nothing
    return total


def unit_tests(status: int, output: str) -> Counts:
    """Reads the last lines of Python's unittest. A test with several failed subtests counts as one failure for each."""
    ran = re.search(r"(?m)^Ran (\d+) tests? in ", output)
    if not ran:
        return Counts(failed=1)
    number = {word: int(count) for word, count in re.findall(r"(failures|errors|skipped)=(\d+)", output[ran.end() :])}
    failed, skipped = number.get("failures", 0) + number.get("errors", 0), number.get("skipped", 0)
    if status != 0 and failed == 0:
        failed = 1
    return Counts(max(0, int(ran[1]) - failed - skipped), failed, skipped)


def advisories(status: int, output: str) -> Counts:
    """Fetches the advisory database; counts as skipped if that is impossible."""
    if status != 0 and re.search(r"failed to (fetch|open|load|acquire)[^\n]*(advisory|database|db|repository)", output):
        return Counts(skipped=1)
    return one(status, output)


def buildable(status: int, _output: str) -> Counts:
    """Counts the step as skipped if its tool cannot be built on this machine. The tests that need the tool are skipped too."""
    return Counts(skipped=1) if status == 3 else one(status, _output)


def no_survivor(status: int, _output: str) -> Counts:
    """A mutant is caught if the tests fail or hang with it (3). A mutant that passes all tests (2) fails the step."""
    return one(0 if status == 3 else status, _output)


# The line that a test prints if it cannot run on this machine. For `cargo test` such a test passes.
SKIPPED = re.compile(r"SKIPPED ([\w:]+): (.*)")


def skips(output: str) -> list[str]:
    """Returns the reasons for skipped tests, with the number of tests for each."""
    tests: dict[str, set[str]] = {}
    for name, why in SKIPPED.findall(output):
        tests.setdefault(why, set()).add(name)
    return [f"SKIPPED, {len(names)} tests: {why}" for why, names in tests.items()]


class Binary(NamedTuple):
    name: str
    counts: Counts
    seconds: str


def binaries(output: str) -> list[Binary]:
    """Returns one row for each test binary that `cargo test` ran, in order."""
    rows = []
    for block in re.split(r"(?m)^ +(?=Running |Doc-tests )", output)[1:]:
        head = block.splitlines()[0]
        crate = re.search(r"deps/([\w-]+?)-[0-9a-f]{16}\)", head)
        name = f"{crate[1]} {head.split()[-2]}" if crate else head
        results = re.findall(
            r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored;.*?finished in ([\d.]+s)", block, re.MULTILINE
        )
        counts = Counts()
        for passed, failed, ignored, _ in results:
            counts += Counts(int(passed), int(failed), int(ignored))
        skipped = len({name for name, _ in SKIPPED.findall(block)})
        counts += Counts(passed=-skipped, skipped=skipped)
        if not results:
            counts = Counts(failed=1)
        rows.append(Binary(name, counts, results[-1][3] if results else "died"))
    return rows


def verdicts(output: str, word: str) -> list[str]:
    """Returns the tests with this verdict of `cargo test`, `ok` or `FAILED`, in order."""
    return list(dict.fromkeys(re.findall(rf"(?m)^test (\S+)(?: - .*)? \.\.\. {word}$", output)))


def again(command: str, output: str) -> list[str]:
    """Runs failed tests again, alone, and returns those that pass (unsteady tests). If `.ci/unsteady.toml` lists such a
    test, there is a loud warning; any other test has failed, and so has a test that fails again."""
    failed = verdicts(output, "FAILED")
    if len(failed) > AGAIN_MAX:
        return []
    # This is the same command, so nothing is compiled again.
    tests, _, _ = command.partition(" -- ")
    _, alone = finish(begin(f"{tests} -- --exact --test-threads=1 {' '.join(failed)}"), AGAIN_SECONDS_MAX)
    # Two targets may have a test of the same name.
    passed = set(verdicts(alone, "ok")) - set(verdicts(alone, "FAILED"))
    return [name for name in failed if name in passed]


def remarks(step: Step, output: str, counts: Counts, alone: list[str]) -> list[str]:
    """Returns the end of a long log: each failed test with the first lines of its panic or error, or the failed step.
    `alone`: failed tests that pass when they run alone."""
    texts = []
    for name in verdicts(output, "FAILED") if step.judge is cargo_test else []:
        panic = re.search(rf"(?m)^thread '{re.escape(name)}'[^\n]* panicked at ([^\n]*)\n((?:[^\n]*\n){{0,{PANIC_LINES_MAX}}})", output)
        mark = "FAILED"
        if name in alone:
            mark = "UNSTEADY, listed" if name in unsteady.names() else "FAILED, passes when run alone and is not listed in .ci/unsteady.toml"
        error = re.search(rf"(?m)^---- {re.escape(name)} stdout ----\n(?:(?!----|Error:)[^\n]*\n)*(Error: [^\n]*)", output)
        why = "\n".join([panic[1], panic[2].split("stack backtrace:")[0].rstrip()]) if panic else error[1] if error else ""
        texts.append(f"{mark}: {name}: {why}"[:REMARK_CHARACTERS_MAX])
    if counts.failed and all(text.startswith("UNSTEADY") for text in texts):
        texts.append(f"FAILED: {step.name}")
    return texts


def run(step: Step, begun: Running | None = None) -> tuple[Counts, list[str]]:
    """Runs a step. Returns its counts, and the remarks to print at the end. `begun` is a step that began before its turn."""
    print(f"-- {step.name}", flush=True)
    running = begun or begin(step.command)
    waited = time.monotonic()
    status, output = finish(running, step.seconds_max)
    counts = step.judge(status, output)
    alone = again(step.command, output) if step.judge is cargo_test and counts.failed else []
    known = [name for name in alone if name in unsteady.names()]
    counts += Counts(passed=len(known), failed=-len(known))
    for row in binaries(output) if step.judge is cargo_test else []:
        if sum(row.counts):
            print(f"     {row.name}: {summary(row.counts)} ({row.seconds})")
    verdict = "FAILED" if counts.failed else "SKIPPED, not checked" if counts.skipped and not counts.passed else "ok"
    log = LOGS / (re.sub(r"\W+", "-", step.name) + ".log")
    log.write_text(f"$ {step.command}\n{output}")
    if verdict != "ok" or alone:
        lines = output.splitlines()
        shown = lines[-LINES_SHOWN_MAX:] if counts.failed or alone else lines[-8:]
        print("\n".join(f"   | {line}" for line in [f"$ {step.command}", *shown]))
        print(f"   | (all of it: {log.relative_to(ROOT)})")
    for line in output.splitlines():
        if re.match(r"target/.* bytes|\d+ mutants ", line):
            print(f"     {line}")
    seconds = f"{time.monotonic() - waited:.1f} s"
    print(f"   {verdict}, {seconds if not begun else f'{seconds} after {waited - begun.began:.1f} s beside other steps'}", flush=True)
    skipped = skips(output) if step.judge in (cargo_test, unit_tests) else []
    return counts, remarks(step, output, counts, alone) + skipped


def begin(command: str) -> Running:
    # The steps stay in one session, because Linux compares the priorities of `nice` only inside a session.
    environment = os.environ | {"CARGO_TERM_COLOR": "never", "CARGO_TERM_PROGRESS_WHEN": "never"}
    output = tempfile.TemporaryFile("w+", errors="replace")
    process = subprocess.Popen(
        command, shell=True, cwd=ROOT, env=environment,
        stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0,
    )  # fmt: skip
    return Running(process, output, time.monotonic())


def finish(running: Running, seconds_max: int) -> tuple[int, str]:
    """Returns status and complete output. A step that takes too long is killed with all its child processes."""
    process, note = running.process, ""
    with running.output as output:
        try:
            process.wait(seconds_max)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            note = f"\nstill running after {seconds_max} s: ended"
        except (KeyboardInterrupt, SystemExit):
            os.killpg(process.pid, signal.SIGTERM)
            raise
        status = process.wait()
        output.seek(0)
        return 124 if note else status, output.read() + note


def fuzz_steps() -> list[Step]:
    """One step for each target of each `<crate>/fuzz`."""
    seconds = os.environ.get("FUZZ_SECONDS", "30")
    steps = []
    for manifest in sorted([*ROOT.glob("*/fuzz/Cargo.toml"), *ROOT.glob("*/*/fuzz/Cargo.toml")]):
        crate = manifest.parent.parent.relative_to(ROOT)
        for target in sorted((manifest.parent / "fuzz_targets").glob("*.rs")):
            # New inputs go into the corpus, which is not committed. The seeds, a few small ones for each target, are committed.
            corpus, seeds = f"fuzz/corpus/{target.stem}", f"fuzz/seeds/{target.stem}"
            folders = f"{corpus} {seeds}" if (ROOT / crate / seeds).is_dir() else corpus
            fuzz = f"{ROOT}/.tools/bin/cargo-fuzz run {target.stem} {folders} -- -max_total_time={seconds} -rss_limit_mb=4096"
            run = f"cd {crate} && mkdir -p {corpus} && RUSTUP_TOOLCHAIN=nightly {fuzz}"
            steps.append(Step(f"fuzz: {crate.name} {target.stem}", run, one))
    return steps


def changed_files() -> list[str]:
    """Returns the files that differ from CHECK_BASE, by default the upstream branch or, without one, the last commit."""
    upstream = subprocess.run(["git", "rev-parse", "--quiet", "--verify", "@{upstream}"], cwd=ROOT, capture_output=True, text=True, check=False)
    base = os.environ.get("CHECK_BASE") or upstream.stdout.strip() or "HEAD"
    names = ["git diff --name-only --merge-base " + base, "git ls-files --others --exclude-standard"]
    outputs = [subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, check=True).stdout for command in names]
    return sorted(set("".join(outputs).splitlines()))


def changed_crates(files: list[str]) -> list[str]:
    """Returns the members of the workspace that contain one of the files."""
    above = [[folder / "Cargo.toml" for folder in (ROOT / name).parents if ROOT in folder.parents] for name in files]
    nearest = {next((manifest for manifest in manifests if manifest.is_file()), None) for manifests in above} - {None}
    texts = [text for text in (manifest.read_text() for manifest in nearest) if "[workspace]" not in text]
    return sorted(re.search(r'(?m)^name = "([\w-]+)"$', text)[1] for text in texts)


def check_steps() -> list[Step]:
    """Checks format, structure and documents of everything. Lints and tests only the crates that have changed."""
    files = changed_files()
    packages = " ".join(f"-p {crate}" for crate in changed_crates(files))
    steps = [
        Step("check: links of documents", "python3 .ci/links.py", one),
        Step("check: rustfmt", "cargo fmt --all --check", one),
        Step("check: names, sentences, cycles, lengths", "python3 .ci/house.py check", one),
    ]
    if {"Cargo.toml", "Cargo.lock"} & set(files):
        steps.append(Step("check: dependency arrows, licences, sources", f"{DENY} check -A unused-wrapper bans licenses sources", one))
    if packages:
        steps.append(Step(f"check: clippy {packages}", f"cargo clippy --locked --all-targets {packages} -- -D warnings", one))
        steps.append(Step(f"check: unit tests {packages}", f"cargo test --locked --lib --bins {packages}", cargo_test))
    return steps


def mutants_steps() -> list[Step]:
    """`MUTANTS_SHARD` is `all`, or a part such as `7/80`, the eighth of 80."""
    shard = os.environ.get("MUTANTS_SHARD") or f"{date.today().toordinal() % MUTANTS_SHARDS}/{MUTANTS_SHARDS}"
    part, seconds_max = ("", MUTANTS_ALL_SECONDS_MAX) if shard == "all" else (f" --sharding round-robin --shard {shard}", MUTANTS_SECONDS_MAX)
    mutants = ".tools/bin/cargo-mutants mutants -p scheduler -p learning -p pool-state -p exchange"
    count = f'echo "$({mutants} --list | wc -l) mutants in all; this run tests part {shard}"'
    return [Step(f"mutants: {shard}", f"{count} && PROPTEST_CASES=32 {mutants} -o target{part}", no_survivor, seconds_max)]


def summary(counts: Counts) -> str:
    text = f"{counts.passed} passed, {counts.failed} failed"
    return f"{text}, {counts.skipped} skipped" if counts.skipped else text


GROUPS: dict[str, Callable[[], list[Step]]] = {
    "lint": lambda: [
        Step("lint: these steps' own tests", "python3 .ci/test_steps.py && python3 .ci/test_house.py", one),
        Step("lint: tests of what builds the images", ".venv/bin/python deploy/images/test_units.py", one),
        Step("lint: tests of the cluster's load and tables", "python3 e2e/cluster/test_units.py", one),
        Step("lint: tests of the race on vLLM", "python3 tools/race/vllm/test_units.py", one),
        Step("lint: dashboards are those of their generator", "python3 -m unittest discover deploy/dashboards", one),
        Step("lint: unsteady tests are listed for at most 14 days", "python3 .ci/unsteady.py", one),
        Step("lint: links of documents", "python3 .ci/links.py", one),
        Step("lint: commands and quotations in documents", "python3 .ci/test_doc_commands.py && python3 .ci/doc_commands.py", one),
        Step("lint: dependency arrows, licences, sources", f"{DENY} check -A unused-wrapper bans licenses sources", one),
        Step("lint: rustfmt", "cargo fmt --all --check", one),
        Step("lint: names, sentences, cycles, lengths", "python3 .ci/house.py check", one),
        Step("lint: advisories", f"timeout 120 {DENY} check advisories", advisories),
    ],
    # Tests that compile no Rust, so `make test` runs them before it builds anything.
    "scripts": lambda: [
        Step("scripts: release", "python3 .ci/test_release.py Versions Releases Results Workflows", unit_tests),
        Step("scripts: the chart's page", "python3 -m unittest discover deploy/charts/tests -k Page", unit_tests),
        # This step needs Node with npm. Without them, or without the registry, it is skipped.
        Step("scripts: the console's script is built from its source", "python3 -m unittest discover control-plane/console", unit_tests),
    ],
    # Links are checked by `lint`, so this finds an error in `SUMMARY.md` only.
    "site": lambda: [Step("lint: documents as a site", ".tools/bin/mdbook build docs", one)],
    "clippy": lambda: [
        Step("lint: clippy", f"cargo clippy --locked --workspace --all-targets {LONG} -- -D warnings", one),
        # The feature `drill` only adds code.
        Step("lint: clippy, wasm32", "cargo clippy --locked -p filter --features drill --target wasm32-wasip1 -- -D warnings", one),
    ],
    "check": check_steps,
    # The tests on Envoy build the module with drills in the same way.
    "wasm": lambda: [Step("wasm: build with clippy, and size", f"{WITH_CLIPPY} make --no-print-directory wasm", one)],
    # All tests of all crates in one run, so that the dependencies are compiled once, with one set of features.
    "tests": lambda: [
        # Linking the module and wasm-opt use one core, so this build begins with the step that makes the module.
        Step(
            "tests: build those on Envoy and of the daemon, with clippy",
            f"{WITH_CLIPPY} cargo build --locked --workspace --lib --bins {TIMED} {LONG}",
            one,
            begins=Begins.WITH_PREVIOUS,
        ),
        # The first run takes minutes; later runs take no time. Tests that need more of Kubernetes, Helm or crane are in the group `charts`.
        Step(
            "tests: a real etcd, Kubernetes' API server, published schemas",
            "python3 .ci/cluster_tools.py etcd kube-apiserver schemas",
            buildable,
            begins=Begins.FIRST,
        ),
        # These tests wait for half of their time, so all others are built and run meanwhile, at low priority.
        Step("tests: on Envoy, and of the daemon", f"PROGRAMS=timed {TIMED_TESTS}", cargo_test),
        Step("tests: build with clippy and run all others", f"{BUILD_ALL} && nice -n 19 env PROGRAMS=others {TESTS}", cargo_test, begins=Begins.WITH_PREVIOUS),
    ],
    # The steps that need Helm, crane or Kubernetes' controllers.
    "charts": lambda: [
        Step("charts: a real etcd and Kubernetes, Helm, crane, published schemas", f"python3 .ci/cluster_tools.py {CHART_TOOLS}", buildable),
        Step("charts: installations in documents", "python3 .ci/doc_commands.py charts", buildable),
        Step("charts: publishing", "python3 .ci/test_release.py Publishing", unit_tests),
        Step("charts: build", "cargo build --locked --workspace --bins --tests", one),
        # This step runs the daemon, and the module that the group `wasm` builds.
        Step("charts: the chart, with its goldens", "python3 -m unittest discover deploy/charts/tests", unit_tests),
        Step("charts: llm-d's values", "cargo test --locked -p migrate --test it -- slow::", cargo_test),
        Step("charts: discovery with Kubernetes' controllers, an etcd that is paused", "cargo test --locked -p discovery --features all --test it -- slow::", cargo_test),
    ],
    "e2e": lambda: [
        Step("e2e: build", "cargo build --locked --workspace --lib --bins --tests", one),
        Step("e2e: Envoy 1.40", f"cargo test --locked --workspace --no-fail-fast --test e2e {NOT_SLOW}", cargo_test),
    ],
    "e2e-slow": lambda: [
        Step("e2e: Envoy Gateway's translator", "python3 .ci/cluster_tools.py envoy-gateway", buildable),
        # cosign takes 6 minutes to build on two cores, once.
        Step("e2e: cosign", "python3 .ci/cluster_tools.py helm crane cosign", buildable),
        Step("e2e: images and chart signed by a real cosign", "python3 .ci/test_release.py Signing", unit_tests),
        Step("e2e: slow tests, Envoy 1.40", "cargo test --locked -p e2e --test e2e -- slow::", cargo_test),
        Step("e2e: an optimized daemon", "cargo build --locked --release -p control-plane --bin switchpointd", one),
        Step(
            "e2e: one host with all its streams",
            f"SWITCHPOINTD={ROOT}/target/release/switchpointd cargo test --locked -p control-plane --test daemon -- slow::",
            cargo_test,
        ),
        Step("e2e: tests of requests and replies, in wasm", "cargo test --locked -p exchange --test wasm -- slow::", cargo_test),
        Step("e2e: the race sees what it must see", "cargo test --locked -p race -- slow::", cargo_test),
        Step("e2e: slow drills, Envoy 1.40", f"cargo test --locked --workspace {LONG} --no-fail-fast --test long", cargo_test),
    ],
    # Both take 6 minutes to build on two cores, once.
    "observe": lambda: [
        Step("observe: Prometheus and an OpenTelemetry collector", "python3 .ci/cluster_tools.py prometheus otelcol", buildable),
        Step("observe: alerts and panels on a real Prometheus", "python3 -m unittest discover e2e/observe -p test_observe.py", unit_tests),
        Step("observe: KEDA's client", "python3 .ci/cluster_tools.py keda-scaler", buildable),
        Step("observe: the external scaler as KEDA calls it", "python3 -m unittest discover e2e/observe -p test_keda.py", unit_tests),
        Step("observe: traces in a real OpenTelemetry collector", "python3 -m unittest discover e2e/observe -p test_traces.py", unit_tests),
        Step("observe: the demo and its console", "python3 -m unittest discover e2e/observe -p test_demo.py", unit_tests),
        # This step needs the system's Chromium.
        Step("observe: console in a real Chromium", "python3 -m unittest discover e2e/observe -p test_console.py", unit_tests),
    ],
    "e2e-1.38": lambda: [
        Step(
            "e2e: Envoy 1.38",
            # The native module is for Envoy 1.40.
            "SWITCHPOINT_ENVOY=.venv-1.38/bin/envoy cargo test --locked --workspace --no-fail-fast --test e2e -- --skip native",
            cargo_test,
        ),
    ],
    # .cargo/mutants.toml excludes mutants that no test can catch.
    "mutants": mutants_steps,
    "fuzz": fuzz_steps,
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in GROUPS]
    if unknown or not names:
        print(f"usage: steps.py GROUP...  with GROUP one of {' '.join(GROUPS)}", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    total, said = Counts(), []
    steps = [step for name in names for step in GROUPS[name]()]
    begun = {step.name: begin(f"nice -n 19 {step.command}") for step in steps if step.begins is Begins.FIRST}
    try:
        for step, following in zip(steps, [*steps[1:], None]):
            if following and following.begins is Begins.WITH_PREVIOUS:
                begun[following.name] = begin(following.command)
            counts, remarked = run(step, begun.get(step.name))
            total += counts
            said += remarked
    finally:
        for running in begun.values():
            if running.process.poll() is None:
                os.killpg(running.process.pid, signal.SIGTERM)
                running.process.wait()
    for remark in said:
        print(remark)
    print(f"{time.monotonic() - began:.0f} s in all")
    print(summary(total))
    return 1 if total.failed else 0


if __name__ == "__main__":
    # Each step has its own process group, so a signal to this program must be passed on: as an exception it reaches `capture`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
