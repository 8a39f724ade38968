"""Tests the project on a real Kubernetes node.

    python3 e2e/cluster run [DRILL...]        start a node, run the drills, print a table, end the node
    python3 e2e/cluster up | down             start a node and leave it running; end it
    python3 e2e/cluster exec COMMAND...       run a command in the running node, for example `kubectl get pods -A`
    python3 e2e/cluster drill DRILL...        run drills in the running node
    python3 e2e/cluster list                  names of the drills

`run` ends with `N passed, N failed`, and with exit code 3 if the machine cannot run a node. SWITCHPOINT_TARGET names the folder of
the release binaries (default: target).
"""

import json
import os
import signal
import sys
import time
import traceback

import arrivals
import drills
import images
import loading
import machine
import node
import release
import table
from paths import RUN, Skipped

UNAVAILABLE = 3
FAILURES_SHOWN_MAX = 6


def say(text: str) -> None:
    print(text, flush=True)


def up(keep: bool) -> None:
    began = time.monotonic()
    machine.check()
    machine.check_builds()
    release.build_images()
    say(f"images built, {time.monotonic() - began:.0f} s")
    node.up(keep)
    say(f"node ready, {time.monotonic() - began:.0f} s")
    images.push_all()
    release.push_images()
    drills.prepare()
    say(f"images and schemas there, {time.monotonic() - began:.0f} s")


def run_drill(name: str) -> table.Row:
    """Runs one drill. A failed request or any exception fails it."""
    say(f"-- {name}")
    began = time.monotonic()
    loading.REPORTS.clear()
    try:
        outcome = drills.DRILLS[name].run()
    except Skipped as why:
        say(f"SKIPPED {name}: {why}")
        return table.Row(name, "skipped", None, None, None, time.monotonic() - began, str(why))
    except Exception as error:
        (RUN / f"{name}.txt").write_text(traceback.format_exc())
        say(f"   FAILED: {error}")
        return broken_off(name, time.monotonic() - began, str(error).splitlines()[0][:300] if str(error) else type(error).__name__)
    report = outcome.report
    if report is None:
        say(f"   ok, {outcome.seconds:.0f} s: {outcome.remarks}")
        return table.Row(name, "passed", None, None, None, outcome.seconds, outcome.remarks)
    (RUN / f"{name}.json").write_text(json.dumps(report.__dict__, indent=1))
    result = "failed" if report.failed else "passed"
    say(f"   {'FAILED' if report.failed else 'ok'}, {outcome.seconds:.0f} s: {report.failed} of {report.requests} requests failed, {report.streams} streams; {outcome.remarks}")
    for failure in report.failures[:FAILURES_SHOWN_MAX]:
        say(f"   | {failure}")
    return table.Row(name, result, report.requests, report.failed, report.longest_gap, outcome.seconds, outcome.remarks)


def broken_off(name: str, seconds: float, why: str) -> table.Row:
    """Returns the row of a drill that ended by an exception, with what its loads had counted."""
    if not loading.REPORTS:
        return table.Row(name, "failed", None, None, None, seconds, why)
    report = arrivals.added(loading.REPORTS)
    (RUN / f"{name}.json").write_text(json.dumps(report.__dict__, indent=1))
    say(f"   {report.failed} of {report.requests} requests failed, {report.streams} streams, in {len(loading.REPORTS)} loads")
    for failure in report.failures[:FAILURES_SHOWN_MAX]:
        say(f"   | {failure}")
    return table.Row(name, "failed", report.requests, report.failed, report.longest_gap, seconds, why)


def run_drills(names: list[str]) -> int:
    rows: list[table.Row] = []
    for name in names:
        rows.append(run_drill(name))
    say("\n" + table.markdown(rows) + "\n")
    say(table.last_line(rows))
    return 1 if any(row.result == "failed" for row in rows) else 0


def chosen(names: list[str]) -> list[str]:
    """Returns the drills to run: those named, with the installation if they need it; or all that need no name."""
    unknown = [name for name in names if name not in drills.DRILLS]
    if unknown:
        raise SystemExit(f"unknown drills {' '.join(unknown)}; there are {' '.join(drills.DRILLS)}")
    needs = any(drills.DRILLS[name].needs_release for name in names) and "install" not in names
    return (["install", *names] if needs else names) or [name for name in drills.DRILLS if name not in drills.NAMED_ONLY]


def run(names: list[str]) -> int:
    """Starts a node, runs drills and ends the node, also on a signal."""
    wanted = chosen(names)
    machine.check()
    try:
        up(keep=False)
        return run_drills(wanted)
    finally:
        node.down()


def main(arguments: list[str]) -> int:
    command, *rest = arguments or ["help"]
    if command == "run":
        return run(rest)
    if command == "up":
        up(keep=True)
    elif command == "down":
        node.down()
    elif command == "exec":
        os.execvpe("nsenter", node.command(*rest), node.environment())
    elif command == "drill":
        return run_drills(rest)
    elif command == "list":
        say("\n".join(drills.DRILLS))
    else:
        say(__doc__ or "")
        return 2
    return 0


def interrupted(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, interrupted)
    try:
        sys.exit(main(sys.argv[1:]))
    except Skipped as why:
        say(f"SKIPPED cluster: {why}")
        sys.exit(UNAVAILABLE)
    except node.NodeError as error:
        say(f"FAILED: {error}")
        sys.exit(1)
