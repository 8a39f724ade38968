"""Tests how `.ci/steps.py` reads the output of `cargo test`. Its first step runs these tests. Standard library only."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import unittest
from datetime import date, timedelta
from unittest import mock

import steps
import unsteady

# Shortened output of `cargo test --no-fail-fast` for one end-to-end test that fails and one that passes.
ONE_FAILED = """\
     Running tests/e2e/main.rs (target/debug/deps/e2e-0123456789abcdef)

running 2 tests
test drills::daemon_killed ... FAILED
test overview::one_request ... ok

failures:

---- drills::daemon_killed stdout ----

thread 'drills::daemon_killed' (42) panicked at e2e/tests/e2e/drills.rs:7:5:
no answer in 30 s
note: run with `RUST_BACKTRACE=1`

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s

error: 1 target failed:
    `-p e2e --test e2e`
"""


class UnitTests(unittest.TestCase):
    def test_counts_are_those_of_the_last_lines(self):
        for last, counts in {
            "OK": steps.Counts(passed=17),
            "OK (skipped=2)": steps.Counts(passed=15, skipped=2),
            "FAILED (failures=1, errors=2, skipped=3)": steps.Counts(passed=11, failed=3, skipped=3),
        }.items():
            status = 0 if last.startswith("OK") else 1
            self.assertEqual(steps.unit_tests(status, f"....\nRan 17 tests in 40.1s\n\n{last}\n"), counts, last)

    def test_a_run_without_a_result_has_failed(self):
        self.assertEqual(steps.unit_tests(1, "ModuleNotFoundError: no module"), steps.Counts(failed=1))
        self.assertEqual(steps.unit_tests(137, "Ran 17 tests in 40.1s\n\nOK\n").failed, 1)


class Again(unittest.TestCase):
    """Runs the whole step with a `cargo` that prints the output above, and `alone` when it runs the failed test alone."""

    def run_step(self, alone: str, output: str = ONE_FAILED, alone_in_lib: str = "") -> tuple[steps.Counts, list[str]]:
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(steps, "LOGS", steps.ROOT / "target" / "ci"), mock.patch("builtins.print"):
            (pathlib.Path(folder) / "output").write_text(output)
            cargo = pathlib.Path(folder) / "cargo"
            cargo.write_text(
                "#!/bin/sh\n"
                f'case "$*" in *--exact*--test-threads=1*) for each in {alone} {alone_in_lib}; do echo "test drills::daemon_killed ... $each"; done;; '
                f'*) cat "{folder}/output"; exit 101;; esac\n'
            )
            cargo.chmod(0o755)
            steps.LOGS.mkdir(parents=True, exist_ok=True)
            return steps.run(steps.Step("test of steps", f'PATH="{folder}:$PATH" cargo test --locked', steps.cargo_test))

    def test_passing_alone_is_a_warning_where_it_is_listed(self):
        with mock.patch.object(unsteady, "names", lambda: {"drills::daemon_killed"}):
            counts, remarks = self.run_step("ok")
        self.assertEqual(counts, steps.Counts(passed=2))
        self.assertEqual(len(remarks), 1)
        self.assertRegex(remarks[0], r"^UNSTEADY, listed: drills::daemon_killed: e2e/tests/e2e/drills.rs:7:5:\nno answer in 30 s")

    def test_an_error_that_a_test_returns_is_told(self):
        begin, end = ONE_FAILED.index("thread '"), ONE_FAILED.index("test result")
        output = f'{ONE_FAILED[:begin]}drill: 3 s\nError: "waited 60s for a seat"\n\n{ONE_FAILED[end:]}'
        with mock.patch.object(unsteady, "names", lambda: {"drills::daemon_killed"}):
            _, remarks = self.run_step("ok", output)
        self.assertEqual(remarks, ['UNSTEADY, listed: drills::daemon_killed: Error: "waited 60s for a seat"'])

    def test_passing_alone_is_failed_where_it_is_not_listed(self):
        with mock.patch.object(unsteady, "names", set):
            counts, remarks = self.run_step("ok")
        self.assertEqual(counts, steps.Counts(passed=1, failed=1))
        self.assertRegex(remarks[0], r"^FAILED, passes when run alone and is not listed in .ci/unsteady.toml: drills::daemon_killed: ")

    def test_failing_alone_too_is_failed_listed_or_not(self):
        for listed in [set(), {"drills::daemon_killed"}]:
            with mock.patch.object(unsteady, "names", lambda listed=listed: listed):
                counts, remarks = self.run_step("FAILED")
            self.assertEqual(counts, steps.Counts(passed=1, failed=1))
            self.assertRegex(remarks[0], r"^FAILED: drills::daemon_killed: ")

    def test_a_test_of_two_targets_must_pass_in_both(self):
        with mock.patch.object(unsteady, "names", lambda: {"drills::daemon_killed"}):
            counts, _ = self.run_step("ok", alone_in_lib="FAILED")
        self.assertEqual(counts, steps.Counts(passed=1, failed=1))


class Beside(unittest.TestCase):
    def run_steps(self, *commands: tuple[str, steps.Begins]) -> int:
        made = [steps.Step(f"test of steps {number}", command, steps.one, 20, begins) for number, (command, begins) in enumerate(commands)]
        with mock.patch.dict(steps.GROUPS, {"these": lambda: made}), mock.patch("builtins.print"):
            return steps.main(["these"])

    def test_a_step_beside_others_begins_with_the_first_and_counts_at_its_turn(self):
        in_turn = steps.Begins.IN_TURN
        for begins in (steps.Begins.FIRST, steps.Begins.WITH_PREVIOUS):
            with tempfile.TemporaryDirectory() as folder:
                until_begun = f"until [ -e {folder}/begun ]; do sleep 0.01; done"
                self.assertEqual(self.run_steps((until_begun, in_turn), (f"touch {folder}/begun", begins)), 0)
            self.assertEqual(self.run_steps(("true", in_turn), ("false", begins)), 1)

    def test_a_step_that_begins_with_the_previous_one_begins_after_all_before(self):
        with tempfile.TemporaryDirectory() as folder:
            first = (f"sleep 0.1; touch {folder}/first", steps.Begins.IN_TURN)
            third = (f"test -e {folder}/first", steps.Begins.WITH_PREVIOUS)
            self.assertEqual(self.run_steps(first, ("true", steps.Begins.IN_TURN), third), 0)

    def test_more_output_than_a_pipe_holds_is_kept(self):
        _, output = steps.finish(steps.begin("seq 100000"), 20)
        self.assertEqual(len(output.splitlines()), 100_000)

    def test_an_end_before_its_turn_ends_it(self):
        with tempfile.TemporaryDirectory() as folder:
            step = steps.Step("test of steps", f"sh -c 'echo $$ >{folder}/id; sleep 60'", steps.one, 20, steps.Begins.FIRST)
            other = steps.Step("test of steps", f"until [ -s {folder}/id ]; do sleep 0.01; done; exit 1", steps.one, 20)
            ended = mock.Mock(side_effect=lambda status, output: sys.exit(143))
            made = [other._replace(name="first", judge=ended), step]
            with mock.patch.dict(steps.GROUPS, {"these": lambda: made}), mock.patch("builtins.print"), self.assertRaises(SystemExit):
                steps.main(["these"])
            process = int((pathlib.Path(folder) / "id").read_text())
            for _ in range(500):
                if not pathlib.Path(f"/proc/{process}").exists():
                    return
                time.sleep(0.01)
            self.fail("it still runs")


class Unsteady(unittest.TestCase):
    ENTRY = '[[test]]\nname = "a::b"\nsince = "2026-11-01"\nreason = "slow"\n'

    def test_an_entry_is_read_and_expires(self):
        entries = unsteady.parse("# a comment\n" + self.ENTRY)
        self.assertEqual(entries, [unsteady.Entry("a::b", date(2026, 11, 1), "slow")])
        self.assertEqual(unsteady.complaints(entries, date(2026, 11, 15)), [])
        self.assertEqual(len(unsteady.complaints(entries, date(2026, 11, 16))), 1)
        self.assertEqual(len(unsteady.complaints(entries, date(2026, 10, 31))), 1)

    def test_an_expired_entry_excuses_no_failure(self):
        for since, names in [(date.today(), {"a::b"}), (date.today() - timedelta(days=15), set())]:
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder) / "unsteady.toml"
                path.write_text(self.ENTRY.replace("2026-11-01", since.isoformat()))
                with mock.patch.object(unsteady, "PATH", path), mock.patch("builtins.print"):
                    self.assertEqual(unsteady.names(), names)
                    self.assertEqual(unsteady.main(), 0 if names else 1)

    def test_a_malformed_list_is_refused(self):
        for text in [self.ENTRY + self.ENTRY, self.ENTRY.replace("slow", ""), self.ENTRY.replace("11-01", "13-01"), "name = 1", '[[test]]\nnmae = "a"']:
            with self.assertRaises(unsteady.Malformed, msg=text):
                unsteady.parse(text)

    def test_the_committed_list_is_well_formed(self):
        unsteady.parse(unsteady.PATH.read_text())


class Slow(unittest.TestCase):
    """The tests that `make test` leaves out."""

    LIST = steps.ROOT / ".ci" / "slow.toml"
    FIELDS = {"why", "finds", "found", "seconds", "waits"}
    # A test that finds more faults per minute, of at least `FOUND_MIN` faults, belongs in `make test`.
    FINDS_PER_MINUTE_MAX, FOUND_MIN = 2, 2
    # A test of fewer seconds is no reason to leave it out.
    SECONDS_MIN = 15

    def modules(self) -> set[str]:
        """Returns the files with a module `slow`."""
        patterns = [f"{crate}/{folder}/**/*.rs" for crate in ("*", "*/*") for folder in ("src", "tests")]
        files = {path for pattern in patterns for path in steps.ROOT.glob(pattern) if re.search(r"(?m)^ *mod slow\b", path.read_text())}
        return {path.relative_to(steps.ROOT).as_posix() for path in files}

    def complaints(self, listed: dict[str, dict]) -> list[str]:
        found = []
        for name, row in listed.items():
            longest = max(row.get("seconds", [row.get("waits", self.SECONDS_MIN)]))
            if not row.keys() <= self.FIELDS or row.get("why") not in ("time", "quiet", "tools") or not row.get("finds"):
                found.append(f"{name}: it needs why and finds, and has no other fields than {sorted(self.FIELDS)}")
            elif row["why"] == "time" and longest < self.SECONDS_MIN:
                found.append(f"{name}: {longest} s are too few to leave it out of make test")
            elif len(row.get("found", [])) >= self.FOUND_MIN and self.finds_per_minute(row) > self.FINDS_PER_MINUTE_MAX:
                found.append(f"{name}: it finds {self.finds_per_minute(row):.1f} faults per minute, so it belongs in make test")
        return found

    def finds_per_minute(self, row: dict) -> float:
        """Returns the faults per minute of the longest test. A test without measured seconds has the rate 0."""
        return 60 * len(row.get("found", [])) / max(row["seconds"]) if "seconds" in row else 0

    def test_each_module_that_make_test_leaves_out_has_a_step(self):
        commands = [step.command for group in ("charts", "e2e-slow") for step in steps.GROUPS[group]()]
        crates = {re.search(r"([^/]+)/(?:src|tests)/", name)[1] for name in self.modules()}
        self.assertEqual(crates, {"control-plane", "discovery", "e2e", "exchange", "migrate", "race"})
        for crate in crates:
            self.assertTrue(any(f"-p {crate} " in command and command.endswith(" slow::") for command in commands), crate)

    def test_each_file_that_make_test_leaves_out_is_listed(self):
        drills = {path.relative_to(steps.ROOT).as_posix() for path in (steps.ROOT / "e2e/tests/long").glob("**/*.rs")}
        listed = tomllib.loads(self.LIST.read_text())
        self.assertEqual(set(listed), self.modules() | drills - {"e2e/tests/long/main.rs"})
        self.assertEqual(self.complaints(listed), [])

    def test_a_test_that_is_quick_or_finds_much_in_little_time_must_move(self):
        row = {"why": "time", "finds": "A leak."}
        for change, number in [
            ({}, 0), ({"waits": 15}, 0), ({"seconds": [3, 14]}, 1), ({"why": "quiet", "waits": 3}, 0), ({"why": "slow"}, 1), ({"finds": ""}, 1),
            ({"second": 20}, 1), ({"seconds": [20, 59], "found": ["a", "b"]}, 1), ({"seconds": [20, 60], "found": ["a", "b"]}, 0),
            ({"seconds": [20, 59], "found": ["a"]}, 0), ({"seconds": [20, 89], "found": ["a", "b", "c"]}, 1),
            ({"waits": 42, "found": ["a", "b"]}, 0), ({"waits": 14}, 1),
        ]:
            self.assertEqual(len(self.complaints({"a.rs": row | change})), number, change)


class Order(unittest.TestCase):
    def test_the_fastest_failures_come_first(self):
        made = re.search(r"(?m)^test:.*\n\t@python3 \.ci/steps\.py (.*)$", (steps.ROOT / "Makefile").read_text())
        all_steps = [step for group in made[1].split() for step in steps.GROUPS[group]() if step.begins is not steps.Begins.FIRST]
        compiles = [bool(re.search(r"cargo (?:build|test|clippy)|make .*wasm", step.command)) for step in all_steps]
        self.assertTrue(any(compiles))
        self.assertEqual(compiles, sorted(compiles), "steps that compile nothing come before those that compile")
        with mock.patch.object(steps, "changed_files", return_value=[]):
            for group in ("lint", "check"):
                commands = " ".join(step.command for step in steps.GROUPS[group]())
                places = [commands.index(part) for part in ("links.py", "cargo fmt", "house.py check")]
                self.assertEqual(places, sorted(places), group)


class CodeInDocuments(unittest.TestCase):
    def test_no_crate_has_code_in_documents_that_is_a_test(self):
        found = set()
        for path in steps.ROOT.glob("**/src/**/*.rs"):
            if "target" in path.relative_to(steps.ROOT).parts:
                continue
            fences = re.findall(r"^\s*//[/!] ```(.*)$", path.read_text(), re.MULTILINE)
            if any(language in ("", "rust", "no_run", "should_panic") for language in fences[::2]):
                found.add(path.relative_to(steps.ROOT).as_posix().split("/src/")[0])
        self.assertEqual(found, set())


class Programs(unittest.TestCase):
    def test_all_test_programs_are_run_but_the_slow_drills(self):
        with tempfile.TemporaryDirectory() as folder:
            for name, runs in {
                "e2e/e2e-1": ["", "timed"],
                "crate/it-2": ["", "others"],
                "control-plane/daemon-3": ["", "timed"],
                "control-plane/control_plane-3": ["", "others"],
                "e2e/long-4": [],
            }.items():
                program = pathlib.Path(folder) / name
                program.parent.mkdir(exist_ok=True)
                program.write_text("#!/bin/sh\necho it ran\n")
                program.chmod(0o755)
                run = [steps.ROOT / ".ci" / "test_threads.sh", program]
                for programs in ("", "timed", "others"):
                    environment = os.environ | {"PROGRAMS": programs}
                    output = subprocess.run(run, capture_output=True, text=True, check=True, env=environment, cwd=program.parent).stdout
                    self.assertEqual("it ran" in output, programs in runs, name)


class Pins(unittest.TestCase):
    def test_packages_are_installed_by_hash(self):
        for name in ("Makefile", "deploy/images/cross.py"):
            lines = [line for line in (steps.ROOT / name).read_text().splitlines() if re.search(r"pip\b.*\binstall\b.*-r", line)]
            self.assertTrue(lines, name)
            for line in lines:
                self.assertIn("--require-hashes", line, name)

    def test_wasm_opt_is_installed_from_a_lock_file_with_hashes(self):
        lines = [line for line in (steps.ROOT / "Makefile").read_text().splitlines() if re.search(r"\bnpm (ci|i|install|add)\b", line)]
        self.assertEqual(len(lines), 1, lines)
        self.assertIn("npm ci ", lines[0], "`npm install` would take what the lock file does not name")
        folder = steps.ROOT / ".ci/wasm-opt"
        lock = json.loads((folder / "package-lock.json").read_text())
        wanted = json.loads((folder / "package.json").read_text())["dependencies"]
        self.assertEqual(lock["packages"][""]["dependencies"], wanted)
        packages = {path: package for path, package in lock["packages"].items() if path}
        self.assertEqual(set(packages), {f"node_modules/{name}" for name in wanted}, "further packages need a look")
        for path, package in packages.items():
            self.assertTrue(package["integrity"].startswith("sha512-"), path)

    def test_each_requirement_has_a_hash(self):
        files = [*steps.ROOT.glob("e2e/requirements*.txt"), steps.ROOT / "deploy/images/cross.txt", *steps.ROOT.glob(".ci/*/requirements.txt")]
        self.assertEqual(len(files), 5)
        for path in files:
            requirements = re.split(r"(?m)^(?=[\w-]+==)", path.read_text())[1:]
            self.assertTrue(requirements, path)
            for requirement in requirements:
                self.assertIn("--hash=sha256:", requirement, path)


class Changed(unittest.TestCase):
    def test_crates_of_files(self):
        files = ["README.md", "crates/exchange/src/api.rs", "crates/exchange/fuzz/Cargo.toml", "tools/race/cells/src/lib.rs", "crates/none/src/lib.rs"]
        self.assertEqual(steps.changed_crates(files), ["exchange", "race-cells"])

    def test_documents_alone_compile_nothing(self):
        with mock.patch.object(steps, "changed_files", return_value=["docs/README.md"]):
            self.assertFalse([step for step in steps.check_steps() if "cargo test" in step.command])


class Counted(unittest.TestCase):
    def test_a_run_that_ran_nothing_is_a_failure(self):
        self.assertEqual(steps.cargo_test(0, ""), steps.Counts(failed=1))

    def test_a_binary_that_died_is_a_failure(self):
        died = ONE_FAILED.partition("test result")[0]
        self.assertEqual(steps.cargo_test(101, died), steps.Counts(failed=1))

    def test_a_test_that_says_that_it_cannot_run_is_skipped_and_is_one(self):
        said = "SKIPPED drills::daemon_killed: there is no etcd\n"
        output = ONE_FAILED.replace("FAILED", "ok").replace("1 passed; 1 failed", "2 passed; 0 failed")
        # Tests of one binary run at the same time, and each may print the line several times, also in the middle of another.
        for printed in [output.replace("running 2 tests\n", "running 2 tests\n" + said + said), output.replace("killed ... ok", "killed ... " + said + "ok")]:
            self.assertEqual(steps.cargo_test(0, printed), steps.Counts(passed=1, skipped=1))
        self.assertEqual(steps.cargo_test(0, output), steps.Counts(passed=2))

    def test_a_run_of_skipped_tests_alone_is_skipped(self):
        output = ONE_FAILED.replace("1 passed; 1 failed", "1 passed; 0 failed").replace("running", "SKIPPED overview::one_request: no etcd\nrunning")
        self.assertEqual(steps.cargo_test(0, output), steps.Counts(skipped=1))

    def test_the_reasons_are_told_once_each_at_the_end(self):
        said = "SKIPPED a::b: there is no etcd\nSKIPPED a::c: there is no etcd\n"
        output = ONE_FAILED.replace("running 2 tests\n", "running 2 tests\n" + said)
        self.assertEqual(steps.skips(output), ["SKIPPED, 2 tests: there is no etcd"])

    def test_an_advisory_database_out_of_reach_is_skipped_and_an_advisory_is_not(self):
        self.assertEqual(steps.advisories(1, "[ERROR] failed to fetch advisory database"), steps.Counts(skipped=1))
        self.assertEqual(steps.advisories(1, "error[vulnerability]"), steps.Counts(failed=1))


if __name__ == "__main__":
    unittest.main()
