"""Bounds the number of file locks, since neither control groups nor process limits bound their kernel memory.

The agent reads the kernel's list of locks while programs run. The list has the pid of each lock's process; the
system-call filter refuses calls that would hide the pid (locks of an open file, a file table that outlives its
process). A process can take about a million locks per second and core, of 200 bytes each: some 10 MB until it is ended.
"""

from __future__ import annotations

MAX_LOCKS = 1024
"""Maximum number of locks in a sandbox. A connection to SQLite has five."""
CHECK_INTERVAL_S = 0.05


def find_lock_holders():
    """Return the pids of the processes that hold file locks, or an empty set if there are at most `MAX_LOCKS` locks."""
    owners, total, rest = set(), 0, b""
    try:
        with open("/proc/locks", "rb", 0) as file:
            # The list is not read further than necessary: it may have a million entries.
            while total <= MAX_LOCKS:
                data = file.read(1 << 16)
                if not data:
                    return set()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    words = line.split()
                    # "1: POSIX ADVISORY WRITE 71 00:2f:12 0 EOF". Of other namespaces, only locks of open files are
                    # listed, with the pid -1.
                    if len(words) > 4 and words[4].isdigit():
                        owners.add(int(words[4]))
                        total += 1
    except OSError:
        return set()
    return owners
