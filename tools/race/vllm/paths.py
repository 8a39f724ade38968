"""Folders that all parts share, and the versions of the programs."""

import os
import pathlib
import tomllib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[3]
HERE = pathlib.Path(__file__).resolve().parent
VERSIONS = ROOT / "tools/race/versions.toml"
# The folder with a virtual environment for each program.
TOOLS = ROOT / ".tools/race"
OUT = ROOT / "target/race"
RESULTS = OUT / "vllm.json"
LOGS = OUT / "vllm"
PAGE = ROOT / "docs/reference/race-vllm.md"
# The folder with recorded answers of vLLM, for the tests.
RECORDED = ROOT / "tools/testbed/data/vllm-0.32"
GOLDEN = ROOT / "crates/exchange/tests/golden/responses/vllm-0.32.txt"
MODEL = TOOLS / "models/smollm2"
# The model of Dynamo's mocker, which has a tokenizer and no weights.
WORDS_MODEL = TOOLS / "models/words"
ADAPTERS = TOOLS / "models/adapters"
# The folder with the binaries. SWITCHPOINT_TARGET names another folder if the binaries are built elsewhere.
TARGET = pathlib.Path(os.environ.get("SWITCHPOINT_TARGET", ROOT / "target")).resolve()


class Skipped(Exception):
    """This machine cannot run the part. The message says why."""


def versions() -> dict[str, dict[str, Any]]:
    return tomllib.loads(VERSIONS.read_text())


def python(tool: str) -> pathlib.Path:
    return TOOLS / tool / "bin/python"


def program(tool: str, name: str) -> pathlib.Path:
    return TOOLS / tool / "bin" / name
