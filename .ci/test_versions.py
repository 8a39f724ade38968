"""Tests of `.ci/versions.py`, and that all places of the repository have one version. Standard library only."""

import pathlib
import shutil
import tempfile
import unittest

import release
import versions


class Repository(unittest.TestCase):
    def setUp(self):
        self.paths = versions.tracked(release.ROOT)
        self.places = versions.places(release.ROOT, self.paths)

    def test_all_places_have_the_version_of_the_workspace(self):
        wanted = release.version()
        others = [f"{place.path}: {place.found}" for place in self.places if place.found != wanted]
        self.assertEqual(others, [], f"not {wanted}: run .ci/release.py bump {wanted}")

    def test_the_places_are_found(self):
        files = {place.path for place in self.places}
        for path in (
            "Cargo.toml", "Cargo.lock", "filter/fuzz/Cargo.lock", "deploy/charts/switchpoint/Chart.yaml",
            "deploy/charts/tests/golden/istio.yaml", "docs/how-to/install.md", "docs/how-to/istio.md", "deploy/images/README.md",
            "envoy-config/kubernetes/daemon.yaml", "e2e/cluster/images.py",
        ):  # fmt: skip
            self.assertIn(path, files)
        self.assertEqual(len([place for place in self.places if place.path.endswith("Chart.yaml")]), 2)

    def test_a_bump_changes_all_places_and_nothing_else(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            files = {place.path for place in self.places} | {"CHANGELOG.md"}
            for path in files:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(release.ROOT / path, folder / path)
            self.assertEqual(versions.rewrite(folder, sorted(files), "9.8.7"), len(self.places))
            after = versions.places(folder, sorted(files))
            self.assertEqual({place.found for place in after}, {"9.8.7"})
            self.assertEqual(len(after), len(self.places))
            versions.rewrite(folder, sorted(files), release.version())
            for path in files - {"CHANGELOG.md"}:
                self.assertEqual((folder / path).read_text(), (release.ROOT / path).read_text(), path)


class Rules(unittest.TestCase):
    def found(self, path: str, text: str) -> list[str]:
        return [place.found for place in versions.places_in(path, text)]

    def test_crates_of_others_keep_their_version(self):
        own = '[[package]]\nname = "filter"\nversion = "0.1.0"\ndependencies = [\n'
        other = '[[package]]\nname = "unscanny"\nversion = "0.1.0"\nsource = "registry"\n'
        tool = '[[package]]\nname = "filter-fuzz"\nversion = "0.0.0"\n\n'
        self.assertEqual(len(self.found("Cargo.lock", own + other + tool)), 1)

    def test_images_of_others_and_past_releases_keep_theirs(self):
        self.assertEqual(self.found("a.md", "envoy:1.40.0, in 0.1.0, chart 0.1.0"), [])
        self.assertEqual(self.found("a.md", "`switchpoint:0.1.0-artifact`, x/switchpoint-gateway:0.1.1"), ["0.1.0", "0.1.1"])

    def test_the_changelog_gets_a_heading_once(self):
        text = versions.with_heading("## [Unreleased]\n\n## [0.1.0] - 2026-11-25\n", "0.2.0")
        self.assertEqual(text, "## [Unreleased]\n\n## [0.2.0] - unreleased\n\n## [0.1.0] - 2026-11-25\n")
        self.assertEqual(versions.with_heading(text, "0.2.0"), text)


if __name__ == "__main__":
    unittest.main()
