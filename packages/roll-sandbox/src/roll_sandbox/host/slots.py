"""Placement slots for sandboxes, seen from the spawner: a UID and a control group each, and how sandboxes start there.

A sandbox is started by the slot's own process (`zygote.py`), or by bwrap, forked and executed here. Invariants: a slot
is used by at most one sandbox at a time; it is free again only after all processes of its sandbox are reaped and its
control group is empty; a slot whose process was killed, or whose group does not become empty, is never used again.
"""

from __future__ import annotations

import _signal  # pyrefly: ignore[missing-import]
import marshal
import os
import socket

from roll_sandbox.agent import kernel
from roll_sandbox.host import idmap

ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
}
"""Environment of agents, not of programs. The last two let the C library overwrite freed memory (`Agent.configure`)."""
_START_S = 20.0


def execute(descriptors, arguments):
    """Replace this fork by a program with `descriptors` as its 0, 1, 2, …, which ends with the spawner."""
    for name in ("SIGCHLD", "SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGXFSZ"):
        _signal.signal(getattr(_signal, name), _signal.SIG_DFL)
    kernel.die_with_parent()
    high = [os.dup(each) for each in descriptors]
    while min(high) < len(high):
        high = [os.dup(each) for each in high]
    for new, old in enumerate(high):
        os.dup2(old, new)
    os.closerange(len(high), 1 << 16)
    os.execve(arguments[0], arguments, ENVIRONMENT)


def fork(function, *arguments):
    """Fork a child that calls `function` and exits, and return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _signal.set_wakeup_fd(-1)
        function(*arguments)
    except BaseException as error:
        os.write(2, ("roll-sandbox: " + str(error) + "\n").encode())
    os._exit(125)


class Zygote:
    """The zygote, which forks the processes of slots. `pid` is 0 once it is reaped."""

    def __init__(self, arguments, stderr_fd, code):
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = fork(execute, (theirs.fileno(), theirs.fileno(), stderr_fd, code), arguments)
        self.line.settimeout(_START_S)
        try:
            ready = self.line.recv(16) == b"ready"
        except OSError:
            ready = False
        if not ready:
            self.close()
            raise OSError("the zygote does not start")
        self.line.settimeout(None)

    def slot(self, groups, user):
        """Fork a new slot's process, and return a socket to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self.line, [marshal.dumps((groups, user))], [theirs.fileno()])
        return ours

    def close(self):
        """End the zygote, and with it every slot's process."""
        self.line.close()
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)


class Slot:
    """A placement slot. `line`: socket to its process, if it has one. `pid`: of bwrap, if that started the sandbox."""

    def __init__(self, number, group, user):
        self.number, self.group, self.user = number, group, user
        self.line: socket.socket = None  # pyrefly: ignore[bad-assignment]  (there is one wherever it is used)
        self.pid = 0
        self.identity = None
        self.end = (0, "", True)
        """End of the last sandbox: its status, its error, and whether the slot can be used again."""
        self.own_pid = 0
        """Pid of the slot's process, which is in the control group as well; 0 until it has reported it."""
        self.give_up = 0.0
        """Time by which a sandbox that is being ended must have ended, and its group must be empty."""

    def open(self, zygote):
        """Start a process for the slot, and return the socket to it."""
        groups = [directory + "/cgroup.procs" for directory in self.directories()]
        self.line, self.own_pid = zygote.slot(groups, self.user), 0
        return self.line

    def directories(self):
        """Return the directories of the slot's control group."""
        return sorted(set(self.group.directories.values())) if self.group is not None else []

    def counter(self):
        """Return the file descriptor of the slot's CPU counter in a list; empty without a counter."""
        return [self.group.cpu] if self.group is not None and self.group.cpu >= 0 else []

    def start(self, tree, line, stderr_fd):
        """Start a sandbox in the slot's process.

        Raises:
            OSError: the slot's process is gone.
        """
        socket.send_fds(self.line, [marshal.dumps(("start", tree))], [line, stderr_fd, *self.counter()])

    def start_bwrap(self, arguments, layers, line, stderr_fd, code):
        """Start a sandbox with bwrap. Descriptors: 0, 1 the agent's socket, 2 stderr, 3 its code, 4 the CPU counter.

        Args:
            arguments: bwrap's command line.
            layers: source and target of each layer of an image.
            line: descriptor of the agent's socket.
            stderr_fd: descriptor for error messages.
            code: descriptor of the agent's code.
        """
        self.pid = fork(self._become_bwrap, arguments, layers, (line, line, stderr_fd, code, *self.counter()))

    def _become_bwrap(self, arguments, layers, descriptors):
        os.setsid()
        if self.group is not None:
            self.group.enter()
        if self.user is not None:
            if layers:
                kernel.unshare(kernel.CLONE_NEWNS)
                kernel.mount("none", "/", None, kernel.PRIVATE)
                idmap.mount_idmapped(layers, self.user)
            os.setgroups([])
            os.setresgid(self.user, self.user, self.user)
            os.setresuid(self.user, self.user, self.user)
        execute(descriptors, arguments)

    def kill_leftovers(self):
        """Kill the processes left in the control group of an ended sandbox, and return their pids."""
        if self.group is None or (self.line is not None and not self.own_pid):
            return []
        left = [pid for pid in self.group.members() if self.line is None or pid != self.own_pid]
        for pid in left:
            try:
                os.kill(pid, 9)
            except OSError:
                continue
        return left

    def kill(self):
        """End the sandbox by killing its first process, the agent."""
        if self.pid and self.line is None and self.group is not None and self.group.kill():
            return
        if not self.pid:
            try:
                self.line.send(marshal.dumps(("kill",)))
            except OSError:
                return  # the slot's process is gone, and with it the sandbox
            return
        try:
            with open(f"/proc/{self.pid}/task/{self.pid}/children") as file:
                children = file.read().split()
        except OSError:
            children = []
        for pid in children or [self.pid]:  # bwrap exits when its sandbox has no processes left
            try:
                os.kill(int(pid), 9)
            except OSError:
                continue
