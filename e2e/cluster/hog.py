"""Makes the kernel's OOM killer end a container: joins its memory cgroup, marks the victim and allocates until the limit.

    hog.py PID
"""

import os
import pathlib
import sys

CHUNK_BYTES = 8 * 1024 * 1024
CHUNKS_MAX = 64
# The victim is chosen before this process.
SCORE_MAX = "1000"


def memory_cgroup(pid: int) -> pathlib.Path:
    """The folder of the process's memory cgroup, of version 1 or 2."""
    for row in pathlib.Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = row.split(":", 2)
        if "memory" in controllers.split(","):
            return pathlib.Path("/sys/fs/cgroup/memory" + path)
        if not controllers and pathlib.Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return pathlib.Path("/sys/fs/cgroup" + path)
    raise SystemExit("no memory cgroup")


def main(pid: int) -> None:
    pathlib.Path(f"/proc/{pid}/oom_score_adj").write_text(SCORE_MAX)
    (memory_cgroup(pid) / "cgroup.procs").write_text(str(os.getpid()))
    held = []
    for _ in range(CHUNKS_MAX):
        held.append(b"x" * CHUNK_BYTES)
        if not pathlib.Path(f"/proc/{pid}").exists():
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
