"""What processes use, from /proc."""

from __future__ import annotations

import os

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
COUNTER = 4
"""File descriptor of an agent: the count of CPU time of its sandbox's control group, where the host has one."""
_OWN_COUNTERS = ("cpu.stat", "cpuacct/cpuacct.usage", "cpu,cpuacct/cpuacct.usage")
"""The same where an agent sees its own group."""


def processes():
    """By pid: parent, seconds of CPU with those of ended children, resident bytes, threads, own seconds, its start."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/" + name + "/stat", "rb", 0) as file:
                text = file.read(4096)
        except OSError:
            continue  # it ended meanwhile
        fields = text[text.rindex(b")") + 2 :].split()
        cpu = sum(map(int, fields[11:15])) / _TICKS
        own = sum(map(int, fields[11:13])) / _TICKS
        found[int(name)] = (int(fields[1]), cpu, int(fields[21]) * _PAGE, int(fields[17]), own, fields[19])
    return found


def tree(root, found=None):
    """`root` and its descendants, as far as /proc shows them."""
    found = processes() if found is None else found
    children = {}
    for pid, entry in found.items():
        children.setdefault(entry[0], []).append(pid)
    result, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        if pid in found:
            result.append(pid)
        waiting += children.get(pid, ())
    return result


def open_counter():
    """File descriptor of the count of CPU time of the control group that this process sees; -1: there is none."""
    for name in _OWN_COUNTERS:
        try:
            return os.open("/sys/fs/cgroup/" + name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return -1


def counted_s(counter):
    """Seconds of CPU that a control group has counted: of every process that was ever in it."""
    text = os.pread(counter, 64, 0)  # version 2: "usage_usec 1234", version 1: nanoseconds
    return int(text.split()[1]) / 1e6 if text.startswith(b"usage_usec") else int(text) / 1e9


class Tally:
    """Seconds of CPU of a tree without such a count: what was seen, process by process.

    Parents add up what their children used only if they wait for them: who does not want to be counted does not.
    """

    def __init__(self):
        self.seen = {}

    def add(self, root, without_root=False):
        """Look again, at `root` and its descendants or at these alone.

        Returns:
            seconds of CPU of all that was ever seen; of what is there now, with its ended children; resident bytes;
            threads.
        """
        found = processes()
        entries = [(pid, found[pid]) for pid in tree(root, found) if pid != root or not without_root]
        for pid, entry in entries:
            self.seen[pid, entry[5]] = entry[4]
        cpu, memory, threads = (sum(entry[place] for _, entry in entries) for place in (1, 2, 3))  # pyrefly: ignore
        return sum(self.seen.values()), cpu, memory, threads


def reaped_s():
    """Seconds of CPU of all children of this process that have ended, with theirs."""
    times = os.times()
    return times.children_user + times.children_system


def memory_of(root):
    """Bytes of `root` and its descendants, pages that they share counted once, as far as that can be read."""
    found = processes()
    total = 0
    for pid in tree(root, found):
        share = found[pid][2]
        try:
            with open("/proc/" + str(pid) + "/smaps_rollup", "rb") as file:
                for line in file:
                    if line.startswith(b"Pss:"):
                        share = int(line.split()[1]) * 1024
        except OSError:
            pass  # it ended, or is not ours to look into
        total += share
    return total


def children(pid):
    """Pids of its children."""
    return {child for child, entry in processes().items() if entry[0] == pid}


def kill_tree(root, spare=(), stop=True):
    """SIGKILL for `root` and its descendants; stopped first (SIGSTOP), so that none can start another meanwhile."""
    for signal in (19, 9) if stop else (9,):
        for pid in tree(root):
            if pid not in spare:
                try:
                    os.kill(pid, signal)
                except OSError:
                    continue


_COUNTERS = {
    "memory": (("memory.events", b"oom_kill"), ("memory/memory.oom_control", b"oom_kill")),
    "processes": (("pids.events", b"max"), ("pids/pids.events", b"max")),
}
"""By limit: where a control group of either version counts what it has refused or killed."""


def kernel_counts():
    """By limit, how often the kernel has enforced it in the control group that this process sees; what can be read."""
    found = {}
    for limit, places in _COUNTERS.items():
        for path, word in places:
            try:
                with open("/sys/fs/cgroup/" + path, "rb") as file:
                    counts = dict(line.split()[:2] for line in file)
                found[limit] = int(counts[word])
                break
            except (OSError, KeyError, ValueError):
                continue
    return found
