#!/usr/bin/env python3
"""Checks the relative links of every tracked Markdown file: the file exists, and so does the heading that an anchor names.

Links to other sites are not followed: a build must not depend on them. Standard library only.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    """Returns the text without code blocks and code spans; line breaks stay."""
    text = re.sub(r"(?ms)^ *```.*?^ *```", lambda match: "\n" * match[0].count("\n"), text)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(text: str) -> set[str]:
    """Returns the anchors of the headings, as GitHub and mdBook make them."""
    found: set[str] = set()
    for heading in re.findall(r"(?m)^#+ +(.+?) *#*$", re.sub(r"(?ms)^```.*?^```", "", text)):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
        count = sum(1 for other in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        found.add(f"{slug}-{count}" if count else slug)
    return found


def broken(name: str, text: str, root: pathlib.Path = ROOT) -> list[str]:
    """Finds the links of one file that lead nowhere."""
    folder = root / pathlib.Path(name).parent
    complaints = []
    for number, line in enumerate(prose(text).splitlines(), 1):
        for target in LINK.findall(line):
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (folder / path).resolve() if path else root / name
            if not file.exists():
                complaints.append(f"{name}:{number}: {target}: no such file")
            elif name.startswith("docs/") and not file.is_relative_to(root / "docs"):
                complaints.append(f"{name}:{number}: {target}: not on the site, which is built from docs/")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
                complaints.append(f"{name}:{number}: {target}: no such heading")
    return complaints


def main() -> int:
    names = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, text=True, capture_output=True, check=True).stdout.split()
    complaints = [line for name in names for line in broken(name, (ROOT / name).read_text())]
    print("\n".join(complaints) or f"all relative links of {len(names)} files are valid")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
