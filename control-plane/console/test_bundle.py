"""The committed script of the console is what its source builds, its numbers are readable, and its packages have permissive licences.

    python3 -m unittest discover control-plane/console

The build needs Node and the npm registry. UPDATE_GOLDENS=1 replaces dist/console.js and src/api.ts. Standard library only.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

ROOM = pathlib.Path(__file__).resolve().parent
ROOT = ROOM.parent.parent
BROWSER = ROOT / "e2e" / "observe" / "browser"
BUILT = ["dist/console.js", "src/api.ts"]
SOURCES = ["package.json", "package-lock.json", ".npmrc", "tsconfig.json", "api.schema.json", "src", "dist", "test_format.mjs"]
PERMISSIVE = {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "Python-2.0"}
# The package drives a browser in a test. The console does not ship the package and links nothing with it.
EXCEPTIONS = {"axe-core": "MPL-2.0"}
NPM_SECONDS_MAX = 300
UNREACHABLE = re.compile(r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|network")
# Node of `make setup`, used if the system has none.
NODE = ROOT / ".tools" / "node" / "bin"


def run(folder: pathlib.Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{os.environ['PATH']}{os.pathsep}{NODE}"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=NPM_SECONDS_MAX, check=False)


class Bundle(unittest.TestCase):
    def skip(self, why: str) -> None:
        print(f"SKIPPED {self.id().replace('.', '::')}: {why}", flush=True)
        self.skipTest(why)

    def test_the_script_is_built_from_its_source(self) -> None:
        if not shutil.which("npm", path=f"{os.environ['PATH']}{os.pathsep}{NODE}"):
            self.skip("there is no Node with npm, so the console's script was not built again")
        with tempfile.TemporaryDirectory(prefix="switchpoint-bundle-") as name:
            folder = pathlib.Path(name)
            for source in SOURCES:
                path = ROOM / source
                (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / source)
            for built in BUILT:
                (folder / built).unlink()
            installed = run(folder, "npm", "ci", "--no-audit", "--no-fund")
            if installed.returncode and UNREACHABLE.search(installed.stderr):
                self.skip("the npm registry cannot be reached, so the console's script was not built again")
            self.assertEqual(installed.returncode, 0, installed.stderr)
            with self.subTest("npm test"):
                tested = run(folder, "npm", "test", "--silent")
                self.assertEqual(tested.returncode, 0, tested.stdout + tested.stderr)
            done = run(folder, "npm", "run", "--silent", "build")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            for built in BUILT:
                if os.environ.get("UPDATE_GOLDENS"):
                    shutil.copy(folder / built, ROOM / built)
                with self.subTest(built):
                    same = (folder / built).read_bytes() == (ROOM / built).read_bytes()
                    self.assertTrue(same, f"{built} is not what the source builds: run with UPDATE_GOLDENS=1, or `npm run build`")

    def test_packages_have_permissive_licences_and_no_host(self) -> None:
        for room in (ROOM, BROWSER):
            lock = json.loads((room / "package-lock.json").read_text())
            packages = {path.split("node_modules/")[-1]: package for path, package in lock["packages"].items() if path}
            self.assertTrue(packages)
            for name, package in packages.items():
                with self.subTest(name):
                    self.assertNotIn("resolved", package, "the lock file names a registry")
                    self.assertIn("integrity", package)
                    licence = package.get("license", "none")
                    self.assertTrue(licence in PERMISSIVE or EXCEPTIONS.get(name) == licence, f"{name}: {licence}")

    def test_what_the_script_contains_has_its_licence_beside_it(self) -> None:
        """Only `dependencies` are in the script; the other packages build it."""
        contained = json.loads((ROOM / "package.json").read_text())["dependencies"]
        notices = (ROOM / "LICENCES.txt").read_text()
        for name, version in contained.items():
            self.assertIn(f"## {name} {version}", notices)


if __name__ == "__main__":
    unittest.main()
