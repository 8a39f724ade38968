"""The committed dashboards are those that generate.py makes, and no query hides a missing series.

    python3 -m unittest discover deploy/dashboards
"""

import json
import pathlib
import re
import unittest

import generate

HERE = pathlib.Path(__file__).resolve().parent


class Committed(unittest.TestCase):
    def test_files_are_those_of_the_generator(self) -> None:
        self.assertEqual({file.stem for file in HERE.glob("*.json")}, set(generate.DASHBOARDS))
        for name in generate.DASHBOARDS:
            with self.subTest(name):
                self.assertEqual((HERE / f"{name}.json").read_text(), generate.text(name), "run deploy/dashboards/generate.py")

    def test_no_query_hides_a_missing_series(self) -> None:
        for file in (*HERE.glob("*.json"), HERE / "rules.yaml"):
            self.assertNotRegex(file.read_text(), r"\bor\s+(on\s*\(\)\s*)?vector\s*\(")

    def test_every_alert_has_a_unit_test_that_fires_and_one_that_clears(self) -> None:
        tests = (HERE / "alerts_test.yaml").read_text()
        for alert in re.findall(r"- alert: (\w+)", (HERE / "rules.yaml").read_text()):
            with self.subTest(alert):
                self.assertRegex(tests, rf"alertname: {alert}\n")
                self.assertGreaterEqual(len(re.findall(rf"alertname: {alert}, exp_alerts: \[\]", tests)), 2)

    def test_panels_have_titles_and_meanings_of_their_own(self) -> None:
        for name in generate.DASHBOARDS:
            panels = json.loads(generate.text(name))["panels"]
            self.assertEqual(len({panel["title"] for panel in panels}), len(panels))
            self.assertTrue(all(panel["description"].endswith(".") for panel in panels))


if __name__ == "__main__":
    unittest.main()
