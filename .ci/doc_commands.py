#!/usr/bin/env python3
"""Checks what readers copy from the documents: commands and quoted texts.

    .ci/doc_commands.py             commands and quotations, without other tools
    .ci/doc_commands.py charts      renders the chart as the pages install it; exits with 3 if .tools/bin/helm is missing
    .ci/doc_commands.py show PAGE   prints the commands of PAGE by heading

`PAGES` lists the checked pages. In a page, a block ```sh holds commands, and a block ```yaml whose first line is `# NAME.yaml` is the
file NAME.yaml of the commands after it. `lay_out` writes the files and commands under a heading into a folder, so that a test on a
cluster runs what the page says. Standard library only.
"""

import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Pages whose commands users copy.
PAGES = ["README.md", "docs/how-to/install.md", "docs/how-to/upgrade.md"]
# The page whose tables quote texts of the programs, in the first column.
QUOTING = "docs/how-to/troubleshooting.md"
# A quotation of another program has the program's name in brackets after the quotation.
FOREIGN = re.compile(r"`[^`]+` \((?:Envoy|Istio|Helm)\)")
# The minimum length of a quotation that is checked, in characters. Shorter quotations, such as a status code, occur everywhere.
QUOTED_CHARACTERS_MIN = 6
HELM = ROOT / ".tools" / "bin" / "helm"
# Exit code for "cannot run on this machine", as in `.ci/cluster_tools.py`.
UNAVAILABLE = 3
# Folders of the repository that a command may name.
FOLDERS = ("deploy/charts/", "envoy-config/", "deploy/images/", "e2e/")
# The entries of the repository that a page's commands find in the folder where they run.
LINKED = ("Makefile", "deploy", "envoy-config", "target")
HELM_COMMANDS = {"install", "upgrade", "template", "rollback", "uninstall", "history", "test", "status", "show", "get", "list", "pull"}
KUBECTL_COMMANDS = {
    "apply", "annotate", "auth", "create", "delete", "describe", "diff", "exec", "get", "label", "logs", "patch", "port-forward", "rollout", "run",
    "scale", "wait",
}


class Block(NamedTuple):
    """A fenced block: its language, heading, line number and text."""

    language: str
    heading: str
    line: int
    text: str


class Section(NamedTuple):
    """The files and the shell commands under one heading."""

    files: dict[str, str]
    script: str


def blocks(text: str) -> list[Block]:
    found, heading, opened = [], "", None
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"\s*```(\w*)", line)
        if fence and opened is None:
            opened = (fence[1], number, [])
        elif fence:
            found.append(Block(opened[0], heading, opened[1] + 1, "\n".join(opened[2]) + "\n"))
            opened = None
        elif opened is not None:
            opened[2].append(line)
        elif line.startswith("#"):
            heading = re.sub(r"[`*]", "", line.lstrip("# ").strip())
    return found


def file_name(block: Block) -> str | None:
    """Returns the name of the file that a block holds, if its first line names one."""
    named = re.match(r"# ([\w.-]+\.ya?ml)\b", block.text) if block.language == "yaml" else None
    return named[1] if named else None


def section(page: str, heading: str) -> Section:
    found = [block for block in blocks((ROOT / page).read_text()) if block.heading == heading]
    files = {file_name(block): block.text for block in found if file_name(block)}
    return Section(files, "".join(block.text for block in found if block.language == "sh"))


def lay_out(page: str, heading: str, folder: pathlib.Path, pause_seconds_max: int = 3600) -> pathlib.Path:
    """Writes the files and the script of a section into a folder that looks like the repository, and returns the script. The script
    stops at the first command that fails, shortens `sleep`, and ends the programs that the script started in the background."""
    part = section(page, heading)
    if not part.script:
        raise ValueError(f"{page} has no commands under the heading {heading!r}")
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for name, content in part.files.items():
        (folder / name).write_text(content)
    script = folder / "commands.sh"
    script.write_text(
        f"set -euo pipefail\ncd {shlex.quote(str(folder))}\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"
        f"sleep() {{ command sleep $(($1 < {pause_seconds_max} ? $1 : {pause_seconds_max})); }}\n{part.script}"
    )
    return script


def commands(script: str) -> list[list[str]]:
    """Returns the simple commands of a script, as words, without variables and pipes to other programs."""
    found = []
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if re.fullmatch(r"[|&;()]+", word):
                if words:
                    found.append(words)
                words = []
            elif words or not re.match(r"\w+=", word):
                words.append(word)
    return found


# === Commands ===


def complaints(page: str, text: str) -> list[str]:
    """Finds commands of a page that name something that does not exist."""
    found, own = [], set()
    for block in blocks(text):
        if file_name(block):
            own.add(file_name(block))
        if block.language != "sh":
            continue
        syntax = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
        if syntax.returncode:
            found.append(f"{page}:{block.line}: {syntax.stderr.strip()}")
            continue
        for words in commands(block.text):
            found += [f"{page}:{block.line}: {' '.join(words)[:60]}: {why}" for why in wrong(words, own)]
    return found


def wrong(words: list[str], own: set[str]) -> list[str]:
    """Returns what is wrong with one command. `own` are files that the page creates."""
    found = []
    if words[0] == "make":
        targets = set(re.findall(r"(?m)^([a-z0-9-]+):(?!=)", (ROOT / "Makefile").read_text()))
        found += [f"no target {word}" for word in words[1:] if "=" not in word and word not in targets]
    if words[0] in ("helm", "kubectl"):
        known = HELM_COMMANDS if words[0] == "helm" else KUBECTL_COMMANDS
        verb = next((word for word in without_options(words[1:]) if word), "")
        if verb not in known:
            found.append(f"no command {verb!r} of {words[0]}")
    for word in words:
        path = word.removeprefix("./").split("=")[-1]
        if path.startswith(FOLDERS) and not (ROOT / path).exists():
            found.append(f"no file {path}")
        if path.startswith("target/release/") and not program_exists(path.rpartition("/")[2]):
            found.append(f"no program {path}")
    for before, word in zip(words, words[1:]):
        if before in ("-f", "--values", "--filename") and not word.startswith(("http", "-", *FOLDERS)) and word not in own:
            found.append(f"no file {word} on the page")
    return found


def without_options(words: list[str]) -> list[str]:
    """Returns the words that are neither an option nor the value of an option."""
    out, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in ("-n", "--namespace"):
            skip = True
        elif not word.startswith("-"):
            out.append(word)
    return out


def program_exists(name: str) -> bool:
    tracked = subprocess.run(["git", "ls-files", f"*/bin/{name}.rs", f"*/bin/{name}/main.rs"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    manifests = (path.read_text() for path in [*ROOT.glob("*/Cargo.toml"), *ROOT.glob("*/*/Cargo.toml")])
    return bool(tracked) or any(re.search(rf'(?m)^name = "{re.escape(name)}"$', text) for text in manifests)


# === Charts ===


def renderings(page: str, text: str) -> list[tuple[int, list[str], dict[str, str]]]:
    """Returns the `helm template` commands that show what the `helm install` and `upgrade` commands of a page create: line, words,
    files."""
    found, files = [], {}
    for block in blocks(text):
        if file_name(block):
            files[file_name(block)] = block.text
        for words in commands(block.text) if block.language == "sh" else []:
            if words[:2] in (["helm", "install"], ["helm", "upgrade"]) and any(word.startswith("deploy/charts/") for word in words):
                found.append((block.line, ["template", *without_waiting(words[2:])], dict(files)))
    return found


def without_waiting(words: list[str]) -> list[str]:
    """Removes the options for a running release, which `helm template` does not know."""
    out, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in ("--timeout", "--version"):
            skip = True
        elif word not in ("--install", "--create-namespace", "--wait", "--reuse-values", "--reset-then-reuse-values"):
            out.append(word)
    return out


def render() -> int:
    """Renders each installation of the pages."""
    if not HELM.exists():
        print("SKIPPED doc_commands: .tools/bin/helm is missing, so the values of the documents were not rendered")
        return UNAVAILABLE
    failed, count = 0, 0
    for page in PAGES:
        for line, words, files in renderings(page, (ROOT / page).read_text()):
            count += 1
            with tempfile.TemporaryDirectory() as folder:
                for name, content in files.items():
                    (pathlib.Path(folder) / name).write_text(content)
                here = [str(ROOT / word) if word.startswith(FOLDERS) else word for word in words]
                done = subprocess.run([HELM, *here], cwd=folder, text=True, capture_output=True, check=False)
            if done.returncode or "kind:" not in done.stdout:
                failed += 1
                print(f"{page}:{line}: helm {' '.join(words)}: {done.stderr.strip()[-600:]}")
    if not count:
        print("no page installs the chart")
        return 1
    print(f"{count - failed} of {count} installations of the documents render")
    return 1 if failed else 0


# === Quotations ===


def quotations(text: str) -> list[tuple[int, str]]:
    """Returns the quoted texts in the first column of the tables, with their line. An ellipsis stands for names and numbers."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("| ") or line.startswith(("| code", "| log line")):
            continue
        cell = FOREIGN.sub("", line.split(" | ")[0])
        for quoted in re.findall(r"`([^`]+)`", cell):
            found += [(number, piece.strip()) for piece in quoted.split("…") if len(piece.strip()) >= QUOTED_CHARACTERS_MIN]
    return found


def sources() -> str:
    """Returns all text that programs print: Rust sources outside tests, and Envoy's configuration."""
    names = subprocess.run(["git", "ls-files", "*/src/*.rs", "envoy-config"], cwd=ROOT, text=True, capture_output=True, check=True).stdout.splitlines()
    texts = [(ROOT / name).read_text() for name in names if "/tests" not in name and (ROOT / name).is_file()]
    return re.sub(r"\\\n\s*", "", "\n".join(texts))


def misquoted(text: str, known: str) -> list[str]:
    # Placeholders of a format string are an ellipsis on the page.
    return [f"{QUOTING}:{number}: no source prints {piece!r}" for number, piece in quotations(text) if piece not in known]


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["charts"]:
        return render()
    if arguments[:1] == ["show"]:
        for block in blocks((ROOT / arguments[1]).read_text()):
            if block.language == "sh":
                print(f"== {block.heading} (line {block.line})\n{block.text}")
        return 0
    found = [line for page in PAGES for line in complaints(page, (ROOT / page).read_text())]
    found += misquoted((ROOT / QUOTING).read_text(), sources())
    print("\n".join(found) or f"the commands of {len(PAGES)} pages and the quotations of {QUOTING} are valid")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
