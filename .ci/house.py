#!/usr/bin/env python3
"""Counts what makes the code hard to read, and holds the counts to limits.

    .ci/house.py report                   all counts, as text
    .ci/house.py json FILE                all counts, as JSON
    .ci/house.py compare BEFORE AFTER     two JSON files as a Markdown table
    .ci/house.py sample --seed N --count N --kind comments|docs [--revision R]
                                          sentences drawn at random, with their place
    .ci/house.py check                    fails where a count is above its limit

An import cycle is a set of files that reach each other by imports. A name that a module re-exports counts for the file that
defines it. `check` counts cycles without the re-exports themselves (`pub use`); `report` prints the sizes of all cycles, without
and with them.

The program reads the files that git tracks. Generated code (`gen/`) and data are left out. Standard library only.
"""

import collections
import functools
import json
import pathlib
import random
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# The commit after which `check` checks the subjects of commits.
SUBJECTS_SINCE = "178d498"
SUBJECT_CHARACTERS_MAX = 72
COMMENT_COLUMNS_MAX = 100
MARKDOWN_COLUMNS_MAX = 120
FUNCTION_LINES_MAX = 70
# Tests may be longer than other functions, because tests are tables of cases more often than steps.
TEST_LINES_MAX = 210
FILE_LINES_MAX = 500
FIELDS_MAX = 12
CYCLE_FILES_MAX = 3
HOW_TO_LINES_MAX = 150
README_LINES_MAX = 149
# All tracked Markdown files, by the count of `words`: code blocks, tables and generated pages count too, and each part of a name
# such as `flow_control` is a word. A reader cannot keep more in view; who adds a page shortens another. 400 words are for KV events
# and the native module.
DOCUMENT_WORDS_MAX = 45_400
# The measured results that the pages show (`docs/data`), in bytes. A release publishes them; raw results stay in `target`.
RESULT_BYTES_MAX = 300_000
# All data files, in bytes: the results, two public traces (307 KB, compressed) and recorded answers of vLLM. Tests read the traces and
# the answers, and must run without a network.
DATA_BYTES_MAX = 600_000

# Type names that several crates may define, because every Rust programmer expects them.
CONVENTIONS = {"Args", "Command", "Config", "Error", "Kind", "Metrics", "Result", "Settings", "State", "Status"}

# Documents whose code spans must name what exists.
CONTRIBUTORS = ["ARCHITECTURE.md", "CONTRIBUTING.md"]

# Phrases that a reader stumbles over, and what to write instead. Counted in comments, strings and documents.
PHRASES = {
    r"\bnobody\b": "no endpoint, no client, none",
    r"\bsomebody\b": "a client, another process",
    r"\banybody\b": "any endpoint",
    r"\beverybody\b": "all endpoints",
    r"\bwhoever\b": "the caller, the client",
    r"\bwhom\b": "the endpoint that",
    r"\banew\b": "again",
    r"\b(is|are|was|were|be|been) told\b": "receives",
    r"\b(tells?|telling) (of|it|them|that|what|who|apart)\b": "reports",
    r"\bfor people\b": "for display, for operators",
    r"\bof which\b": "two sentences",
    r"\basked for\b": "requested",
    r"\bis heard\b|\bare heard\b|\bheard of\b": "received",
    r"\bis not to be had\b|\bto be had\b": "unavailable",
    r"\bmoreover\b|\bhence\b|\blest\b": "and, so",
    r"\b(thereof|therein|whereupon|whence)\b": "of it, in it",
    r"\bin vain\b": "without effect",
    r"\bbut for\b": "except",
    r"\bdo(es)? well\b": "succeeds, is good",
    r"\bput(s|ting)? out\b": "generates",
    r"\bunder way\b": "in flight, running",
    r"\bgoes by\b": "is named, follows",
    r"\bthat (is|are) none\b": "invalid",
}

ANY_PHRASE = re.compile("|".join(PHRASES), re.IGNORECASE)

# Beginnings of docstrings that leave the reader without a subject, and what to write instead.
BEGINNINGS = {
    r"(It|Its|They|Their|Them|Those)\b": "the noun",
    r"(Did|Do|Does|Is|Are|Has|Have|Was|Were|Can)\b[^.]*\?": "Whether ...",
    r"What (it|he|this|that|a|an|the|one|each|every|some)\b": "the noun, or a verb: Measures ...",
    r"Of (which|what|whom|whose|a|the|those|these)\b": "a sentence",
    r"Who(se|m)?\b": "Finds the endpoints ...",
}

# Folders whose subfolders are crates.
GROUPS = ("crates", "tools")

# The limits of `check`.
LIMITS = {
    "import cycles of more than 3 files": 0,
    "type names defined more than once": 0,
    "phrases": 0,
    "functions over 70 lines": 0,
    "test functions over 210 lines": 0,
    "vague names": 0,
    "assignments of tuples": 0,
    "tuples as parameters": 0,
    "comment lines over 100 columns": 0,
    "Markdown lines over 120 columns": 0,
    "how-to pages over 150 lines, README over 149": 0,
    "words of documents over 45,400": 0,
    "data files over their maximum of bytes": 0,
    "structs over 12 fields without a reason": 0,
    "files over 500 lines before tests": 0,
    "names in documents for contributors that do not exist": 0,
    "commit subjects": 0,
}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, text=True, capture_output=True, check=True).stdout


class Tree:
    """The tracked files of the work tree, or of a revision."""

    def __init__(self, revision: str | None = None):
        self.revision = revision
        names = git("ls-tree", "-r", "--name-only", revision) if revision else git("ls-files")
        self.names = [name for name in names.splitlines() if "/gen/" not in name]
        self.texts: dict[str, str] = {}

    def text(self, name: str) -> str:
        if name not in self.texts:
            if self.revision:
                raw = subprocess.run(["git", "show", f"{self.revision}:{name}"], cwd=ROOT, capture_output=True, check=True).stdout
            else:
                path = ROOT / name
                raw = path.read_bytes() if path.is_file() else b""
            self.texts[name] = raw.decode(errors="replace")
        return self.texts[name]

    def size(self, name: str) -> int:
        """Returns the size of a file, in bytes."""
        if self.revision:
            return int(git("cat-file", "-s", f"{self.revision}:{name}"))
        path = ROOT / name
        return path.stat().st_size if path.is_file() else 0

    def rust(self) -> list[str]:
        return [name for name in self.names if name.endswith(".rs")]

    def markdown(self) -> list[str]:
        return [name for name in self.names if name.endswith(".md")]


def crate_of(name: str) -> str:
    """Returns the folder of a file's crate, such as `crates/scheduler`."""
    parts = name.split("/")
    return "/".join(parts[: 2 if parts[0] in GROUPS else 1])


# === Rust source, coarsely ===

STRING = r'b?"(?:[^"\\]|\\.)*"|b?r(?P<fence>#*)".*?"(?P=fence)'
TOKEN = re.compile(rf"(?s)(//[^\n]*|/\*.*?\*/)|({STRING})|'(?:[^'\\]|\\.[^']*)'")


@functools.cache
def split(text: str) -> tuple[str, list[tuple[int, str]], list[str]]:
    """Returns the code without comments and strings (line breaks stay), the comments with their line, and the strings."""
    comments, strings = [], []

    def blank(match: re.Match) -> str:
        if match[1] is not None:
            comments.append((text.count("\n", 0, match.start()) + 1, match[1]))
        elif match[2] is not None:
            strings.append(match[2])
        return re.sub(r"[^\n]", " ", match[0]) if match[1] is not None else '""' + "\n" * match[0].count("\n")

    return TOKEN.sub(blank, text), comments, strings


TEST_MODULE = re.compile(r"#\[cfg\((?:all\()?test[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([a-z]+\))? )?mod \w+ ?\{")


def before_tests(code: str) -> str:
    """Returns the code before the first module under `#[cfg(test)]`."""
    found = TEST_MODULE.search(code)
    return code[: found.start()] if found else code


def without_tests(code: str) -> str:
    """Returns the code without modules under `#[cfg(test)]`."""
    out, at = [], 0
    for match in TEST_MODULE.finditer(code):
        if match.start() < at:
            continue
        out.append(code[at : match.start()])
        at = block_end(code, match.end() - 1)
    out.append(code[at:])
    return "".join(out)


def flat_modules(code: str) -> str:
    """Replaces `super::` in inline modules by `self::`, because both name this file."""
    for match in list(re.finditer(r"\bmod \w+ ?\{", code)):
        end = block_end(code, match.end() - 1)
        code = code[: match.end()] + re.sub(r"\bsuper::", "self::", code[match.end() : end]) + code[end:]
    return code


BRACE = re.compile(r"[{}]")


def block_end(code: str, opening: int) -> int:
    """Returns the position after the block that opens at `opening`."""
    depth = 0
    for brace in BRACE.finditer(code, opening):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.end()
    return len(code)


# === Import cycles ===


def modules_of(tree: Tree, crate: str) -> dict[tuple[str, ...], str]:
    """Maps module paths to files, for the library or the only binary of a crate."""
    modules = {}
    for name in tree.rust():
        if not name.startswith(f"{crate}/src/") or name.startswith(f"{crate}/src/bin/"):
            continue
        path = name.removeprefix(f"{crate}/src/").removesuffix(".rs").split("/")
        if path[-1] in ("tests",) or "tests" in path:
            continue
        modules[() if path == ["lib"] else tuple(part for part in path if part != "mod")] = name
    return modules


USE = re.compile(r"\b(pub(?:\([a-z ]+\))? )?use ([^;]+);")
MENTION = re.compile(r"\b(crate|super|self)((?:::\w+)+)")


def leaves(text: str, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Returns the paths that a `use` tree names."""
    text = text.strip()
    brace = text.find("{")
    if brace < 0:
        return [prefix + tuple(part.strip() for part in re.sub(r" as \w+", "", text).split("::") if part.strip())]
    head = prefix + tuple(part.strip() for part in text[:brace].split("::") if part.strip())
    paths, depth, start = [], 0, brace + 1
    for at in range(brace, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if (text[at] == "," and depth == 1) or (text[at] == "}" and depth == 0):
            if text[start:at].strip():
                paths += leaves(text[start:at], head)
            start = at + 1
    return paths


def import_edges(tree: Tree, crate: str, re_exports: bool = False) -> dict[str, set[str]]:
    """Maps each file to the files that it imports. A name that a module re-exports counts for the file that defines it. With
    `re_exports`, also the file that re-exports a name has an edge to the file that defines the name."""
    modules = modules_of(tree, crate)
    codes = {path: flat_modules(without_tests(split(tree.text(name))[0])) for path, name in modules.items()}
    exports: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {path: {} for path in modules}
    globs: dict[tuple[str, ...], list[tuple[str, ...]]] = {path: [] for path in modules}

    def absolute(module: tuple[str, ...], path: tuple[str, ...]) -> tuple[str, ...] | None:
        path = list(path)
        if not path:
            return None
        if path[0] == "crate":
            return tuple(path[1:])
        base = list(module)
        if path[0] == "self":
            path = path[1:]
        elif path[0] == "super":
            while path and path[0] == "super":
                base, path = base[:-1], path[1:]
        elif tuple(module) + (path[0],) not in modules:
            return None
        return tuple(base) + tuple(path)

    imports: dict[tuple[str, ...], set[tuple[str, ...]]] = {path: set() for path in modules}
    for module, code in codes.items():
        for match in USE.finditer(code):
            for path in leaves(match[2]):
                target = absolute(module, path)
                if target is None:
                    continue
                if match[1]:
                    if target[-1:] == ("*",):
                        globs[module].append(target[:-1])
                    elif target:
                        exports[module][target[-1]] = target
                if re_exports or not match[1]:
                    imports[module].add(target)
        for match in MENTION.finditer(USE.sub("", code)):
            target = absolute(module, (match[1], *match[2].split("::")[1:]))
            if target:
                imports[module].add(target)

    def resolve(path: tuple[str, ...], left: int = 8) -> tuple[str, ...] | None:
        """Returns the module that defines what a path names."""
        for cut in range(len(path), -1, -1):
            if path[:cut] not in modules:
                continue
            rest = path[cut:]
            if rest and left and rest[0] in exports[path[:cut]]:
                return resolve(exports[path[:cut]][rest[0]] + rest[1:], left - 1)
            if rest and left:
                for glob in globs[path[:cut]]:
                    found = resolve(glob + rest, left - 1)
                    if found is not None and found != glob:
                        return found
            return path[:cut]
        return None

    edges: dict[str, set[str]] = {}
    for module, targets in imports.items():
        found = {resolve(target) for target in targets}
        edges[modules[module]] = {modules[target] for target in found if target is not None and target != module}
    return edges


def components(edges: dict[str, set[str]]) -> list[list[str]]:
    """Finds strongly connected components of more than one file (Tarjan's algorithm)."""
    index, low, stack, on, out, count = {}, {}, [], set(), [], 0
    for root in edges:
        if root in index:
            continue
        work = [(root, iter(sorted(edges[root])))]
        index[root] = low[root] = count
        count += 1
        stack.append(root)
        on.add(root)
        while work:
            node, rest = work[-1]
            step = next((target for target in rest if target in edges), None)
            if step is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        top = stack.pop()
                        on.discard(top)
                        component.append(top)
                        if top == node:
                            break
                    if len(component) > 1:
                        out.append(sorted(component))
            elif step not in index:
                index[step] = low[step] = count
                count += 1
                stack.append(step)
                on.add(step)
                work.append((step, iter(sorted(edges[step]))))
            elif step in on:
                low[node] = min(low[node], index[step])
    return sorted(out, key=len, reverse=True)


def sizes(cycles: dict[str, list[list[str]]]) -> dict[str, list[int]]:
    """Returns the number of files of each cycle, for the crates that have a cycle."""
    return {crate: [len(files) for files in found] for crate, found in cycles.items() if found}


# === Counts ===

TYPE = re.compile(r"(?m)^[ \t]*(?:pub(?:\([a-z: ]+\))? )?(struct|enum|trait|union|type) (\w+)")


def type_names(tree: Tree) -> dict[str, list[str]]:
    """Maps each name to the places that define it. Associated types of a trait or an `impl` are not counted."""
    places = collections.defaultdict(list)
    for name in tree.rust():
        code = split(tree.text(name))[0]
        for match in TYPE.finditer(code):
            if match[1] == "type" and match[0][0] in " \t":
                continue
            places[match[2]].append(f"{name}:{code.count(chr(10), 0, match.start()) + 1}")
    return dict(places)


def phrases(tree: Tree) -> tuple[dict[str, int], list[str]]:
    counts, places = collections.Counter(), []
    for name in [*tree.rust(), *tree.markdown()]:
        text = tree.text(name)
        if name.endswith(".rs"):
            code, comments, strings = split(text)
            if "/tests/" not in name and not name.endswith("tests.rs"):
                pieces = [*comments, *((0, string) for string in strings)]
            else:
                pieces = comments
        else:
            pieces = list(enumerate(re.sub(r"(?s)```.*?```", lambda m: "\n" * m[0].count("\n"), text).splitlines(), 1))
        for line, piece in pieces:
            for pattern in PHRASES if ANY_PHRASE.search(piece) else []:
                found = len(re.findall(pattern, piece, re.IGNORECASE))
                if found:
                    counts[pattern] += found
                    places.append(f"{name}:{line}: {piece.strip()[:110]}")
        for line, text in docstrings(comments) if name.endswith(".rs") else []:
            for pattern in BEGINNINGS:
                if re.match(pattern, text):
                    counts[pattern] += 1
                    places.append(f"{name}:{line}: {text[:110]}")
    return dict(counts), places


def docstrings(comments: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Returns the first line of each docstring, without its slashes."""
    lines = {line for line, text in comments if re.match(r"//[/!]", text)}
    return [(line, text[3:].strip()) for line, text in comments if line in lines and line - 1 not in lines and re.match(r"//[/!]", text)]


FUNCTION = re.compile(r"(?m)^([ \t]*)(?:pub(?:\([a-z: ]+\))? )?(?:const )?(?:async )?(?:unsafe )?(?:extern \"C\" )?fn (\w+)")


def is_test(name: str) -> bool:
    return bool(re.search(r"(^|/)(tests|benches|fuzz|examples)/|tests\.rs$", name))


def modules_for_tests(tree: Tree) -> set[str]:
    """Returns the files of modules that a file declares under `#[cfg(test)]`, or under a condition with `test`."""
    out = set()
    for name in tree.rust():
        folder = name.removesuffix("/lib.rs").removesuffix("/main.rs").removesuffix(".rs")
        for match in re.finditer(r"#\[cfg\([^\]]*\btest\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([a-z]+\))? )?mod (\w+);", tree.text(name)):
            out.add(f"{folder}/{match[1]}.rs")
    folders = tuple(name.removesuffix(".rs") + "/" for name in out)
    return out | {name for name in tree.rust() if name.startswith(folders)}


def functions(tree: Tree, of_tests: bool) -> list[tuple[int, str]]:
    """Returns the length in lines and the place of each function of the source, or of the tests."""
    out = []
    for name in tree.rust():
        code = split(tree.text(name))[0]
        source_end = 0 if is_test(name) else len(before_tests(code))
        for match in FUNCTION.finditer(code):
            if (match.start() >= source_end) != of_tests:
                continue
            opening = re.compile(r"[;{]").search(code, match.end())
            # A default of a const generic or an array type may hold a semicolon; such signatures are rare and short, and so are not
            # counted.
            if opening is None or code[opening.start()] == ";":
                continue
            end = block_end(code, opening.start())
            out.append((code.count("\n", match.start(), end) + 1, f"{name}:{code.count(chr(10), 0, match.start()) + 1} {match[2]}"))
    return out


# Words that say too little in a name, and what to write instead.
VAGUE_WORDS = {"told": "received, reported", "untold": "unannounced", "unheard": "unknown", "goes": "send, continue", "happens": "handle", "gone": "removed"}
# Functions of the sources must not have one of these words alone as their name. Tests may.
VAGUE_FUNCTIONS = {
    "asked": "send, count_request",
    "heard": "received",
    "narrow": "to_f32, run_filter",
    "said": "describe, state_and_reason",
    "stands_for": "proxies_per_pick",
    "whole": "full_page, to_json",
}
# Only names of at most this many words are checked, because longer names are sentences that name tests.
VAGUE_NAME_WORDS_MAX = 3
VAGUE_FUNCTION = re.compile(rf"\bfn ({'|'.join(VAGUE_FUNCTIONS)}|of(?=(?:<[^(]*>)?\((?!\s*(?:&(?:'\w+ )?)?(?:mut )?self\b)))\b")
DECLARED = re.compile(r"\b(?:fn|let(?: mut)?|const|static|struct|enum|mod|type) (\w+)|\b(\w+): ")


def vague_names(tree: Tree) -> list[str]:
    """Finds names with a vague word, functions with a vague name, and conversions named `of`, which do not say what is converted."""
    out = []
    for name in tree.rust():
        code = split(tree.text(name))[0]
        for match in DECLARED.finditer(code):
            words_of_name = (match[1] or match[2]).lower().split("_")
            if len(words_of_name) <= VAGUE_NAME_WORDS_MAX and not VAGUE_WORDS.keys().isdisjoint(words_of_name):
                out.append(f"{name}:{code.count(chr(10), 0, match.start()) + 1} {match[1] or match[2]}")
        for match in VAGUE_FUNCTION.finditer("" if is_test(name) else before_tests(code)):
            out.append(f"{name}:{code.count(chr(10), 0, match.start()) + 1} {match[1]}")
    return out


TUPLE_ASSIGNMENT = re.compile(r"(?m)^[ \t]*(?:let )?\((?:mut )?[a-z_][\w.]*(?:,\s*(?:mut )?[a-z_][\w.]*)+,?\)\s*=\s*\(")
TUPLE_PARAMETER = re.compile(r"\bfn \w+(?:<[^(]*>)?\((?:[^()]|\([^()]*\))*?(?<=[(,\s])\((?:mut )?\w+(?:,\s*(?:mut )?\w+)+,?\)\s*:")


def tuples(tree: Tree, pattern: re.Pattern) -> list[str]:
    """Finds tuples of values that do not belong together."""
    out = []
    for name in tree.rust():
        code = split(tree.text(name))[0]
        out += [f"{name}:{code.count(chr(10), 0, match.start()) + 1}" for match in pattern.finditer(code)]
    return out


def long_files(tree: Tree) -> list[str]:
    """Finds files with more lines before their tests than allowed, comments included."""
    out = []
    for name in tree.rust():
        lines = 0 if is_test(name) else before_tests(split(tree.text(name))[0]).count("\n")
        if lines > FILE_LINES_MAX:
            out.append(f"{name}: {lines} lines")
    return out


def wide_structs(tree: Tree) -> list[str]:
    """Finds structs with more fields than allowed whose documentation gives no reason: a sentence with the word `fields`."""
    out = []
    for name in tree.rust():
        text = tree.text(name)
        code = split(text)[0]
        lines = text.splitlines()
        for match in re.finditer(r"(?m)^[ \t]*(?:pub(?:\([a-z: ]+\))? )?struct (\w+)[^;{(]*\{", code):
            body = code[match.end() : block_end(code, match.end() - 1)]
            fields = len(re.findall(r"(?m)^\s*(?:pub(?:\([a-z: ]+\))? )?(?:r#)?\w+: ", body))
            at = code.count("\n", 0, match.start())
            above = []
            while at > 0 and (lines[at - 1].strip().startswith(("///", "#[", "//")) or lines[at - 1].strip().endswith("]")):
                at -= 1
                above.append(lines[at])
            exempt = any("Args" in line or "Parser" in line or "Subcommand" in line or " fields" in line for line in above)
            if fields > FIELDS_MAX and not exempt:
                out.append(f"{name}:{code.count(chr(10), 0, match.start()) + 1} {match[1]}: {fields} fields")
    return out


def unknown_names(documents: dict[str, str], codes: list[str], paths: list[str]) -> list[str]:
    """Finds names in code spans of documents that do not exist: `Type::function` and paths from the root."""
    out = []
    folders = {path.split("/", 1)[0] for path in paths if "/" in path}
    for name, text in documents.items():
        text = re.sub(r"(?s)```.*?```", "", text)
        for owner, member in re.findall(r"`([A-Z]\w*)::(\w+)`", text):
            definition = re.compile(rf"\b(?:struct|enum|trait|type) {owner}\b|\bimpl\b[^\n]*\b{owner}\b")
            defined = re.compile(rf"(?m)\bfn {member}\b|^\s*{member}\b")
            if not any(owner in code and member in code and definition.search(code) and defined.search(code) for code in codes):
                out.append(f"{name}: `{owner}::{member}`")
        for path in re.findall(r"`([\w.-]+/[\w./-]+)`", text):
            stem = path.rstrip("/")
            known = any(other == stem or other.startswith((stem + "/", stem + ".")) for other in paths)
            if path.split("/", 1)[0] in folders and "NAME" not in path and not known:
                out.append(f"{name}: `{path}`")
    return out


def wide_comments(tree: Tree) -> list[str]:
    out = []
    for name in tree.rust():
        for number, line in enumerate(tree.text(name).splitlines(), 1):
            if len(line) > COMMENT_COLUMNS_MAX and re.match(r"\s*//", line) and " " in line.strip()[4:].strip() and "http" not in line:
                # Tables, diagrams and quoted data cannot be wrapped.
                if not re.match(r"\s*//[/!]? *(\||[{\[`\"]|.*[─│▶►◄┌└]|  )", line):
                    out.append(f"{name}:{number}")
    return out


def wide_markdown(tree: Tree) -> list[str]:
    out = []
    for name in tree.markdown():
        fenced = False
        for number, line in enumerate(tree.text(name).splitlines(), 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            bare = re.sub(r"\]\([^)]*\)|https?://\S+", "", line)
            if len(bare) > MARKDOWN_COLUMNS_MAX and not fenced and not line.lstrip().startswith("|"):
                out.append(f"{name}:{number}")
    return out


def words(text: str) -> int:
    return len(re.findall(r"[A-Za-z][A-Za-z'-]*", text))


def long_pages(tree: Tree) -> list[str]:
    out = []
    for name in tree.markdown():
        maximum = HOW_TO_LINES_MAX if name.startswith("docs/how-to/") else README_LINES_MAX if name == "README.md" else None
        lines = len(tree.text(name).splitlines())
        if maximum is not None and lines > maximum:
            out.append(f"{name}: {lines} lines, at most {maximum}")
    return out


def words_of_documents(tree: Tree) -> int:
    return sum(words(tree.text(name)) for name in tree.markdown())


def excess_words(tree: Tree) -> list[str]:
    number = words_of_documents(tree)
    return [f"all Markdown files: {number} words, at most {DOCUMENT_WORDS_MAX}; shorten a page"] if number > DOCUMENT_WORDS_MAX else []


def data_bytes(tree: Tree, folder: str = "") -> int:
    """Returns the size of the files in folders `data`, below a folder."""
    return sum(tree.size(name) for name in tree.names if name.startswith(folder) and "/data/" in name)


def excess_data(tree: Tree) -> list[str]:
    out = []
    for folder, maximum in (("docs/", RESULT_BYTES_MAX), ("", DATA_BYTES_MAX)):
        number = data_bytes(tree, folder)
        if number > maximum:
            out.append(f"{folder}*/data/: {number} bytes, at most {maximum}")
    return out


# A subject may begin with an area, which is no verb.
NOT_IMPERATIVE = re.compile(r"^(?:[\w-]+: )?(?![\w-]+: )\w+(ed|ing)\b")


def bad_subjects() -> list[str]:
    if subprocess.run(["git", "cat-file", "-e", SUBJECTS_SINCE], cwd=ROOT, capture_output=True).returncode != 0:
        return []  # a shallow clone has no history to check
    rows = git("log", "--no-merges", "--format=%h %s", f"{SUBJECTS_SINCE}..HEAD").splitlines()
    subjects = [row.split(" ", 1) for row in rows]
    return [f"{commit} {subject}" for commit, subject in subjects if len(subject) > SUBJECT_CHARACTERS_MAX or NOT_IMPERATIVE.match(subject)]


def tests(tree: Tree) -> dict[str, int]:
    counts = collections.Counter()
    for name in tree.rust():
        counts[crate_of(name)] += len(re.findall(r"#\[(?:tokio::)?test[\](]", tree.text(name)))
    return dict(sorted(counts.items()))


# A lifetime, a word, a number, a string, or a sign except the comma, which the formatter adds and removes.
RUST_TOKEN = re.compile(r"'[a-z_]\w*(?!')|[A-Za-z_]\w*|\d[\w.]*|\"\"|->|=>|::|&&|\|\||[-+*/%^!=<>]=|\.\.=?|[^\s\w,]")
# Folders of tools and tests, including those of earlier commits.
TOOLS = {"tools", "e2e", "bench", "engine-sim", "launcher", "race", "simulator", "testbed"}


def tokens(tree: Tree) -> dict[str, int]:
    """Counts the tokens of the product's and the tools' sources, without comments and tests. A string is one token."""
    counts = {"the product": 0, "the tools": 0}
    only_tests = modules_for_tests(tree)
    for name in tree.rust():
        if not is_test(name) and name not in only_tests:
            group = "the tools" if name.split("/")[0] in TOOLS else "the product"
            counts[group] += len(RUST_TOKEN.findall(without_tests(split(tree.text(name))[0])))
    return counts


def percentile(values: list[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0


def count(tree: Tree) -> tuple[dict, dict[str, list[str]]]:
    """Returns all counts, and for the counts with a limit in `check` the places that were counted."""
    crates = sorted({crate_of(name) for name in tree.rust()})
    cycles = {crate: components(import_edges(tree, crate)) for crate in crates}
    names = type_names(tree)
    twice = {name: places for name, places in names.items() if len(places) > 1 and name not in CONVENTIONS}
    found, phrase_places = phrases(tree)
    lengths, of_tests = functions(tree, of_tests=False), functions(tree, of_tests=True)
    comment_words = sum(words(text) for name in tree.rust() for _, text in split(tree.text(name))[1])
    places = {
        "import cycles of more than 3 files": [
            f"{crate}: {len(files)} files: {' '.join(files)}" for crate in crates for files in cycles[crate] if len(files) > CYCLE_FILES_MAX
        ],
        "type names defined more than once": [f"{name}: {' '.join(where)}" for name, where in sorted(twice.items())],
        "phrases": phrase_places,
        "functions over 70 lines": [f"{place}: {lines} lines" for lines, place in lengths if lines > FUNCTION_LINES_MAX],
        "test functions over 210 lines": [f"{place}: {lines} lines" for lines, place in of_tests if lines > TEST_LINES_MAX],
        "vague names": vague_names(tree),
        "assignments of tuples": tuples(tree, TUPLE_ASSIGNMENT),
        "tuples as parameters": tuples(tree, TUPLE_PARAMETER),
        "comment lines over 100 columns": wide_comments(tree),
        "Markdown lines over 120 columns": wide_markdown(tree),
        "how-to pages over 150 lines, README over 149": long_pages(tree),
        "words of documents over 45,400": excess_words(tree),
        "data files over their maximum of bytes": excess_data(tree),
        "structs over 12 fields without a reason": wide_structs(tree),
        "files over 500 lines before tests": long_files(tree),
        "names in documents for contributors that do not exist": unknown_names(
            {name: tree.text(name) for name in CONTRIBUTORS if name in tree.names},
            [split(tree.text(name))[0] for name in tree.rust()],
            tree.names,
        ),
        "commit subjects": bad_subjects() if tree.revision is None else [],
    }
    all_cycles = {crate: components(import_edges(tree, crate, re_exports=True)) for crate in crates}
    counts = {
        "import cycles (files each)": sizes(cycles),
        "import cycles, re-exports included (files each)": sizes(all_cycles),
        "types": sum(len(where) for where in names.values()),
        "type names": len(names),
        "functions": len(lengths),
        "function lines, median": percentile([lines for lines, _ in lengths], 0.5),
        "function lines, p99": percentile([lines for lines, _ in lengths], 0.99),
        "function lines, longest": max(lines for lines, _ in lengths),
        "words of documents": {name: words(tree.text(name)) for name in tree.markdown()},
        "words of documents, all": words_of_documents(tree),
        "bytes of data files": data_bytes(tree),
        "words of comments": comment_words,
        **{f"Rust tokens of {group}": number for group, number in tokens(tree).items()},
        "tests": tests(tree),
        "tests, all": sum(tests(tree).values()),
        "phrases by pattern": found,
        **{name: len(where) for name, where in places.items()},
    }
    return counts, places


# === Samples ===


def sentences(tree: Tree, kind: str) -> list[tuple[str, str]]:
    out = []
    if kind == "comments":
        for name in tree.rust():
            block: list[str] = []
            for line in [*tree.text(name).splitlines(), ""]:
                match = re.match(r"\s*//[/!]? ?(.*)", line)
                if match:
                    block.append(match[1])
                elif block:
                    text = " ".join(block)
                    if words(text) >= 6 and "```" not in text:
                        out.append((name, text))
                    block = []
    else:
        for name in tree.markdown():
            text = re.sub(r"(?s)```.*?```", "", tree.text(name))
            text = re.sub(r"(?m)^(\||#).*$", "", text)
            for paragraph in re.split(r"\n\s*\n", text):
                for sentence in re.split(r"(?<=[.!?]) +", " ".join(paragraph.split())):
                    if words(sentence) >= 6:
                        out.append((name, sentence))
    return out


# === Commands ===


def flat(counts: dict) -> dict[str, str]:
    out = {}
    for name, value in counts.items():
        if name == "words of documents" or name == "tests":
            continue
        if isinstance(value, dict):
            for key, inner in value.items():
                out[f"{name}: {key}"] = str(inner)
        else:
            out[name] = str(value)
    for crate, number in counts["tests"].items():
        out[f"tests of {crate}"] = str(number)
    return out


def compare(before: dict, after: dict) -> str:
    old, new = flat(before), flat(after)
    rows = ["| count | before | after |", "|---|---|---|"]
    rows += [f"| {name} | {old.get(name, '-')} | {new.get(name, '-')} |" for name in dict.fromkeys([*old, *new])]
    return "\n".join(rows)


def check() -> int:
    _, places = count(Tree())
    failed = 0
    for name, limit in LIMITS.items():
        found = len(places[name])
        if found > limit:
            failed += 1
            print(f"{name}: {found}, at most {limit} are allowed")
            print("\n".join(f"  {place}" for place in places[name][:30]))
    return 1 if failed else 0


def option(arguments: list[str], name: str, default: str | None = None) -> str | None:
    return arguments[arguments.index(name) + 1] if name in arguments else default


def main(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    if command == "check":
        return check()
    if command == "compare":
        before, after = (json.loads(pathlib.Path(path).read_text()) for path in arguments[1:3])
        print(compare(before, after))
        return 0
    tree = Tree(option(arguments, "--revision"))
    if command == "sample":
        found = sentences(tree, option(arguments, "--kind", "comments"))
        random.Random(int(option(arguments, "--seed", "21"))).shuffle(found)
        for name, text in found[: int(option(arguments, "--count", "20"))]:
            print(f"{name}: {text}")
        return 0
    if command in ("report", "json"):
        counts, places = count(tree)
        if command == "json":
            pathlib.Path(arguments[1]).write_text(json.dumps(counts, indent=1) + "\n")
            return 0
        for name, value in flat(counts).items():
            print(f"{value:>8}  {name}")
        for name in ("import cycles of more than 3 files", "structs over 12 fields without a reason", "functions over 70 lines"):
            print("\n".join(f"{name}: {place}" for place in places[name]))
        return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
