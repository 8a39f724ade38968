"""The console in a real Chromium, on a real stack under load.

    make release && python3 -m unittest discover e2e/observe -p test_console.py

It needs Node, npm and Chromium (Debian: chromium). UPDATE_DOCS=1 replaces the pictures of docs/how-to/console. Standard library
only; `browser/console.mjs` drives the browser.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

from load import Load
from stack import ENGINES, RELEASE, ROOT, START_SECONDS_MAX, Stack, answers, check_built, fetch, free_ports, wait

BROWSER = pathlib.Path(__file__).resolve().parent / "browser"
PICTURES = ROOT / "docs" / "how-to" / "console"
# The pictures that the documents show.
SHOWN = ["endpoints", "traffic", "queues", "decision"]
ENDPOINTS = 1000
TOKEN = "0123456789abcdef0123456789abcdef"
# The time in which the daemon takes two samples, and the proxies make some decisions.
WARM_SECONDS = 25
INSTALL_SECONDS_MAX = 300
BROWSER_SECONDS_MAX = 600

# A configuration that allows fewer running requests than there are clients, so that flow control always holds requests.
CONFIG = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
flowControl:
  saturationDetector: {pluginRef: concurrency-detector}
plugins:
- {type: concurrency-detector, parameters: {maxConcurrency: 1}}
- {type: marginal-cost-scorer}
- {type: slo-request-tracker}
- {type: slo-aware-profile-handler, parameters: {sloMissing: default}}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: slo-request-tracker}, {pluginRef: marginal-cost-scorer}]
- name: slo
  plugins: [{pluginRef: slo-request-tracker}, {pluginRef: marginal-cost-scorer}]
"""


def chromium() -> str | None:
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


def missing() -> str | None:
    """Returns the reason why the browser cannot run here, if there is one."""
    if not shutil.which("node") or not shutil.which("npm"):
        return "there is no Node with npm"
    if not chromium():
        return "there is no Chromium (Debian: apt-get install chromium)"
    check_built()
    return None


class Console(unittest.TestCase):
    def setUp(self) -> None:
        if why := missing():
            print(f"SKIPPED {self.id().replace('.', '::')}: {why}", flush=True)
            self.skipTest(why)

    def test_console_in_a_real_browser(self) -> None:
        self.install()
        with tempfile.TemporaryDirectory(prefix="switchpoint-console-") as name:
            folder = pathlib.Path(name)
            stack = Stack(folder, CONFIG)
            self.addCleanup(stack.stop)
            stack.start(prometheus=False)
            crowd, guarded = self.lonely_daemons(stack)
            load = Load(stack.listeners)
            load.start()
            self.addCleanup(load.stop)
            time.sleep(WARM_SECONDS)
            self.assertGreater(load.served, 100)
            pictures = folder / "pictures"
            pictures.mkdir()
            places = {"CONSOLE": stack.admin, "CROWD": crowd, "GUARDED": guarded}
            environment = {name: f"http://127.0.0.1:{port}" for name, port in places.items()}
            environment |= {"TOKEN": TOKEN, "PICTURES": str(pictures), "CHROMIUM": chromium() or ""}
            done = subprocess.run(
                ["node", "--test", "--test-reporter=spec", "console.mjs"], cwd=BROWSER, env=os.environ | environment, capture_output=True,
                text=True, timeout=BROWSER_SECONDS_MAX, check=False,
            )  # fmt: skip
            print("\n".join(re.findall(r"FIGURE .*|[✔✖] .*", done.stdout)), file=sys.stderr, flush=True)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.keep(pictures)
            load.stop()
            stack.stop()

    def install(self) -> None:
        done = subprocess.run(
            ["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=BROWSER, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX,
            check=False,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def lonely_daemons(self, stack: Stack) -> tuple[int, int]:
        """Starts a daemon with many endpoints that do not answer, and one with a token. Returns their admin ports."""
        rows = [{"name": f"engine-{at}", "address": f"127.1.{at // 250}.{at % 250 + 1}", "port": "9"} for at in range(ENDPOINTS)]
        (stack.folder / "crowd.json").write_text(json.dumps({"endpoints": rows}))
        (stack.folder / "token").write_text(TOKEN)
        ports = []
        for name, arguments in (
            ("crowd", ["--local-endpoints", "--endpoints-file", stack.folder / "crowd.json", "--scrape-interval", "10s"]),
            ("guarded", ["--endpoint", f"127.0.0.1:{stack.engines[0]}", "--admin-token-file", stack.folder / "token"]),
        ):
            listen = free_ports(4)
            flags = ["--listen-admin", "--listen-state", "--listen-ext-proc", "--listen-health"]
            listens = [word for flag, port in zip(flags, listen) for word in (flag, f"127.0.0.1:{port}")]
            stack.run(name, RELEASE / "switchpointd", "serve", *arguments, *listens)
            wait(f"the daemon {name}", START_SECONDS_MAX, lambda: answers(f"http://127.0.0.1:{listen[0]}/livez"))
            ports.append(listen[0])
        complete = lambda: len(json.loads(fetch(f"http://127.0.0.1:{ports[0]}/api/v1/overview"))["pools"][0]["endpoints"]) == ENDPOINTS
        wait(f"{ENDPOINTS} endpoints", START_SECONDS_MAX, complete)
        self.assertEqual(len(stack.engines), ENGINES)
        return ports[0], ports[1]

    def keep(self, pictures: pathlib.Path) -> None:
        """Replaces the pictures of the documents if UPDATE_DOCS is set; a full set goes where SWITCHPOINT_PICTURES says."""
        if os.environ.get("UPDATE_DOCS"):
            PICTURES.mkdir(parents=True, exist_ok=True)
            for name in SHOWN:
                shutil.copy(pictures / f"{name}.png", PICTURES)
        if folder := os.environ.get("SWITCHPOINT_PICTURES"):
            shutil.copytree(pictures, folder, dirs_exist_ok=True)


if __name__ == "__main__":
    unittest.main()
