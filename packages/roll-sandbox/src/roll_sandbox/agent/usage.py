"""The processes of a sandbox and their usage, from /proc, and how to end them where no PID namespace does."""

from __future__ import annotations

import os
import time

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
COUNTER = 4
"""An agent's file descriptor of the CPU counter of its sandbox's control group, if the host has one."""
_OWN_COUNTERS = ("cpu.stat", "cpuacct/cpuacct.usage", "cpu,cpuacct/cpuacct.usage")
"""CPU counters below /sys/fs/cgroup, where an agent sees its own group."""


def list_processes():
    """List the processes that /proc shows.

    Returns:
        by pid: parent, CPU seconds with those of ended children, resident bytes, threads, own CPU seconds, start time,
        session, whether it has ended (a zombie).
    """
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
        memory, threads = int(fields[21]) * _PAGE, int(fields[17])
        ended = fields[0] in (b"Z", b"X") and threads < 2  # with more, only the first thread has ended
        found[int(name)] = (int(fields[1]), cpu, memory, threads, own, fields[19], int(fields[3]), ended)
    return found


def list_tree(root, found=None):
    """Return the pids of `root` and its descendants, as far as /proc shows them."""
    found = list_processes() if found is None else found
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


def open_cpu_counter():
    """Return the file descriptor of the CPU counter of this process's control group; -1 if there is no counter."""
    for name in _OWN_COUNTERS:
        try:
            return os.open("/sys/fs/cgroup/" + name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return -1


def read_cpu_s(counter):
    """Return the CPU seconds that a control group has counted, for every process that was ever in it."""
    text = os.pread(counter, 64, 0)  # version 2: "usage_usec 1234", version 1: nanoseconds
    return int(text.split()[1]) / 1e6 if text.startswith(b"usage_usec") else int(text) / 1e9


class CpuSampler:
    """CPU seconds of a process tree without a counter, sampled process by process.

    The times of parents include only children that they wait for, which a program can avoid.
    """

    def __init__(self):
        self.seen = {}

    def add(self, root, without_root=False):
        """Sample the processes: `root` and its descendants, or only the descendants.

        Returns:
            CPU seconds of all processes ever seen; CPU seconds of the present ones, with their ended children;
            resident bytes; threads.
        """
        found = list_processes()
        entries = [(pid, found[pid]) for pid in list_tree(root, found) if pid != root or not without_root]
        for pid, entry in entries:
            self.seen[pid, entry[5]] = entry[4]
        cpu, memory, threads = (sum(entry[place] for _, entry in entries) for place in (1, 2, 3))  # pyrefly: ignore
        return sum(self.seen.values()), cpu, memory, threads


def read_reaped_cpu_s():
    """Return the CPU seconds of all reaped children of this process, including those of their own children."""
    times = os.times()
    return times.children_user + times.children_system


def measure_memory(root):
    """Return the bytes of `root` and its descendants; shared pages count once, as far as /proc can be read."""
    found = list_processes()
    total = 0
    for pid in list_tree(root, found):
        share = found[pid][2]
        try:
            with open("/proc/" + str(pid) + "/smaps_rollup", "rb") as file:
                for line in file:
                    if line.startswith(b"Pss:"):
                        share = int(line.split()[1]) * 1024
        except OSError:
            pass  # it ended, or may not be read
        total += share
    return total


def list_program_pids(root):
    """List the pids of a program without a PID namespace of its own: its tree, and orphans that kept its session.

    Only descendants of this process are listed, so that a reused pid does no harm.
    """
    found = list_processes()
    roots = [root, *(pid for pid, entry in found.items() if entry[6] == root)]
    return list_live_pids(roots, found) & list_live_pids([os.getpid()], found)


def list_descendants(root):
    """List the pids of the descendants of a process."""
    return list_live_pids([root], list_processes()) - {root}


def list_live_pids(roots, found):
    """List the pids of `roots` and their descendants in `found` (see `list_processes`), without zombies."""
    return {pid for each in roots for pid in list_tree(each, found) if not found[pid][7]}


def send_signal(signal, pids):
    """Send a signal to the processes that still exist."""
    for pid in pids:
        try:
            os.kill(pid, signal)
        except OSError:
            continue


def kill_all(find, most_s):
    """Send SIGKILL to the processes that `find` lists, again and again until it lists none.

    All are stopped (SIGSTOP) before any is killed, so that none starts another meanwhile: the number of processes that
    can run at once bounds the number of rounds. A process that forks and ends faster than it is found can escape; only
    a PID namespace contains such a process.

    Args:
        find: returns the pids to end, without zombies.
        most_s: most seconds to try.

    Returns:
        whether no process is left.
    """
    give_up = time.monotonic() + most_s
    while True:
        stopped = set()
        while (further := find() - stopped) and time.monotonic() < give_up:
            send_signal(19, further)
            stopped |= further
        if not stopped:
            return not further
        send_signal(9, stopped)
        if time.monotonic() >= give_up:
            return False


_COUNTERS = {
    "memory": (("memory.events", b"oom_kill"), ("memory/memory.oom_control", b"oom_kill")),
    "processes": (("pids.events", b"max"), ("pids/pids.events", b"max")),
}
"""The files and keys, by limit, in which a control group (version 2, version 1) counts kills and refusals."""


def read_kernel_counts():
    """Return, by limit, how often the kernel has enforced it in the control group that this process sees.

    Limits whose counter cannot be read are left out.
    """
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
