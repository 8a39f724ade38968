"""Tests the pure parts of the race on vLLM. Standard library only; needs no engine and no installed tool."""

import json
import pathlib
import random
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import counters
import generators
import install
import page
import paths
import record
import routers
import sessions
from chat import Answer
from counters import Counted

PAGE = """
# TYPE vllm:request_success counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 4.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 2.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 50.0
vllm:generation_tokens_total{engine="0",model_name="m"} 30.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 150.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 96.0
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
"""
ENGINES = {"requests": 208, "aborted": 0, "prompt_tokens": 10_000, "generation_tokens": 1_664, "queried_tokens": 10_000, "hit_tokens": 6_400}
RACE = {
    "router": "switchpoint", "seed": 1, "hit_rate": 0.81, "requests_by_engine": [30, 34], "requests": 64, "failed": 0, "first_ms": 1234.0,
    "whole_ms": 2000.0, "cached_tokens": 6_400, "engines": ENGINES, "failures": [],
}  # fmt: skip
TOOL = {"tool": "aiperf", "streamed": True, "requests": 208, "failed": 0, "prompt_tokens": 10_000, "completion_tokens": 1_664, "cached_tokens": None, "engines": ENGINES}

# Matches what a recording must not contain: an address, and the paths of one machine. The paths are in parts, so that this file does not
# contain them.
MACHINES = r"127\.0\.0\.1|/(home|root)/|site-packages"


class Counts(unittest.TestCase):
    def test_series_are_added_and_aborted_requests_are_apart(self) -> None:
        self.assertEqual(counters.read(PAGE), Counted(7, 2, 150, 30, 150, 96, 3))

    def test_hit_rate_is_a_share_of_the_queried_tokens(self) -> None:
        self.assertAlmostEqual(counters.read(PAGE).hit_rate, 0.64)
        self.assertEqual(Counted().hit_rate, 0.0)

    def test_sums_of_no_engine_are_zero(self) -> None:
        self.assertEqual(counters.total([]), Counted())


class Installation(unittest.TestCase):
    def test_every_tool_has_a_fixed_version(self) -> None:
        for tool, row in paths.versions().items():
            packages = row.get("packages", []) + row.get("first", []) + row.get("bare", []) + [row[key] for key in ("wheel",) if key in row]
            self.assertTrue(packages, tool)
            for package in packages:
                self.assertRegex(package, r"^[\w.-]+==\d[\w.]*$", tool)

    def test_requirements_lack_extras_and_what_is_omitted(self) -> None:
        metadata = 'Name: x\nRequires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"\nRequires-Dist: torchvision; a == "b"\nRequires-Dist: numpy\nRequires-Dist: pandas; extra == "bench"\nRequires-Dist: xgrammar==0.2.8; platform_machine == "x86_64"\n'
        self.assertEqual(install.requirements(metadata, ["torch", "torchvision"]), ["numpy", 'xgrammar==0.2.8; platform_machine == "x86_64"'])


class Load(unittest.TestCase):
    def test_a_seed_gives_the_same_sessions_except_the_salt(self) -> None:
        shape = sessions.Shape()
        one, two = sessions.plan(shape, 7, "aa"), sessions.plan(shape, 7, "bb")
        self.assertEqual([session.at for session in one], [session.at for session in two])
        self.assertEqual([session.questions for session in one], [session.questions for session in two])
        self.assertEqual([session.system[2:] for session in one], [session.system[2:] for session in two])
        self.assertNotEqual([session.at for session in one], [session.at for session in sessions.plan(shape, 8, "aa")])

    def test_sessions_share_the_prompts_of_their_groups(self) -> None:
        shape = sessions.Shape(sessions=40, groups=3)
        self.assertEqual(len({session.system for session in sessions.plan(shape, 1, "s")}), 3)

    def test_too_many_sessions_are_refused(self) -> None:
        self.assertRaises(ValueError, sessions.plan, sessions.Shape(sessions=sessions.SESSIONS_MAX + 1), 1, "s")

    def test_words_have_the_requested_number(self) -> None:
        self.assertEqual(len(sessions.words(random.Random(1), 25).split()), 25)

    def test_a_summary_counts_failures_and_averages_the_rest(self) -> None:
        answers = [Answer(200, first=0.1, whole=0.2, prompt_tokens=10, cached_tokens=8), Answer(200, first=0.3, whole=0.4), Answer(503, error="status 503")]
        report = sessions.summarize(answers)
        self.assertEqual((report.requests, report.failed, report.failures), (3, 1, ["status 503"]))
        self.assertEqual((report.first_ms, report.whole_ms, report.prompt_tokens, report.cached_tokens), (200.0, 300.0, 10, 8))


class Routers(unittest.TestCase):
    def test_urls_become_addresses(self) -> None:
        self.assertEqual(routers.hosts(["http://10.0.0.1:8000", "http://engine/"]), [("10.0.0.1", 8000), ("engine", 80)])

    def test_round_robin_reaches_every_engine_and_cuts_no_long_reply(self) -> None:
        resources = routers.round_robin_config(["http://10.0.0.1:8000", "http://10.0.0.2:8001"], 9000)["static_resources"]
        (locality,) = resources["clusters"][0]["load_assignment"]["endpoints"]
        self.assertEqual([row["endpoint"]["address"]["socket_address"]["port_value"] for row in locality["lb_endpoints"]], [8000, 8001])
        self.assertIn('"timeout": "0s"', json.dumps(resources["listeners"]))


class Tools(unittest.TestCase):
    def test_counts_are_compared_as_a_share_of_the_engines(self) -> None:
        self.assertEqual(generators.apart(102, 100), 0.02)
        self.assertIsNone(generators.apart(None, 100))
        self.assertEqual((generators.apart(0, 0), generators.apart(1, 0)), (0.0, 1.0))

    def test_exports_are_read(self) -> None:
        export = {"request_count": {"avg": 208.0}, "total_usage_prompt_tokens": {"avg": 9_999.6}, "error_request_count": None}
        self.assertEqual(generators.aiperf_tally(export), generators.Tally(208, 0, 10_000, None, None))
        result = {"completed": 200, "failed": 1, "total_input_tokens": 52_000, "total_output_tokens": 1_600}
        self.assertEqual(generators.bench_tally(result), generators.Tally(200, 1, 52_000, 1_600, None))


class Page(unittest.TestCase):
    def test_it_has_the_parts_that_were_measured_and_no_others(self) -> None:
        text = page.markdown({"about": ["2 engines"], "own_engines": True, "races": [RACE], "skipped": ["restarts: no"]})
        self.assertIn("| switchpoint | 1 | 81.0 | 30 34 | 64 | 0 | 1,234 | 2,000 | 6,400 of 6,400 |", text)
        self.assertIn("- restarts: no", text)
        self.assertNotIn("## LoRA", text)
        self.assertIn("**What this page does not show.**", text)

    def test_engines_with_gpus_are_not_called_slow(self) -> None:
        text = page.markdown({"about": [], "own_engines": False})
        self.assertNotIn("does not show", text)
        self.assertIn("make race-vllm ENGINES=", text)

    def test_differences_over_two_per_cent_are_marked(self) -> None:
        self.assertEqual(page.verdict(208, 210), "208 of 210")
        self.assertEqual(page.verdict(200, 210), "200 of 210 (4.8 % apart)")
        self.assertEqual(page.verdict(None, 210), "- of 210")
        self.assertIn("| aiperf | yes | 208 of 208 | 0 | 10,000 of 10,000 | 1,664 of 1,664 | - of 6,400 |", page.markdown({"about": [], "own_engines": False, "generators": [TOOL]}))

    def test_lines_outside_of_tables_are_at_most_120_columns(self) -> None:
        leaver = {"router": "r", "clients": 2, "left": 2, "idle_after_s": 1.0, "generated": 6, "requested": 600}
        restart = {"router": "r", "requests": 90, "failed": 1, "away_s": 50, "after_s": 40, "requests_after": 9, "failures": ["in the stream"]}
        adapter = {"router": "r", "chats": 24, "failed": 2, "by_adapter": {"red": [12, 0], "blue": [0, 12]}, "failures": ["cut off " * 20, "later"]}
        text = page.markdown({"about": [], "own_engines": True, "races": [RACE], "leaving": [leaver], "restarts": [restart], "adapters": [adapter], "generators": [TOOL]})
        command = [line for line in text.splitlines() if line.startswith("make ")]
        for line in text.splitlines():
            self.assertTrue(len(line) <= 120 or line.startswith("|") or line in command, line)
        self.assertIn("| r | 90 | 1 | 50 | 9 in 40 s |", text)
        self.assertIn("| r | 24 | 2 | 12 0 | 0 12 |", text)
        self.assertEqual(text.count("First failure with r: `cut off cut off"), 1)
        self.assertNotIn("in the stream`", text)

    def test_an_engine_that_generated_on_is_named(self) -> None:
        row = {"router": "r", "clients": 2, "left": 2, "idle_after_s": None, "generated": 600, "requested": 600}
        self.assertIn("| r | 2 | 2 | never | 600 | 600 |", page.leaving([row]))


class Recordings(unittest.TestCase):
    def test_no_address_folder_or_id_of_the_machine_remains(self) -> None:
        text = '{"id":"chatcmpl-0123456789abcdef","created":1764300000,"root":"/somewhere/models/smollm2","at":"127.0.0.1:4711"}'
        wanted = '{"id":"chatcmpl-0","created":1790000000,"root":"/models/smollm2","at":"engine.example:8000"}'
        self.assertEqual(record.neutral(text, "http://127.0.0.1:4711", pathlib.Path("/somewhere/models/smollm2")), wanted)

    def test_a_page_keeps_what_the_picker_reads(self) -> None:
        text = 'python_info{x="1"} 1.0\nprocess_start_time_seconds 1.76e+09\nvllm:ttft_seconds_bucket{le="0.1"} 1.0\nvllm:ttft_seconds_bucket{le="+Inf"} 2.0\nvllm:num_requests_running{engine="0"} 0.0\n'
        kept = record.smaller(text).splitlines()
        self.assertEqual(len(kept), 3)
        self.assertEqual(kept[-1], 'vllm:num_requests_running{engine="0"} 0.0')

    def test_goldens_have_the_recorded_replies(self) -> None:
        if not paths.GOLDEN.exists():
            self.skipTest("nothing is recorded")
        kept = [line for line in paths.GOLDEN.read_text().splitlines() if line and not line.startswith("=>")]
        self.assertEqual(kept, [line for line in record.golden(paths.RECORDED).splitlines() if line])

    def test_recorded_files_are_small_and_named_in_the_index(self) -> None:
        if not paths.RECORDED.exists():
            self.skipTest("nothing is recorded")
        files = [file for file in paths.RECORDED.iterdir() if file.suffix in (".txt", ".json")]
        self.assertLess(sum(file.stat().st_size for file in files), 100_000)
        index = json.loads((paths.RECORDED / "index.json").read_text())
        self.assertEqual(set(index), {file.name for file in files} - {"index.json"})
        for file in files:
            self.assertNotRegex(file.read_text(), MACHINES, file.name)


if __name__ == "__main__":
    unittest.main()
