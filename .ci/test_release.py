"""Tests of `.ci/release.py` and of the workflows. Standard library only."""

import re
import unittest

import release

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n### Added\n- Two.\n\n## [0.1.0] - unreleased\n- One.\n"


class Versions(unittest.TestCase):
    def check(self, tag: str, chart: str = 'version: 0.2.0\nappVersion: "0.2.0"\n', cargo: str = "0.2.0") -> None:
        release.check(tag, cargo, chart, CHANGELOG)

    def test_one_version_everywhere(self):
        self.check("v0.2.0")

    def test_any_difference_ends_the_release(self):
        for case in [
            {"tag": "v0.2.1"}, {"tag": "0.2.0"}, {"tag": "v0.2.0", "cargo": "0.3.0"}, {"tag": "v0.2.0", "chart": "version: 0.2.0\n"},
            {"tag": "v0.2.0", "chart": "version: 0.2.0\nappVersion: 0.1.0\n"}, {"tag": "v0.1.0", "cargo": "0.1.0", "chart": "version: 0.1.0\nappVersion: 0.1.0\n"},
        ]:
            with self.assertRaises(release.Mistake, msg=str(case)):
                self.check(**case)

    def test_notes_are_the_section_of_the_version(self):
        self.assertEqual(release.section(CHANGELOG, "0.2.0"), "### Added\n- Two.")

    def test_the_published_chart_names_its_registry(self):
        self.assertEqual(release.with_registry("image:\n  registry: registry.example.com\n", "a/b"), "image:\n  registry: a/b\n")
        with self.assertRaises(release.Mistake):
            release.with_registry("image:\n  registry: other\n", "a/b")


class Workflows(unittest.TestCase):
    """What GitHub does not check: actions fixed by digest, rights and a time limit for each job, existing targets of make."""

    def setUp(self):
        self.texts = {path.name: path.read_text() for path in (release.ROOT / ".github" / "workflows").glob("*.yaml")}
        self.assertTrue(self.texts)

    def test_actions_are_fixed_by_digest(self):
        for name, text in self.texts.items():
            for used in re.findall(r"uses: (.*)", text):
                self.assertRegex(used, r"^[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", name)

    def test_each_job_has_rights_and_a_time_limit(self):
        for name, text in self.texts.items():
            self.assertIn("\npermissions: {}\n", text, name)
            for job in re.split(r"(?m)^  (?=[\w-]+:\n)", text.split("\njobs:\n")[1])[1:]:
                for key in ("    permissions:", "    timeout-minutes:"):
                    self.assertIn(key, job, f"{name}: {job.splitlines()[0]}")

    def test_programs_exist(self):
        makefile = (release.ROOT / "Makefile").read_text()
        for name, text in self.texts.items():
            for target in re.findall(r"run: make ([\w-]+)", text):
                self.assertTrue(re.search(rf"(?m)^{target}:", makefile), f"{name}: make {target}")
            for script in re.findall(r"python3 (\.ci/\w+\.py)", text):
                self.assertTrue((release.ROOT / script).exists(), f"{name}: {script}")

    def test_no_registry_is_named(self):
        for name, text in self.texts.items():
            self.assertEqual(re.findall(r"\b(?:ghcr|quay|docker|gcr|pkg)\.(?:io|dev|com)\b", text), [], name)


if __name__ == "__main__":
    unittest.main()
