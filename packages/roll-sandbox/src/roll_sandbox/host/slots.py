"""Slots of the spawner: each has a UID and a control group, and starts one sandbox after another.

A sandbox is started by the slot's process (`zygote.py`), or by bwrap, which is forked and executed here.

Invariants:
    - at most one sandbox at a time uses a slot;
    - a slot is free again only after all processes of its sandbox are reaped and its control group is empty;
    - a slot whose process was killed, or whose group does not become empty, is never used again.
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
"""Environment of agents, not of programs. The last two allow the C library to overwrite freed memory
(`Agent.configure`)."""
_START_TIMEOUT_S = 20.0


def exec_program(descriptors, arguments):
    """Execute a program in this fork of the spawner. The program receives `descriptors` as file descriptors 0, 1, 2, …,
    and is killed when the spawner ends.
    """
    # exec resets handlers, but ignored signals stay ignored (signal(7)).
    for name in ("SIGCHLD", "SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGXFSZ"):
        _signal.signal(getattr(_signal, name), _signal.SIG_DFL)
    kernel.set_parent_death_signal()
    # First move all above the new numbers: dup2 must not overwrite a descriptor that is still needed.
    high = [os.dup(each) for each in descriptors]
    while min(high) < len(high):
        high = [os.dup(each) for each in high]
    for new, old in enumerate(high):
        os.dup2(old, new)
    os.closerange(len(high), 1 << 16)
    os.execve(arguments[0], arguments, ENVIRONMENT)


def fork(function, *arguments):
    """Fork a child that calls `function` and exits; return the child's pid."""
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
    """The spawner's end of the zygote, which forks the processes of slots. `pid` is 0 once the zygote was reaped."""

    def __init__(self, arguments, stderr_fd, code):
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = fork(exec_program, (theirs.fileno(), theirs.fileno(), stderr_fd, code), arguments)
        self.connection.settimeout(_START_TIMEOUT_S)
        try:
            ready = self.connection.recv(16) == b"ready"
        except OSError:
            ready = False
        if not ready:
            self.close()
            raise OSError("the zygote failed to start")
        self.connection.settimeout(None)

    def fork_slot(self, groups, user):
        """Send the zygote a request to fork a process for a new slot, and return a socket to this process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self.connection, [marshal.dumps((groups, user))], [theirs.fileno()])
        return ours

    def close(self):
        """End the zygote, which also ends the processes of all slots."""
        self.connection.close()
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)


class Slot:
    """A control group and a UID, in which one sandbox at a time runs.

    `connection` is the socket to the slot's process, if it has one; `pid` is the pid of bwrap, if bwrap started the
    sandbox.
    """

    def __init__(self, number, group, user):
        self.number, self.group, self.user = number, group, user
        self.connection: socket.socket = None  # pyrefly: ignore[bad-assignment]  (set before it is used)
        self.pid = 0
        self.identity = None
        self.end = (0, "", True)
        """The end of the last sandbox: its status, its error, and whether the slot can be used again."""
        self.own_pid = 0
        """Pid of the slot's process, which is also in the control group; 0 until the process has reported it."""
        self.end_deadline = 0.0
        """Time by which a sandbox that is being ended must have ended, with an empty control group."""

    def start_process(self, zygote):
        """Start a process for the slot, and return a socket that is connected to the process."""
        groups = [directory + "/cgroup.procs" for directory in self.list_directories()]
        self.connection, self.own_pid = zygote.fork_slot(groups, self.user), 0
        return self.connection

    def list_directories(self):
        """Return the directories of the slot's control group."""
        return sorted(set(self.group.directories.values())) if self.group is not None else []

    def list_counters(self):
        """Return a list with the file descriptor of the slot's CPU counter; empty if there is no counter."""
        return [self.group.cpu] if self.group is not None and self.group.cpu >= 0 else []

    def start_sandbox(self, tree, agent_socket, stderr_fd):
        """Start a sandbox in the slot's process.

        Raises:
            OSError: the slot's process has ended.
        """
        socket.send_fds(
            self.connection, [marshal.dumps(("start", tree))], [agent_socket, stderr_fd, *self.list_counters()]
        )

    def start_bwrap(self, arguments, layers, agent_socket, stderr_fd, code):
        """Start a sandbox with bwrap. The agent gets its socket as descriptors 0 and 1, stderr as 2, its code as 3, and
        the CPU counter as 4.

        Args:
            arguments: bwrap's command line.
            layers: source and target of each layer of an image.
            agent_socket: descriptor of the agent's socket.
            stderr_fd: descriptor for error messages.
            code: descriptor of the agent's code.
        """
        self.pid = fork(
            self._exec_bwrap, arguments, layers, (agent_socket, agent_socket, stderr_fd, code, *self.list_counters())
        )

    def _exec_bwrap(self, arguments, layers, descriptors):
        os.setsid()
        if self.group is not None:
            self.group.enter()
        # Groups and mounts need root, so the UID is changed last.
        if self.user is not None:
            if layers:
                kernel.unshare(kernel.CLONE_NEWNS)
                kernel.mount("none", "/", None, kernel.PRIVATE)
                idmap.mount_idmapped(layers, self.user)
            os.setgroups([])
            os.setresgid(self.user, self.user, self.user)
            os.setresuid(self.user, self.user, self.user)
        exec_program(descriptors, arguments)

    def kill_leftovers(self):
        """Kill the processes left in the control group after its sandbox has ended, and return their pids."""
        # The slot's process is also in the group; until it has reported its pid, it looks like a leftover.
        if self.group is None or (self.connection is not None and not self.own_pid):
            return []
        left = [pid for pid in self.group.list_pids() if self.connection is None or pid != self.own_pid]
        for pid in left:
            try:
                os.kill(pid, 9)
            except OSError:
                continue
        return left

    def kill(self):
        """End the sandbox by killing its first process, the agent."""
        # With a zygote, the group also contains the slot's process, which must survive.
        if self.pid and self.connection is None and self.group is not None and self.group.kill():
            return
        if not self.pid:
            try:
                self.connection.send(marshal.dumps(("kill",)))
            except OSError:
                return  # the slot's process has ended, and its sandbox with it
            return
        try:
            with open(f"/proc/{self.pid}/task/{self.pid}/children") as file:
                children = file.read().split()
        except OSError:
            children = []
        for pid in children or [self.pid]:  # bwrap exits when its sandbox has no process left
            try:
                os.kill(int(pid), 9)
            except OSError:
                continue
