"""Tests of `.ci/release.py` and of the workflows. Standard library only."""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import time
import tomllib
import unittest
from collections.abc import Iterator
from unittest import mock

import release
import oci  # release.py adds its folder to the path

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


class Releases(unittest.TestCase):
    """The table by which tests find a release in a checkout without tags."""

    COMMIT, OTHER = "a" * 40, "b" * 40
    TABLE = f'[releases]\n"0.1.0" = "{COMMIT}"\n'

    def test_a_release_is_written_once(self):
        table = release.with_release(self.TABLE, "0.2.0", self.OTHER)
        self.assertEqual(tomllib.loads(table)["releases"], {"0.1.0": self.COMMIT, "0.2.0": self.OTHER})
        self.assertEqual(release.with_release(table, "0.2.0", self.OTHER), table)

    def test_a_moved_tag_is_refused(self):
        with self.assertRaisesRegex(release.Mistake, "but the tag v0.1.0 is b"):
            release.with_release(self.TABLE, "0.1.0", self.OTHER)

    def test_a_version_without_a_date_is_no_release(self):
        self.assertTrue(release.is_released(CHANGELOG, "0.2.0"))
        self.assertFalse(release.is_released(CHANGELOG, "0.1.0"))
        self.assertFalse(release.is_released(CHANGELOG, "0.3.0"))

    def test_the_table_has_every_past_release_and_agrees_with_git(self):
        table = tomllib.loads(release.RELEASES.read_text())["releases"]
        changelog = (release.ROOT / "CHANGELOG.md").read_text()
        dated = [found for found in re.findall(r"(?m)^## \[(\d[\d.]+)\]", changelog) if release.is_released(changelog, found)]
        self.assertEqual(set(table), set(dated) - {release.version()})
        for version, commit in table.items():
            for revision in (commit, f"refs/tags/v{version}"):
                found = subprocess.run(["git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"], cwd=release.ROOT, capture_output=True, text=True, check=False)
                # A checkout may lack the tags, and a shallow checkout may lack the commits.
                if found.returncode == 0:
                    self.assertEqual(found.stdout.strip(), commit, revision)
                    cargo = subprocess.run(["git", "show", f"{commit}:Cargo.toml"], cwd=release.ROOT, capture_output=True, text=True, check=True)
                    self.assertIn(f'\nversion = "{version}"\n', cargo.stdout)


class Results(unittest.TestCase):
    """The measured results in a release, collected from a small tree without images."""

    def collected(self, names: list[str]) -> pathlib.Path:
        """Writes results of these names in this order, and returns the folder of the release."""
        root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        others = {"Cargo.toml": 'version = "1.2.3"\n', "images/images.json": "[]", "target/wasm32-wasip1/release/switchpoint.wasm": "module"}
        for name, text in ({f"docs/data/{name}": name for name in names} | others).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        with mock.patch.multiple(release, ROOT=root, IMAGES=root / "images", package_chart=mock.DEFAULT), contextlib.redirect_stdout(None):
            release.collect(root / "out", "registry.example.com")
        return root / "out"

    def test_the_measured_results_are_one_file_whose_bytes_depend_only_on_them(self):
        out = self.collected(["b.json", "a.json", "plot.svg"])
        archive = out / "switchpoint-data-1.2.3.tar.gz"
        with tarfile.open(archive) as opened:
            entries = {entry.name: (opened.extractfile(entry).read() if entry.isfile() else None, entry.mtime) for entry in opened}
        folder = "switchpoint-data-1.2.3"
        self.assertEqual(list(entries.items()), [(folder, (None, 0)), (f"{folder}/a.json", (b"a.json", 0)), (f"{folder}/b.json", (b"b.json", 0))])
        again = self.collected(["a.json", "b.json"]) / archive.name
        self.assertEqual(again.read_bytes(), archive.read_bytes())
        self.assertIn(f"{hashlib.sha256(archive.read_bytes()).hexdigest()}  {archive.name}\n", (out / "SHA256SUMS").read_text())


def write_layout(folder: pathlib.Path, content: bytes) -> str:
    """Writes an OCI image layout with one manifest, and returns the manifest's digest."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def add(data: bytes, kind: str) -> dict:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    kind = "image.manifest.v1+json"
    config, layer = add(b"{}", "empty.v1+json"), add(content, "image.layer.v1.tar")
    manifest = {"schemaVersion": 2, "mediaType": f"application/vnd.oci.{kind}", "config": config, "layers": [layer]}
    found = add(json.dumps(manifest).encode(), kind)
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [found]}))
    return found["digest"]


COSIGN = release.ROOT / ".tools" / "bin" / "cosign"


@contextlib.contextmanager
def registry(folder: pathlib.Path) -> Iterator[str]:
    log = folder / "registry.log"
    with log.open("w") as file, subprocess.Popen([release.CRANE, "registry", "serve", "--address", "127.0.0.1:0"], stdout=file, stderr=file) as process:
        try:
            end = time.monotonic() + 30
            while not (found := re.search(r"serving on port (\d+)", log.read_text())):
                if time.monotonic() > end:
                    raise RuntimeError(log.read_text())
                time.sleep(0.02)
            yield f"127.0.0.1:{found[1]}/owner"
        finally:
            process.terminate()


class Publishing(unittest.TestCase):
    """Publishes to a real registry. Signatures need GitHub's identity, so `cosign` is a script."""

    # The script `cosign` of the test only writes its arguments into a file.
    cosign = 'echo "$@" >> {folder}/signed'

    def setUp(self):
        if not (release.CRANE.exists() and release.HELM.exists()):
            print("SKIPPED release: .tools/bin/crane or helm is missing")
            self.skipTest("no crane or helm")
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.folder / "bin").mkdir()
        (self.folder / "bin" / "cosign").write_text(f"#!/bin/sh\n{self.cosign.format(folder=self.folder)}\n")
        (self.folder / "bin" / "cosign").chmod(0o755)
        environment = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "DOCKER_CONFIG": str(self.folder), "COSIGN_PASSWORD": "test"}
        self.enterContext(mock.patch.dict(os.environ, environment))
        self.enterContext(mock.patch.object(release, "HELM_OPTIONS", ["--plain-http"]))
        chart = self.folder / "chart"
        chart.mkdir()
        (chart / "Chart.yaml").write_text(f"apiVersion: v2\nname: switchpoint\nversion: {release.version()}\n")
        subprocess.run([release.HELM, "package", chart, "--destination", self.folder], check=True, capture_output=True)

    def image(self, content: bytes) -> tuple[str, list[str]]:
        """Writes an image of two platforms with its SBOMs, as deploy/images/build.py does. Returns the digests of the image and of the
        image's manifests."""
        layouts, names = {}, {}
        for name in ("amd64", "arm64"):
            layouts[f"linux/{name}"] = self.folder / name
            write_layout(layouts[f"linux/{name}"], content + name.encode())
            sbom = self.folder / "images" / f"switchpointd-{name}.sbom"
            shutil.rmtree(sbom, ignore_errors=True)
            write_layout(sbom, content + b"sbom" + name.encode())
            (self.folder / f"switchpointd-{name}.cdx.json").write_text("{}")
        folder = self.folder / "images" / "switchpointd"
        oci.join(folder, layouts, {})
        digests = [found["digest"] for found in oci.manifests(folder)]
        manifests = [{"name": f"switchpointd-{name}", "platform": f"linux/{name}", "digest": digest} for name, digest in zip(("amd64", "arm64"), digests)]
        digest = oci.descriptor(folder)["digest"]
        listed = {"name": "switchpointd", "repository": "switchpointd", "tag": "0.1.0", "digest": digest, "manifests": manifests}
        (self.folder / "images.json").write_text(json.dumps([listed]))
        return digest, digests

    def test_images_and_chart_are_pushed_and_signed_and_never_replaced(self):
        digest, manifests = self.image(b"one")
        with registry(self.folder) as address, contextlib.redirect_stdout(None):
            release.publish(self.folder, address)
            release.publish(self.folder, address)  # a release that broke off runs again
            self.assertEqual(release.run(release.CRANE, "digest", f"{address}/switchpointd:0.1.0"), digest)
            chart = release.run(release.CRANE, "digest", f"{address}/charts/switchpoint:{release.version()}")
            self.image(b"two")
            with self.assertRaises(release.Mistake):
                release.publish(self.folder, address)
        image = f"{address}/switchpointd"
        sboms = [f"{self.folder}/switchpointd-{name}.cdx.json {image}@{manifest}" for name, manifest in zip(("amd64", "arm64"), manifests)]
        expected = [
            f"sign --yes --recursive {image}@{digest}",
            *(f"attest --yes --type cyclonedx --predicate {sbom}" for sbom in sboms),
            f"sign --yes --recursive {address}/charts/switchpoint@{chart}",
        ]
        self.assertEqual((self.folder / "signed").read_text().splitlines(), expected * 2)


class Signing(Publishing):
    """Signs with a real cosign. Only the identity differs from that of a release: the test signs with a key, and without a public log."""

    cosign = f'exec {COSIGN} "$@" --key {{folder}}/cosign.key --signing-config {{folder}}/signing.json'

    def setUp(self):
        if not COSIGN.exists():
            print("SKIPPED release: .tools/bin/cosign is missing; `make e2e-long` builds it")
            self.skipTest("no cosign")
        super().setUp()
        self.run_cosign("generate-key-pair")
        (self.folder / "signing.json").write_bytes(self.run_cosign("signing-config", "create").stdout)

    def run_cosign(self, *arguments: str, fails: bool = False) -> subprocess.CompletedProcess:
        done = subprocess.run([COSIGN, *arguments], cwd=self.folder, capture_output=True, check=False)
        self.assertEqual(done.returncode != 0, fails, done.stderr.decode())
        return done

    def verify(self, reference: str, *command: str, **options: bool) -> None:
        self.run_cosign(*(command or ("verify",)), "--key", "cosign.pub", "--insecure-ignore-tlog=true", reference, **options)

    def test_images_and_chart_are_pushed_and_signed_and_never_replaced(self):
        digest, manifests = self.image(b"one")
        with registry(self.folder) as address, contextlib.redirect_stdout(None):
            release.publish(self.folder, address)
            image = f"{address}/switchpointd"
            self.verify(f"{image}:0.1.0")
            for manifest in manifests:
                self.verify(f"{image}@{manifest}")
                self.verify(f"{image}@{manifest}", "verify-attestation", "--type", "cyclonedx")
            self.verify(f"{address}/charts/switchpoint:{release.version()}")
            unsigned = release.run(release.CRANE, "append", "-f", self.folder / "images.json", "-t", f"{address}/other:1")
            self.verify(unsigned.splitlines()[-1], fails=True)

def jobs(text: str) -> dict[str, str]:
    """Returns the jobs of a workflow, in order."""
    parts = re.split(r"(?m)^  (?=[\w-]+:\n)", text.split("\njobs:\n")[1])[1:]
    return {part.partition(":")[0]: part for part in parts}


def scripts(text: str) -> list[str]:
    """Returns the shell scripts of the steps, in order."""
    found = []
    for block in re.finditer(r"(?m)^( +)(?:- )?run: (?:\|\n((?:\1 +.*\n|\n)+)|(.+)\n)", text):
        found.append(block[3] or "".join(line[len(block[1]) + 2 :] + "\n" for line in block[2].splitlines()))
    return found


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
            for title, job in jobs(text).items():
                for key in ("    permissions:", "    timeout-minutes:"):
                    self.assertIn(key, job, f"{name}: {title}")

    def test_programs_exist(self):
        makefile = (release.ROOT / "Makefile").read_text()
        for name, text in self.texts.items():
            for target in re.findall(r"run: make ([\w-]+)", text):
                self.assertTrue(re.search(rf"(?m)^{target}:", makefile), f"{name}: make {target}")
            for script in re.findall(r"python3 (\.ci/\w+\.py)", text):
                self.assertTrue((release.ROOT / script).exists(), f"{name}: {script}")

    def test_scripts_are_valid(self):
        for name, text in self.texts.items():
            found = scripts(text)
            self.assertEqual(len(found), len(re.findall(r"(?m)^ +(?:- )?run: ", text)), name)
            for script in found:
                done = subprocess.run(["bash", "-n"], input=re.sub(r"\$\{\{.*?\}\}", "x", script), capture_output=True, text=True, check=False)
                self.assertEqual((done.returncode, done.stderr), (0, ""), f"{name}: {script}")

    def test_commands_of_release_py_are_known(self):
        name, text = "release.yaml", self.texts["release.yaml"]
        usage = {words[0]: len(words) for words in (line.split("release.py ")[1].split("  ")[0].split() for line in release.__doc__.splitlines() if "release.py " in line)}
        found = re.findall(r"release\.py ((?:(?!\s*[>|]).)+)", "\n".join(scripts(text)))
        self.assertGreaterEqual(len(found), 4, name)
        for command in found:
            words = shlex.split(command)
            self.assertEqual(usage.get(words[0]), len(words), f"{name}: {command}")

    def test_artifacts_are_uploaded_before_they_are_downloaded(self):
        uploaded = set()
        for job in jobs(self.texts["release.yaml"]).values():
            for action, artifact in re.findall(r"uses: actions/(upload|download)-artifact@.*\n\s+with:\s+\{?name: ([\w-]+)", job):
                if action == "upload":
                    uploaded.add(artifact)
                else:
                    self.assertIn(artifact, uploaded)
        self.assertEqual(uploaded, {"release-files", "assets"})

    def test_each_program_of_a_step_is_there(self):
        """A job installs or unpacks what its steps call and the runner lacks."""
        for name, text in self.texts.items():
            for job in jobs(text).values():
                script = "\n".join(scripts(job))
                if re.search(r"\bcosign |release\.py publish", script):
                    self.assertIn("uses: sigstore/cosign-installer@", job, name)
                if ".tools/bin/crane" in script:
                    self.assertIn("uses: actions/download-artifact@", job, name)
                if "cluster_tools.py" in script or re.search(r"make (?:images|test)", script):
                    self.assertIn("uses: actions/setup-go@", job, name)

    def test_the_address_of_the_repository_is_one(self):
        wanted = tomllib.loads((release.ROOT / "Cargo.toml").read_text())["workspace"]["package"]["repository"]
        for file in ("deploy/charts/switchpoint/Chart.yaml", "docs/how-to/install.md"):
            self.assertIn(wanted, (release.ROOT / file).read_text(), file)

    def test_settings_are_described(self):
        for name, text in self.texts.items():
            described = "".join(line for line in text.splitlines() if line.startswith("#"))
            for setting in re.findall(r"\b(?:vars|secrets)\.(\w+)", text):
                self.assertIn(setting, described, name)

    def test_no_registry_is_named(self):
        for name, text in self.texts.items():
            self.assertEqual(re.findall(r"\b(?:ghcr|quay|docker|gcr|pkg)\.(?:io|dev|com)\b", text), [], name)


if __name__ == "__main__":
    unittest.main()
