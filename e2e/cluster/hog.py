"""Makes the kernel's OOM killer end a container: small processes join its memory cgroup and allocate until the limit. The program marks the
container's own process, so that the kernel kills this process.

    hog.py PID
"""

import os
import pathlib
import signal
import sys
import time

CHUNK_BYTES = 1024 * 1024
# The kernel counts a process with the mark as large as the limit, or a little less. The helpers stay well below this size.
HELPERS = 8
HELPER_CHUNKS_MAX = 48
SCORE_MAX = "1000"
SECONDS_MAX = 20


def memory_cgroup(pid: int) -> pathlib.Path:
    """Returns the folder of the process's memory cgroup, of version 1 or 2."""
    for row in pathlib.Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = row.split(":", 2)
        if "memory" in controllers.split(","):
            return pathlib.Path("/sys/fs/cgroup/memory" + path)
        if not controllers and pathlib.Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return pathlib.Path("/sys/fs/cgroup" + path)
    raise SystemExit("no memory cgroup")


def allocate(group: pathlib.Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
    held = []
    for _ in range(HELPER_CHUNKS_MAX):
        held.append(b"x" * CHUNK_BYTES)
        time.sleep(0.005)
    time.sleep(SECONDS_MAX)


def main(pid: int) -> None:
    pathlib.Path(f"/proc/{pid}/oom_score_adj").write_text(SCORE_MAX)
    group, helpers = memory_cgroup(pid), []
    for _ in range(HELPERS):
        child = os.fork()
        if child == 0:
            allocate(group)
            os._exit(0)
        helpers.append(child)
    began = time.monotonic()
    while pathlib.Path(f"/proc/{pid}").exists() and time.monotonic() - began < SECONDS_MAX:
        time.sleep(0.01)
    for child in helpers:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
