"""Lists the processes of a sandbox, reads their usage from /proc, and ends them if there is no PID namespace."""

from __future__ import annotations

import os
import time

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CPU_COUNTER_FD = 4
"""File descriptor of the CPU counter of the sandbox's control group in an agent, if the host has such a counter."""
_COUNTER_PATHS = ("cpu.stat", "cpuacct/cpuacct.usage", "cpu,cpuacct/cpuacct.usage")
"""Paths of CPU counters below /sys/fs/cgroup, at which an agent sees its own group."""


def list_processes():
    """List the processes that /proc shows.

    Returns:
        for each pid: parent, CPU seconds including ended children, resident bytes, threads, CPU seconds without
        children, start time, session, whether it has ended (a zombie).
    """
    processes = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/" + name + "/stat", "rb", 0) as file:
                text = file.read(4096)
        except OSError:
            continue  # it ended meanwhile
        # The name of the command, in parentheses, may itself contain spaces and parentheses (proc(5)).
        fields = text[text.rindex(b")") + 2 :].split()
        cpu = sum(map(int, fields[11:15])) / _TICKS_PER_S
        own_cpu = sum(map(int, fields[11:13])) / _TICKS_PER_S
        memory, threads = int(fields[21]) * _PAGE_BYTES, int(fields[17])
        ended = fields[0] in (b"Z", b"X") and threads < 2  # with more threads, only the first one has ended
        processes[int(name)] = (int(fields[1]), cpu, memory, threads, own_cpu, fields[19], int(fields[3]), ended)
    return processes


def list_tree_pids(root, processes=None):
    """Return the pids of `root` and of its descendants that /proc shows."""
    processes = list_processes() if processes is None else processes
    children = {}
    for pid, entry in processes.items():
        children.setdefault(entry[0], []).append(pid)
    result, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        if pid in processes:
            result.append(pid)
        waiting += children.get(pid, ())
    return result


def open_cpu_counter():
    """Return the file descriptor of the CPU counter of this process's control group; -1 if there is no counter."""
    for name in _COUNTER_PATHS:
        try:
            return os.open("/sys/fs/cgroup/" + name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return -1


def read_cpu_s(counter):
    """Return the CPU seconds of all processes that were ever in the control group of a counter."""
    text = os.pread(counter, 64, 0)  # version 2: "usage_usec 1234", version 1: nanoseconds
    return int(text.split()[1]) / 1e6 if text.startswith(b"usage_usec") else int(text) / 1e9


class CpuSampler:
    """Measures the CPU seconds of a process tree by sampling its processes, for systems without a CPU counter.

    The CPU time of a parent includes only children for which it has waited, and a program can avoid waiting.
    """

    def __init__(self):
        self.seen = {}

    def sample(self, root, without_root=False):
        """Sample `root` and its descendants, or only the descendants if `without_root` is true.

        Returns:
            CPU seconds of all processes ever seen; CPU seconds of the current processes and their ended children;
            resident bytes; threads.
        """
        processes = list_processes()
        entries = [(pid, processes[pid]) for pid in list_tree_pids(root, processes) if pid != root or not without_root]
        for pid, entry in entries:
            # The key includes the start time, since the pid of an ended process may be reused.
            self.seen[pid, entry[5]] = entry[4]
        cpu, memory, threads = (sum(entry[place] for _, entry in entries) for place in (1, 2, 3))  # pyrefly: ignore
        return sum(self.seen.values()), cpu, memory, threads


def read_reaped_cpu_s():
    """Return the CPU seconds of all reaped children of this process, including their reaped children."""
    times = os.times()
    return times.children_user + times.children_system


def measure_memory(root):
    """Return the memory of `root` and its descendants in bytes. Shared pages are counted once if smaps can be read."""
    processes = list_processes()
    total = 0
    for pid in list_tree_pids(root, processes):
        share = processes[pid][2]
        try:
            with open("/proc/" + str(pid) + "/smaps_rollup", "rb") as file:
                for line in file:
                    # Pss divides each shared page by the number of its users, so the sum counts every page once.
                    if line.startswith(b"Pss:"):
                        share = int(line.split()[1]) * 1024
        except OSError:
            pass  # the process has ended, or may not be read
        total += share
    return total


def list_program_pids(root):
    """List the pids of a program without its own PID namespace: its tree, and orphans that are still in its session.

    Only descendants of this process are listed, in case the program's pid was reused.
    """
    processes = list_processes()
    roots = [root, *(pid for pid, entry in processes.items() if entry[6] == root)]
    return list_live_pids(roots, processes) & list_live_pids([os.getpid()], processes)


def list_descendant_pids(root):
    """Return the pids of the descendants of a process, without zombies."""
    return list_live_pids([root], list_processes()) - {root}


def list_live_pids(roots, processes):
    """Return the pids of `roots` and their descendants in `processes` (see `list_processes`), without zombies."""
    return {pid for each in roots for pid in list_tree_pids(each, processes) if not processes[pid][7]}


def send_signal(signal, pids):
    """Send a signal to each process in `pids` that still exists."""
    for pid in pids:
        try:
            os.kill(pid, signal)
        except OSError:
            continue


def kill_all(list_pids, timeout_s):
    """Send SIGKILL to the processes that `list_pids` lists, repeatedly until it lists none.

    All listed processes are stopped (SIGSTOP) before any process is killed, so that they cannot start other processes
    in the meantime. The maximum number of live processes bounds the number of rounds. A process that forks and ends
    before it is listed can escape; only a PID namespace prevents this.

    Args:
        list_pids: function that returns the pids of the processes to end, without zombies.
        timeout_s: maximum seconds to keep trying.

    Returns:
        whether all processes have ended.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        stopped = set()
        while (further := list_pids() - stopped) and time.monotonic() < deadline:
            send_signal(19, further)
            stopped |= further
        if not stopped:
            return not further
        send_signal(9, stopped)
        if time.monotonic() >= deadline:
            return False


_KERNEL_COUNTERS = {
    "memory": (("memory.events", b"oom_kill"), ("memory/memory.oom_control", b"oom_kill")),
    "processes": (("pids.events", b"max"), ("pids/pids.events", b"max")),
}
"""Files and keys in which a control group (version 2, version 1) counts kills and refused forks, by limit."""


def read_kernel_counts():
    """Return how often the kernel has enforced each limit in the control group that this process sees.

    Limits whose counter cannot be read are omitted.
    """
    counts_by_limit = {}
    for limit, places in _KERNEL_COUNTERS.items():
        for path, word in places:
            try:
                with open("/sys/fs/cgroup/" + path, "rb") as file:
                    counts = dict(line.split()[:2] for line in file)
                counts_by_limit[limit] = int(counts[word])
                break
            except (OSError, KeyError, ValueError):
                continue
    return counts_by_limit
