"""The spawner: a small process that forks sandboxes for a manager and outlives it by an instant.

    manager ══ seqpacket socket ══ spawner ── fork ──► slot: control group, user ── exec ──► bwrap ──► agent

A process of its own, because the manager's is large (forking it copies page tables of gigabytes), has threads, and
may be killed: the socket then closes and the spawner ends every sandbox, removes the groups and mounts, and ends.

Messages (marshal):  ("image", name, plan) → ("image", name, directory or None, error)
                     ("start", id, arguments, limits) with file descriptors → ("ended", id, status), later
                     ("kill", id)
First of all it says ("ready", facts).

Invariants: a slot is one user and one control group, used by at most one sandbox at a time; a slot is free again
only after its sandbox's processes are reaped.
"""

from __future__ import annotations

import _signal  # pyrefly: ignore[missing-import]
import array
import marshal
import os
import select
import socket
import time

from roll.sandbox.agent import kernel
from roll.sandbox.host.cgroup import Groups
from roll.sandbox.host.image import Images

_OVERHEAD_BYTES = 32 * 2**20
"""Memory of bwrap and the agent, on top of what the sandbox may use."""
_OVERHEAD_PROCESSES = 4
_MESSAGE_BYTES = 1 << 17
_SLOT_USERS = 1 << 16
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
}
"""Of agents; programs never see it. The last two let the C library overwrite all that is freed: `Agent.configure`."""
_END_S = 5.0


def _first_user():
    """Where the users of slots begin: high, where no account is, but within what this user namespace knows."""
    with open("/proc/self/uid_map") as file:
        known = sum(int(line.split()[2]) for line in file)
    return 0x6F000000 if known > 0x70000000 else max(known - _SLOT_USERS // 2, known // 2)


class Spawner:
    """See the module."""

    def __init__(self, control):
        self.control = control
        self.is_root = os.geteuid() == 0
        self.groups = Groups()
        self.images = Images() if self.is_root else None
        self.first_user = _first_user() if self.is_root else None
        self.slots, self.free, self.running = {}, [], {}
        self.wake = os.pipe()
        for end in self.wake:
            os.set_blocking(end, False)
        _signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            _signal.signal(getattr(_signal, name), _signal.SIG_IGN)  # the manager decides, by closing the socket

    def serve(self):
        """Until the manager closes its end."""
        self.say("ready", {"groups": self.groups.available, "root": self.is_root})
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.wake[0], select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self.wake[0]:
                    os.read(descriptor, 4096)
                elif not self.handle():
                    return
            self.reap()

    def say(self, *message):
        """To the manager, if it is still there."""
        try:
            self.control.send(marshal.dumps(message))
        except OSError:
            return

    def handle(self):
        """One message; False at the end."""
        size = array.array("i").itemsize
        data, ancillary, _, _ = self.control.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(8 * size))
        descriptors = array.array("i")
        for _, _, content in ancillary:
            descriptors.frombytes(content[: len(content) // size * size])
        if not data:
            return False
        name, *arguments = marshal.loads(data)
        try:
            getattr(self, "on_" + name)(list(descriptors), *arguments)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def on_image(self, _, name, plan):
        """Build a tree."""
        try:
            if self.images is None:
                raise OSError("only root can build one")
            self.say("image", name, self.images.build(name, plan), "")
        except OSError as error:
            self.say("image", name, None, str(error))

    def on_start(self, descriptors, identity, arguments, limits):
        """Fork a sandbox."""
        try:
            slot = self.free.pop() if self.free else len(self.slots)
            if slot not in self.slots:
                self.slots[slot] = self.groups.make(slot) if self.groups.available else None
            group = self.slots[slot]
            if group is not None:
                group.bound(limits["max_processes"] + _OVERHEAD_PROCESSES, limits["memory_bytes"] + _OVERHEAD_BYTES)
            pid = os.fork()
        except OSError as error:
            self.say("ended", identity, 1, str(error))
            return
        if pid == 0:
            self.become_sandbox(slot, group, descriptors, arguments)
        self.running[pid] = (identity, slot)
        self.say("started", identity, group.counters() if group is not None else None)

    def become_sandbox(self, slot, group, descriptors, arguments):
        """In the child."""
        try:
            _signal.set_wakeup_fd(-1)
            for name in ("SIGCHLD", "SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGXFSZ"):
                _signal.signal(getattr(_signal, name), _signal.SIG_DFL)
            os.setsid()
            if group is not None:
                group.enter()
            if self.is_root:
                user = self.first_user + slot % _SLOT_USERS
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            kernel.die_with_parent()  # after setresuid, which forgets it
            # 0 and 1: the agent's socket; 2: complaints; 3: its code.
            high = [os.dup(each) for each in descriptors]
            while min(high) <= 3:
                high = [os.dup(each) for each in high]
            for new, old in enumerate((high[0], high[0], high[1], high[2])):
                os.dup2(old, new)
            os.closerange(4, 1 << 16)
            os.execve(arguments[0], arguments, _ENVIRONMENT)
        except BaseException as error:
            os.write(2, ("roll sandbox: " + str(error) + "\n").encode())
        os._exit(125)

    def on_kill(self, _, identity):
        """End a sandbox: with the agent, its first process, ends everything in it; bwrap waits for that."""
        for pid, (running, _slot) in self.running.items():
            if running == identity:
                kill_sandbox(pid)

    def reap(self):
        """Collect ended sandboxes, and free their slots."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.running:
                identity, slot = self.running.pop(pid)
                self.free.append(slot)
                self.say("ended", identity, status, "")

    def close(self):
        """End everything."""
        for pid in self.running:
            kill_sandbox(pid)
        give_up = time.monotonic() + _END_S
        while self.running and time.monotonic() < give_up:
            self.reap()
            time.sleep(0.001)
        self.groups.close()
        if self.images is not None:
            self.images.close()


def kill_sandbox(bwrap):
    """SIGKILL for the agent below `bwrap`, so that `bwrap` ends when nothing of it is left; else for `bwrap`."""
    try:
        with open(f"/proc/{bwrap}/task/{bwrap}/children") as file:
            children = file.read().split()
    except OSError:
        children = []
    for pid in children or [bwrap]:
        try:
            os.kill(int(pid), 9)
        except OSError:
            continue


def main():
    """File descriptor 3 is the manager's socket."""
    spawner = Spawner(socket.socket(fileno=3))
    try:
        spawner.serve()
    finally:
        spawner.close()
