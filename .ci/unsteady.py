#!/usr/bin/env python3
"""Reads `.ci/unsteady.toml`, the list of tests that are known to be unsteady; run as a program, it checks the list.

Standard library only, and no newer than Python 3.9, which has no TOML: the file is a plain list of tables of strings.
"""

import pathlib
import re
import sys
from datetime import date
from typing import NamedTuple

PATH = pathlib.Path(__file__).resolve().parent / "unsteady.toml"
DAYS_MAX = 14
FIELDS = {"name", "since", "reason"}


class Entry(NamedTuple):
    name: str
    since: date
    reason: str


class Malformed(ValueError):
    """The file does not have the required form; the text names the line."""


def parse(text: str) -> list[Entry]:
    tables: list[dict[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line == "[[test]]":
            tables.append({})
            continue
        match = re.fullmatch(r'(\w+) = "([^"]*)"', line)
        if not match or not tables or match[1] not in FIELDS or match[1] in tables[-1]:
            raise Malformed(f"line {number}: {line!r} is not one of name, since and reason, once each, under [[test]]")
        tables[-1][match[1]] = match[2]
    entries = []
    for table in tables:
        missing = sorted(FIELDS - set(table)) + sorted(key for key, value in table.items() if not value)
        if missing:
            raise Malformed(f"{table.get('name', 'an entry')}: {', '.join(missing)} missing or empty")
        try:
            since = date.fromisoformat(table["since"])
        except ValueError as error:
            raise Malformed(f"{table['name']}: {error}") from error
        entries.append(Entry(table["name"], since, table["reason"]))
    names = [entry.name for entry in entries]
    if len(names) != len(set(names)):
        raise Malformed("a test is listed twice")
    return entries


def complaints(entries: list[Entry], today: date) -> list[str]:
    """Finds entries that are too old, or from the future."""
    found = []
    for entry in entries:
        days = (today - entry.since).days
        if days > DAYS_MAX:
            found.append(f"{entry.name}: listed {days} days ago, at most {DAYS_MAX} are allowed: mend it or remove it")
        if days < 0:
            found.append(f"{entry.name}: {entry.since} has not come yet")
    return found


def names() -> set[str]:
    """Returns the listed tests whose entry has not expired. Returns nothing if the file cannot be read, which
    `main` reports."""
    try:
        return {entry.name for entry in parse(PATH.read_text()) if not complaints([entry], date.today())}
    except (Malformed, OSError):
        return set()


def main() -> int:
    try:
        entries = parse(PATH.read_text())
    except (Malformed, OSError) as error:
        print(f"{PATH.name}: {error}", file=sys.stderr)
        return 1
    found = complaints(entries, date.today())
    print("\n".join(found) or f"{len(entries)} tests are listed as unsteady")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
