"""Bounds file locks, whose kernel memory no control group counts and no limit of a process bounds.

The agent reads the kernel's list of locks while programs run. It has the pid of each lock's process; what would hide it
(locks of an open file, a file table that outlives the process) is refused by the filter. A process can take about a
million locks per second and core, 200 bytes each: some 10 MB until it is ended.
"""

from __future__ import annotations

MOST = 1024
"""Most locks of a sandbox. A connection to SQLite has five."""
CHECK_S = 0.05


def find_lock_holders():
    """Return the pids that hold file locks, if this sandbox's processes together hold too many; else an empty set."""
    owners, total, rest = set(), 0, b""
    try:
        with open("/proc/locks", "rb", 0) as file:
            while total <= MOST:
                data = file.read(1 << 16)
                if not data:
                    return set()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    words = line.split()
                    # "1: POSIX ADVISORY WRITE 71 00:2f:12 0 EOF"; of other namespaces only locks of open files are
                    # listed, as -1
                    if len(words) > 4 and words[4].isdigit():
                        owners.add(int(words[4]))
                        total += 1
    except OSError:
        return set()
    return owners
