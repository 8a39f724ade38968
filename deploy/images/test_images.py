#!/usr/bin/env python3
"""Tests the images in target/images: pushes them to a real registry process, pulls them, reads them as gateways do, and runs their
programs in them with a read-only root, as user 65532, without capabilities. The programs of another machine's platform run in an
emulator, if deploy/images/cross.py has fetched one.

    .venv/bin/python deploy/images/test_images.py [UNITTEST ARGUMENTS]

`BUILD_ARGUMENTS` in the environment are the arguments with which build.py made the images (for the second build, which must give
the same digests). A test that cannot run here prints `SKIPPED name: why`.
"""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import urllib.error
import urllib.request
from typing import Any

import build
import crane
import cross
import elf
import oci
from debian import USER

ROOT = build.ROOT
BUILD_ARGUMENTS = shlex.split(os.environ.get("BUILD_ARGUMENTS", ""))
OPTIONS = build.options_of(BUILD_ARGUMENTS)
IMAGES = OPTIONS.output
# The time limit of a program in an image. An emulator is ten times slower than the machine.
RUN_SECONDS_MAX = 900
LABELS = ("title", "description", "version", "revision", "created", "licenses")
# Makes $1 a root as Kubernetes does: read-only, with /proc, a few devices, and a writable folder `mounted`, in mount, network and
# process namespaces of its own. Then it runs the script $2, in which `inside` runs `command` in that root by way of $3. The kernel
# runs programs of other machines in that user namespace by the rule $4, if it is not empty.
INSIDE = """
set -eu
root=$1 enter=$3 rule=$4
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
if [ -n "$rule" ]; then
  mount -t binfmt_misc binfmt_misc "$root/proc/sys/fs/binfmt_misc"
  printf %s "$rule" > "$root/proc/sys/fs/binfmt_misc/register"
fi
mount -t tmpfs tmpfs "$root/dev"
if mknod -m 666 "$root/dev/null" c 1 3 2>&-; then
  mknod -m 666 "$root/dev/random" c 1 8; mknod -m 666 "$root/dev/urandom" c 1 9
  mkdir -m 1777 "$root/dev/shm"
else  # A user namespace cannot make devices.
  mount --rbind /dev "$root/dev"
fi
mount -t tmpfs -o mode=1777 tmpfs "$root/mounted"
mount -o remount,bind,ro "$root"
python3 -c 'import fcntl, socket, struct
with socket.socket() as any: fcntl.ioctl(any, 0x8914, struct.pack("16sh", b"lo", 1))'
background() { exec env -i PATH=/usr/local/bin:/usr/bin:/bin "$@" $enter "$root" "${command[@]}"; }
inside() { (background "$@"); }
answers() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
eventually() { for _ in $(seq 3000); do "$@" && return; sleep 0.1; done; echo "never: $*" >&2; return 1; }
eval "$2"
"""


def images() -> list[build.Built]:
    return build.last(OPTIONS)


def image_named(name: str) -> build.Built:
    return next(image for image in images() if image.name == name)


def containers() -> list[build.Built]:
    return [image for image in images() if image.name != build.ARTIFACT]


def container_manifests() -> list[tuple[build.Built, build.Manifest]]:
    return [(image, manifest) for image in containers() for manifest in image.manifests]


def all_manifests() -> list[tuple[build.Built, build.Manifest]]:
    return [(image, manifest) for image in images() for manifest in image.manifests]


class Registry:
    """The registry's HTTP interface, as gateways use it."""

    def __init__(self, address: str):
        self.address = address

    def get(self, path: str, accept: str = "*/*") -> bytes:
        request = urllib.request.Request(f"http://{self.address}/v2/{path}", headers={"accept": accept})
        with urllib.request.urlopen(request, timeout=RUN_SECONDS_MAX) as reply:
            return reply.read()

    def manifest_bytes(self, repository: str, reference: str) -> bytes:
        return self.get(f"{repository}/manifests/{reference}", f"{oci.INDEX}, {oci.MANIFEST}")

    def manifest(self, repository: str, reference: str) -> dict[str, Any]:
        return json.loads(self.manifest_bytes(repository, reference))

    def chosen(self, repository: str, reference: str) -> str:
        """Returns the digest of the manifest that Istio's agent and Envoy Gateway choose. From an index they always choose linux/amd64."""
        data = self.manifest_bytes(repository, reference)
        found = json.loads(data)
        if found["mediaType"] != oci.INDEX:
            return oci.digest_of(data)
        return next(row["digest"] for row in found["manifests"] if row["platform"] == {"os": "linux", "architecture": "amd64"})

    def blob(self, repository: str, digest: str) -> bytes:
        data = self.get(f"{repository}/blobs/{digest}")
        assert oci.digest_of(data) == digest
        return data

    def layer(self, repository: str, descriptor: dict[str, Any]) -> tarfile.TarFile:
        return tarfile.open(fileobj=io.BytesIO(self.blob(repository, descriptor["digest"])), mode="r:gz")

    def module_of_image(self, repository: str, reference: str) -> bytes:
        """Returns the module as Istio's agent and Envoy Gateway read it from an OCI image: the first file with the base name plugin.wasm
        in the last layer, which must have OCI's media type of a gzipped tar."""
        layer = self.manifest(repository, self.chosen(repository, reference))["layers"][-1]
        if layer["mediaType"] != oci.GZIP_LAYER:
            raise ValueError(f"invalid media type {layer['mediaType']}")
        with self.layer(repository, layer) as archive:
            for member in archive:
                if member.name.rpartition("/")[2] == "plugin.wasm":
                    # Gateways read as many bytes as the header says, so a link would give an empty module.
                    file_of = archive.extractfile(member) if member.isreg() else None
                    return file_of.read(member.size) if file_of else b""
        raise ValueError("plugin.wasm not found in the archive")

    def module_of_artifact(self, repository: str, reference: str) -> bytes:
        """Returns the module as both gateways read it from an artifact: exactly two layers, one of them the raw module."""
        layers = self.manifest(repository, self.chosen(repository, reference))["layers"]
        if len(layers) != 2:
            raise ValueError(f"number of layers must be 2 but got {len(layers)}")
        for layer in layers:
            if layer["mediaType"] == oci.WASM_LAYER:
                return self.blob(repository, layer["digest"])
        raise ValueError(f"could not find the layer of type {oci.WASM_LAYER}")

    def fetched(self, repository: str, reference: str) -> bytes:
        """Tries the forms in the order that both gateways use: an image, then an artifact."""
        try:
            return self.module_of_image(repository, reference)
        except ValueError:
            return self.module_of_artifact(repository, reference)

    def pinned(self, repository: str, digest: str) -> bytes:
        """Returns the module of a pinned image. Gateways compare a pinned digest with the digest of the chosen manifest, so an index's
        digest never matches."""
        chosen = self.chosen(repository, digest)
        if chosen != digest:
            raise ValueError(f"has checksum {chosen}, which does not match: {digest}")
        return self.fetched(repository, digest)


def files_of(registry: Registry, repository: str, digest: str) -> dict[str, bytes]:
    """Returns the regular files of an image by their paths."""
    found = {}
    for layer in registry.manifest(repository, digest)["layers"]:
        with registry.layer(repository, layer) as archive:
            found |= {member.name: archive.extractfile(member).read() for member in archive if member.isreg()}
    return found


STACK = contextlib.ExitStack()


def setUpModule() -> None:
    """Pushes all images to one registry process, which ends with the tests."""
    unittest.addModuleCleanup(STACK.close)
    WithRegistry.crane, address = STACK.enter_context(crane.registry(OPTIONS.crane))
    WithRegistry.registry = Registry(address)
    options = build.options_of([*BUILD_ARGUMENTS, "--push", address])
    with contextlib.redirect_stdout(None):
        build.push(options, images())


class WithRegistry(unittest.TestCase):
    registry: Registry
    crane: crane.Crane


class Pushed(WithRegistry):
    def test_tag_and_digest_name_the_same_manifest(self):
        for image in images():
            by_tag = self.registry.manifest_bytes(image.repository, image.tag)
            by_digest = self.registry.manifest_bytes(image.repository, image.digest)
            self.assertEqual(by_tag, by_digest)
            self.assertEqual(oci.digest_of(by_tag), image.digest)

    def test_the_index_lists_every_platform(self):
        for image in containers():
            self.assertEqual([manifest.platform for manifest in image.manifests], OPTIONS.platform)
            found = self.registry.manifest(image.repository, image.tag)
            if len(OPTIONS.platform) == 1:
                self.assertEqual((found["mediaType"], image.manifests[0].digest), (oci.MANIFEST, image.digest))
                continue
            self.assertEqual(found["mediaType"], oci.INDEX)
            listed = {f"{row['platform']['os']}/{row['platform']['architecture']}": row["digest"] for row in found["manifests"]}
            self.assertEqual(listed, {manifest.platform: manifest.digest for manifest in image.manifests})

    def test_crane_finds_every_image_valid(self):
        for image in containers():
            for digest in {image.digest, *(manifest.digest for manifest in image.manifests)}:
                with self.subTest(image.name):
                    self.crane.run("validate", "--remote", f"{self.registry.address}/{image.repository}@{digest}")

    def test_configuration(self):
        for image, one in container_manifests():
            with self.subTest(one.name):
                manifest = self.registry.manifest(image.repository, one.digest)
                config = json.loads(self.registry.blob(image.repository, manifest["config"]["digest"]))
                self.assertEqual(f"{config['os']}/{config['architecture']}", one.platform)
                # A kubelet with runAsNonRoot refuses users that are names.
                self.assertEqual(config["config"]["User"], f"{USER}:{USER}")
                for label in LABELS:
                    self.assertTrue(config["config"]["Labels"][f"org.opencontainers.image.{label}"], label)
                self.assertEqual(config["config"]["Labels"]["org.opencontainers.image.title"], image.name)
                self.assertEqual(len(config["rootfs"]["diff_ids"]), len(manifest["layers"]))

    def test_programs_are_for_their_platform(self):
        for image, one in container_manifests():
            machines = {}
            for path, data in files_of(self.registry, image.repository, one.digest).items():
                if found := elf.read(data):
                    machines[path] = f"linux/{found.machine}"
            self.assertTrue(machines, one.name)
            self.assertEqual({path: machine for path, machine in machines.items() if machine != one.platform}, {}, one.name)

    def test_entrypoints(self):
        expected = {
            "switchpointd": ["/usr/local/bin/switchpointd"],
            "switchpoint-worker": ["/usr/local/bin/switchpointd", "register"],
            "switchpoint-gateway": ["/usr/local/bin/start.sh"],
            "switchpoint": ["/bin/cp"],
        }
        for name, entrypoint in expected.items():
            for one in image_named(name).manifests:
                config = self.registry.blob(name, self.registry.manifest(name, one.digest)["config"]["digest"])
                self.assertEqual(json.loads(config)["config"]["Entrypoint"], entrypoint)

    def test_files_belong_to_root_and_only_tmp_is_writable(self):
        for image, one in container_manifests():
            for layer in self.registry.manifest(image.repository, one.digest)["layers"]:
                self.assertEqual(layer["mediaType"], oci.GZIP_LAYER)
                with self.registry.layer(image.repository, layer) as archive:
                    members = archive.getmembers()
                self.assertEqual({(member.uid, member.gid, member.mtime) for member in members}, {(0, 0, 0)})
                self.assertEqual([member.name for member in members], sorted(member.name for member in members))
                # No file may run with other rights than those of the user who starts it.
                self.assertEqual([member.name for member in members if member.isreg() and member.mode & 0o6000], [])
                writable = {member.name for member in members if member.mode & 0o022 and not member.issym()}
                self.assertLessEqual(writable, {"tmp"})

    def test_every_layer_of_the_worker_is_one_of_the_daemon(self):
        daemon, worker = (image_named(name) for name in ("switchpointd", "switchpoint-worker"))
        for one, other in zip(daemon.manifests, worker.manifests, strict=True):
            has, needs = (self.registry.manifest(image.repository, digest)["layers"] for image, digest in ((daemon, one.digest), (worker, other.digest)))
            self.assertEqual(needs, has[: len(needs)])


class Module(WithRegistry):
    def module(self) -> bytes:
        return (OPTIONS.module or ROOT / "target/wasm32-wasip1/release/switchpoint.wasm").read_bytes()

    def test_istio_and_envoy_gateway_find_it_in_the_image(self):
        image = image_named("switchpoint")
        for reference in (image.tag, image.digest, *(one.digest for one in image.manifests)):
            self.assertEqual(self.registry.module_of_image("switchpoint", reference), self.module())

    def test_a_pinned_digest_is_that_of_a_manifest(self):
        image, artifact = image_named("switchpoint"), image_named(build.ARTIFACT)
        for digest in (artifact.digest, *(one.digest for one in image.manifests)):
            self.assertEqual(self.registry.pinned("switchpoint", digest), self.module())
        if len(image.manifests) > 1:
            with self.assertRaisesRegex(ValueError, "does not match"):
                self.registry.pinned("switchpoint", image.digest)

    def test_all_platforms_have_the_same_layer_with_the_module(self):
        layers = {self.registry.manifest("switchpoint", one.digest)["layers"][-1]["digest"] for one in image_named("switchpoint").manifests}
        self.assertEqual(len(layers), 1)

    def test_istio_and_envoy_gateway_find_it_in_the_artifact(self):
        image = image_named(build.ARTIFACT)
        for reference in (image.tag, image.digest):
            self.assertEqual(self.registry.fetched("switchpoint", reference), self.module())
            with self.assertRaises(ValueError):
                self.registry.module_of_image("switchpoint", reference)

    def test_the_reader_refuses_an_image_without_the_module(self):
        with self.assertRaises(ValueError):
            self.registry.fetched("switchpointd", image_named("switchpointd").tag)

    def test_cp_is_in_an_earlier_layer(self):
        for one in image_named("switchpoint").manifests:
            names = []
            for layer in self.registry.manifest("switchpoint", one.digest)["layers"]:
                with self.registry.layer("switchpoint", layer) as archive:
                    names.append(archive.getnames())
            self.assertIn("bin/cp", names[0])
            self.assertEqual(names[-1], ["plugin.wasm", "switchpoint.wasm"])


class Sboms(WithRegistry):
    def sbom(self, manifest: build.Manifest) -> dict[str, Any]:
        return json.loads((IMAGES / f"{manifest.name}.cdx.json").read_bytes())

    def test_the_registry_lists_it_as_the_referrer(self):
        for image, one in all_manifests():
            with self.subTest(one.name):
                try:
                    index = json.loads(self.registry.get(f"{image.repository}/referrers/{one.digest}"))
                except urllib.error.HTTPError:
                    # A registry without the interface for referrers has the list under a tag.
                    index = self.registry.manifest(image.repository, one.digest.replace(":", "-"))
                found = [row for row in index["manifests"] if row.get("artifactType") == oci.CYCLONEDX]
                self.assertEqual(len(found), 1, index)
                manifest = self.registry.manifest(image.repository, found[0]["digest"])
                self.assertEqual(manifest["subject"]["digest"], one.digest)
                text = self.registry.blob(image.repository, manifest["layers"][0]["digest"])
                self.assertEqual(text, (IMAGES / f"{one.name}.cdx.json").read_bytes())

    def test_every_component_is_listed_once_with_its_package_url(self):
        for _, one in all_manifests():
            value = self.sbom(one)
            self.assertEqual((value["bomFormat"], value["specVersion"]), ("CycloneDX", "1.6"))
            self.assertEqual(value["metadata"]["component"]["hashes"][0]["content"], one.digest.removeprefix("sha256:"))
            references = [component["bom-ref"] for component in value["components"]]
            self.assertEqual(len(references), len(set(references)))
            for component in value["components"]:
                self.assertTrue(component["name"] and component["version"])
                self.assertRegex(component["purl"], r"^pkg:(cargo|deb|generic|pypi)/")
            image = value["metadata"]["component"]["bom-ref"]
            (listed,) = (row["dependsOn"] for row in value["dependencies"] if row["ref"] == image)
            self.assertEqual(sorted(listed), sorted(references))

    def test_it_names_what_the_image_has(self):
        for image, one in container_manifests():
            names = {component["name"]: component["version"] for component in self.sbom(one)["components"]}
            files = files_of(self.registry, image.repository, one.digest)
            for path, data in files.items():
                if path.startswith("var/lib/dpkg/status.d/"):
                    fields = dict(line.split(": ", 1) for line in data.decode().splitlines() if ": " in line[:30])
                    self.assertEqual(names.get(fields["Package"]), fields["Version"], f"{one.name}: {path}")
                    self.assertIn(fields["Architecture"], (one.platform.removeprefix("linux/"), "all"), f"{one.name}: {path}")
            daemon = image.name in ("switchpointd", "switchpoint-worker")
            self.assertEqual("rustls" in names, daemon)
            self.assertEqual("envoy" in names, image.name == "switchpoint-gateway")
            self.assertEqual("proxy-wasm" in names, image.name in ("switchpoint", "switchpoint-gateway"))


class Programs:
    """Runs programs of the pulled images of one architecture."""

    architecture: str

    @classmethod
    def setUpClass(cls) -> None:
        cls.emulated = cls.architecture != cross.host()
        # A rule of the kernel for programs of another machine belongs to a user namespace, which has only root here.
        cls.is_root = os.geteuid() == 0 and not cls.emulated
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.folder.chmod(0o755)
        cls.namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
        if not cls.is_root:
            cls.namespaces += ["--user", "--map-root-user"]
        tried = subprocess.run([*cls.namespaces, "true"], capture_output=True, text=True, check=False) if shutil.which("unshare") else None
        cls.unable = "unshare is missing" if tried is None else f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""
        if f"linux/{cls.architecture}" not in OPTIONS.platform:
            cls.unable = f"no images for linux/{cls.architecture} are built"
        elif cls.emulated and not cross.emulator(cls.architecture).exists():
            cls.unable = f"no emulator for linux/{cls.architecture}"

    def manifest(self, name: str) -> build.Manifest:
        return next(one for one in image_named(name).manifests if one.platform == f"linux/{self.architecture}")

    def root(self, name: str) -> pathlib.Path:
        """Returns the file system of an image, pulled by digest, with the folders that a container runtime adds."""
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            archive = self.folder / f"{name}.tar"
            self.crane.run("export", f"{self.registry.address}/{name}@{self.manifest(name).digest}", str(archive))
            subprocess.run(["tar", "-xpf", archive, "-C", folder], check=True)
            for mounted in ("proc", "dev", "mounted"):
                (folder / mounted).mkdir()
        return folder

    def skip(self, why: str) -> None:
        print(f"SKIPPED {self.id().partition('.')[2]}: {why}")
        self.skipTest(why)

    def run_in(self, name: str, script: str) -> str:
        """Runs a script of bash beside the image's root: `command=(...); inside` runs a command in it. Returns what both print."""
        if self.unable:
            self.skip(self.unable)
        # A test that does not run as root has only root in its user namespace. Then the test drops the capabilities, but cannot change the
        # user.
        chroot = shutil.which("chroot", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or "chroot"
        user = f"{chroot} --userspec={USER}:{USER} --groups=" if self.is_root else chroot
        setpriv = shutil.which("setpriv")
        enter = f"{setpriv} --no-new-privs {user}" if setpriv else user
        rule = cross.kernel_rule(self.architecture) if self.emulated else ""
        done = subprocess.run(
            [*self.namespaces, "bash", "-c", INSIDE, "inside", self.root(name), script, enter, rule],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_SECONDS_MAX, check=False,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def version(self, name: str, program: str) -> str:
        return self.run_in(name, f"command=(/usr/local/bin/{program} --version); inside")

    def test_every_binary_finds_its_libraries(self):
        version = image_named("switchpointd").tag if not OPTIONS.tag else build.source_of("").version
        self.assertIn(f"switchpointd {version}", self.version("switchpointd", "switchpointd"))
        self.assertIn(f"switchpoint-migrate {version}", self.version("switchpointd", "switchpoint-migrate"))
        self.assertIn(f"switchpointd {version}", self.version("switchpoint-worker", "switchpointd"))
        sbom = IMAGES / f"{self.manifest('switchpoint-gateway').name}.cdx.json"
        envoy = next(row for row in json.loads(sbom.read_bytes())["components"] if row["name"] == "envoy")
        self.assertIn(f"/{envoy['version']}/", self.version("switchpoint-gateway", "envoy"))
        if any(image.name == "switchpoint-model-server" for image in images()):
            self.run_in("switchpoint-model-server", "command=(/usr/local/bin/model-server --help); inside")

    def test_the_root_is_read_only_and_the_user_has_no_capabilities(self):
        script = "command=(/bin/bash -c 'echo >/file; echo $?; grep CapEff /proc/self/status; echo $UID'); inside"
        out = self.run_in("switchpoint-gateway", script)
        self.assertIn("Read-only file system", out)
        if self.is_root:
            self.assertIn("CapEff:\t0000000000000000", out)
            self.assertEqual(out.splitlines()[-1], str(USER))

    def test_the_daemon_serves_and_ends(self):
        out = self.run_in(
            "switchpointd",
            """
            command=(/usr/local/bin/switchpointd serve --endpoint 127.0.0.1:1 --snapshot-file /mounted/state.json); background & daemon=$!
            eventually answers 9090; eventually answers 9004
            kill -TERM $daemon; wait $daemon; ls -l "$root/mounted"
            """,
        )
        self.assertIn("state.json", out)

    def test_the_worker_registers(self):
        out = self.run_in(
            "switchpoint-worker",
            """
            command=(/usr/local/bin/switchpointd register --directory /mounted --namespace n --component c --address 127.0.0.1:1 --listen 127.0.0.1:8080)
            background & worker=$!
            eventually answers 8080
            exec 3<>/dev/tcp/127.0.0.1/8080; printf 'GET /health HTTP/1.1\\r\\nhost: worker\\r\\nconnection: close\\r\\n\\r\\n' >&3; cat <&3
            kill -TERM $worker; wait $worker
            """,
        )
        self.assertIn("HTTP/1.1 200", out)

    def test_the_gateway_starts_and_drains(self):
        out = self.run_in(
            "switchpoint-gateway",
            """
            command=(/bin/bash -c 'cd /gateway && exec /usr/local/bin/start.sh -c envoy-config/standalone.yaml --concurrency 1 -l warning')
            background DRAIN_SECONDS=1 & gateway=$!
            eventually answers 9901; eventually answers 8080
            kill -TERM $gateway; wait $gateway
            """,
        )
        self.assertIn("start.sh: draining for 1 s", out)
        self.assertNotIn("no answer from the admin port", out)
        self.assertNotIn("requests under way", out)
        # Envoy logs a critical error for a file that Envoy cannot load.
        self.assertNotIn("[critical]", out)

    def test_an_init_container_copies_the_module(self):
        # The command of kubernetes/sidecar.yaml, with another folder.
        out = self.run_in("switchpoint", 'command=(cp /switchpoint.wasm /mounted/switchpoint.wasm); inside; sha256sum "$root/mounted/switchpoint.wasm"')
        module = oci.manifest_of(IMAGES / build.ARTIFACT)["layers"][1]["digest"]
        self.assertIn(module.removeprefix("sha256:"), out)


class Running(Programs, WithRegistry):
    """Runs the programs of this machine's platform."""

    architecture = cross.host()


class Emulated(Programs, WithRegistry):
    """Runs the programs of the other platform, in an emulator."""

    architecture = next(name for name in build.ARCHITECTURES if name != cross.host())

    def test_the_gateway_starts_and_drains(self):
        """Envoy compiles the module with V8, which took more than 15 minutes in an emulator. `--version` of this Envoy runs."""
        self.skip("the gateway is not started in an emulator")


class Again(unittest.TestCase):
    def test_a_second_build_gives_the_same_digests(self):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, ROOT / "deploy/images/build.py", *BUILD_ARGUMENTS, "--output", folder, "--push", ""]
            command += [] if OPTIONS.debs else ["--debs", IMAGES / "debian"]
            # Other permissions of new files and another time zone must not matter.
            done = subprocess.run(command, env=os.environ | {"TZ": "Asia/Tokyo"}, umask=0o077, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            again = json.loads((pathlib.Path(folder) / "images.json").read_text())
            self.assertEqual({row["name"]: row["digest"] for row in again}, {image.name: image.digest for image in images()})
            for _, one in all_manifests():
                file = f"{one.name}.cdx.json"
                self.assertEqual(hashlib.sha256((pathlib.Path(folder) / file).read_bytes()).digest(), hashlib.sha256((IMAGES / file).read_bytes()).digest())


if __name__ == "__main__":
    unittest.main()
