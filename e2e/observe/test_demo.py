"""The demo as a newcomer sees it: it prints the address of the console, and the console's figures of picks change.

    make quick && python3 -m unittest discover e2e/observe -p test_demo.py

It needs the demo's ports, among them 8080 and 9090. Standard library only.
"""

import json
import re
import signal
import subprocess
import tempfile
import unittest

from stack import ROOT, fetch, note, wait

# The program that `make demo` starts.
DEMO = ROOT / "target" / "demo" / "demo"
# The length of the demo, in minutes: half a minute of requests is enough to see picks.
MINUTES = "0.5"
START_SECONDS_MAX = 60
MOVE_SECONDS_MAX = 60
PICKS = 20
STOP_SECONDS_MAX = 30


class Demo(unittest.TestCase):
    def test_the_demo_prints_the_address_of_a_console_where_picks_move(self) -> None:
        self.assertTrue(DEMO.exists(), f"{DEMO} is missing: run `make quick`")
        with tempfile.TemporaryFile("w+") as output:
            demo = subprocess.Popen([DEMO, "--minutes", MINUTES], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            self.addCleanup(demo.kill)

            def printed() -> str:
                output.seek(0)
                return output.read()

            def address() -> re.Match[str] | None:
                self.assertIsNone(demo.poll(), printed())
                return re.search(r"open the console: (http://localhost:\d+/)", printed())

            console = wait("the address of the console", START_SECONDS_MAX, address)[1]
            self.assertIn("<title>Switchpoint", fetch(console))
            first = self.picks(console)
            wait("picks that move", MOVE_SECONDS_MAX, lambda: self.picks(console) >= first + PICKS)
            wait("sampled decisions", MOVE_SECONDS_MAX, lambda: self.decisions(console))
            note(f"demo: {console} shows {self.picks(console)} picks and {self.decisions(console)} sampled decisions")
            demo.send_signal(signal.SIGINT)
            self.assertEqual(demo.wait(STOP_SECONDS_MAX), 0, printed())

    def picks(self, console: str) -> int:
        pools = json.loads(fetch(f"{console}api/v1/overview"))["pools"]
        return sum(endpoint["picked"] for pool in pools for endpoint in pool["endpoints"])

    def decisions(self, console: str) -> int:
        return len(json.loads(fetch(f"{console}api/v1/decisions"))["decisions"])


if __name__ == "__main__":
    unittest.main()
