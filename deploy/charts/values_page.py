#!/usr/bin/env python3
"""Prints docs/reference/chart.md: page.md.in with the tables of all values, from values.yaml and values.schema.json of the chart.

    deploy/charts/values_page.py > docs/reference/chart.md

Exit code 2: a value has no comment, or values.yaml and the schema name different values. Standard library only.
"""

import json
import pathlib
import re
import sys
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
CHART = HERE / "switchpoint"
LINE = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z]+):(?: (?P<value>.*))?$")
REFERENCES = "#/$defs/"


class Row(NamedTuple):
    path: str
    default: str
    meaning: str


class Invalid(Exception):
    """The reason why the page cannot be written."""


def value_rows(text: str) -> list[Row]:
    """Returns one row for each value that has a comment above it.

    Raises Invalid for a value without a comment. Reads only the subset of YAML that values.yaml uses."""
    rows: list[Row] = []
    parents: list[str] = []
    comment: list[str] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if not line.strip():
            comment = []
        elif line.lstrip().startswith("#"):
            comment.append(line.lstrip().removeprefix("#").strip())
        else:
            found = LINE.match(line)
            if not found:
                raise Invalid(f"line {at}: cannot read {line!r}")
            depth = len(found["indent"]) // 2
            parents[depth:] = [found["key"]]
            path = ".".join(parents)
            if found["value"] is None and not comment:
                continue  # a group of values
            if not comment:
                raise Invalid(f"line {at}: {path} has no comment")
            block = []
            while found["value"] is None and at < len(lines) and (lines[at].startswith("  " * depth + "  ") or lines[at].startswith("  " * depth + "- ")):
                block.append(lines[at][2 * depth :])
                at += 1
            rows.append(Row(path, found["value"] if found["value"] is not None else flow(block), " ".join(comment)))
            comment = []
    return rows


def flow(block: list[str]) -> str:
    """Returns a block of YAML on one line: a mapping, or a list of mappings."""
    if not block[0].startswith("- "):
        return "{" + ", ".join(line.strip() for line in block) + "}"
    items: list[list[str]] = []
    for line in block:
        if line.startswith("- "):
            items.append([])
        items[-1].append(line.removeprefix("- ").strip())
    return "[" + ", ".join("{" + ", ".join(item) + "}" for item in items) + "]"


def resolved(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of the schema, with its reference replaced by what it names."""
    if "$ref" in part:
        part = schema["$defs"][part["$ref"].removeprefix(REFERENCES)] | {key: value for key, value in part.items() if key != "$ref"}
    return part


def schema_paths(schema: dict[str, Any], part: dict[str, Any], prefix: str = "") -> set[str]:
    """Returns the paths of all values that the schema allows, down to free-form ones and lists."""
    found = set()
    for key, child in part.get("properties", {}).items():
        child = resolved(schema, child)
        path = f"{prefix}{key}"
        # `resources` is one value, although the schema knows its parts.
        if "properties" in child and key != "resources":
            found |= schema_paths(schema, child, f"{path}.")
        else:
            found.add(path)
    return found


def pool_rows(schema: dict[str, Any], part: dict[str, Any], prefix: str = "") -> list[Row]:
    """Returns one row for each setting of a pool, from the descriptions in the schema."""
    rows = []
    for key, child in part["properties"].items():
        if "description" not in child:
            raise Invalid(f"the schema's {prefix}{key} has no description")
        rows.append(Row(f"{prefix}{key}", "", child["description"]))
        if "properties" in child:
            rows += pool_rows(schema, child, f"{prefix}{key}.")
    return rows


def table(rows: list[Row]) -> str:
    lines = ["| value | default | meaning |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{row.path}` | `{row.default}` | {escaped(row.meaning)} |" for row in rows])


def pool_table(rows: list[Row]) -> str:
    lines = ["| setting | meaning |", "|---|---|"]
    return "\n".join(lines + [f"| `{row.path}` | {escaped(row.meaning)} |" for row in rows])


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def page() -> str:
    rows = value_rows((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema_paths(schema, schema) - {"global"}
    named = {row.path for row in rows}
    if known != named:
        raise Invalid(f"only in the schema: {sorted(known - named)}; only in values.yaml: {sorted(named - known)}")
    sections: dict[str, list[Row]] = {}
    for row in rows:
        group = row.path.partition(".")[0]
        sections.setdefault(group if "." in row.path else "general", []).append(row)
    values = "\n\n".join(f"### {name}\n\n{table(section)}" for name, section in sections.items())
    text = (HERE / "page.md.in").read_text()
    return text.replace("@VALUES@", values).replace("@POOLS@", pool_table(pool_rows(schema, schema["$defs"]["pool"])))


def main() -> int:
    try:
        sys.stdout.write(page())
    except Invalid as why:
        print(f"values_page.py: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
