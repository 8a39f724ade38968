"""The table at the end of a run."""

from typing import NamedTuple

HEAD = ("drill", "result", "requests", "failed", "longest gap, ms", "seconds", "remarks")


class Row(NamedTuple):
    """One drill. `result` is passed, failed or skipped; the numbers are None if the drill has no load. `gap` is in seconds."""

    drill: str
    result: str
    requests: int | None
    failed: int | None
    gap: float | None
    seconds: float
    remarks: str


def cells(row: Row) -> tuple[str, ...]:
    gap = None if row.gap is None else round(row.gap * 1000)
    numbers = ("" if number is None else f"{number:,}" for number in (row.requests, row.failed, gap))
    return (row.drill, row.result, *numbers, f"{row.seconds:.0f}", row.remarks)


def markdown(rows: list[Row]) -> str:
    lines = [HEAD, tuple("---" for _ in HEAD), *(cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def last_line(rows: list[Row]) -> str:
    """Returns the last line of the output, in the same format as the last line of `.ci/steps.py`."""
    counts = {result: sum(row.result == result for row in rows) for result in ("passed", "failed", "skipped")}
    line = f"{counts['passed']} passed, {counts['failed']} failed"
    return f"{line}, {counts['skipped']} skipped" if counts["skipped"] else line
