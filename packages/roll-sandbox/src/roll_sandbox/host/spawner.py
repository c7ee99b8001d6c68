"""The spawner: a small process that starts sandboxes for a manager, and ends right after it.

    manager ══ seqpacket socket ══ spawner ══ zygote ── slot ── agent      where the spawner is root
                                      └── fork, exec ──► bwrap ── agent    elsewhere, or on request

It is a process of its own because the manager is large (forking it copies page tables of gigabytes), has threads, and
may be killed: the socket then closes and the spawner ends every sandbox, removes the groups and mounts, and exits.

Messages (marshal):  ("image", name, plan) → ("image", name, directory or None, error)
                     ("forget", name): remove an image
                     ("zygote", arguments) with file descriptors: stderr_fd, code → ("zygote", error)
                     ("start", id, tree or None, arguments, layers, limits) with file descriptors: the agent's
                       line, stderr_fd, code → ("started", id, counters), later ("ended", id, status, error)
                     ("kill", id)
Its first message is ("ready", facts).

Invariants: those of `slots.py`; every "start" is answered by exactly one "ended", once nothing of the sandbox is left
or it is given up; if the zygote ends, the spawner ends.
"""

from __future__ import annotations

import _signal  # pyrefly: ignore[missing-import]
import marshal
import os
import select
import socket
import time

from roll_sandbox.host.cgroup import CgroupPool
from roll_sandbox.host.image import Images
from roll_sandbox.host.slots import Slot, Zygote

_OVERHEAD_BYTES = 32 * 2**20
"""Memory of bwrap and the agent, in addition to the sandbox's limit."""
_OVERHEAD_PROCESSES = 8
"""Processes of the slot or bwrap, the agent, the inits of the first programs, or a spare child with its init."""
_MESSAGE_BYTES = 1 << 17
_SLOT_USERS = 1 << 16
_STANDING_SLOTS = 4
"""Slots made when the zygote starts, so that the first sandboxes need not wait for their control groups."""
_FREE_SLOTS = 64
"""Most free slots with a process; the processes of further ones end with their sandboxes."""
_END_S = 5.0
_EMPTY_S = 10.0
"""How long a sandbox may take to end, and its control group to become empty. Otherwise its slot is not reused."""
_LOOK_MS = 5


def _first_user():
    """Return the first UID of slots: high, where no account is, but within this user namespace."""
    with open("/proc/self/uid_map") as file:
        known = sum(int(line.split()[2]) for line in file)
    return 0x6F000000 if known > 0x70000000 else max(known - _SLOT_USERS // 2, known // 2)


class Spawner:
    """The spawner; see the module."""

    def __init__(self, control):
        self.control = control
        self.is_root = os.geteuid() == 0
        self.groups = CgroupPool()
        self.images = Images() if self.is_root else None
        self.first_user = _first_user() if self.is_root else None
        self.zygote = None
        self.num_slots, self.free = 0, []
        self.lines, self.running = {}, {}
        """Slots, by the file descriptor of their socket, and by the id of their sandbox."""
        self.emptying, self.killed = [], []
        """Slots whose sandbox has ended, with a group that may not be empty yet; slots whose sandbox is to end."""
        self.wake = os.pipe()
        for end in self.wake:
            os.set_blocking(end, False)
        self.poll = select.poll()
        self.poll.register(self.control, select.POLLIN)
        self.poll.register(self.wake[0], select.POLLIN)
        _signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            _signal.signal(getattr(_signal, name), _signal.SIG_IGN)  # the manager decides, by closing the socket

    def serve(self):
        """Serve until the manager closes its end."""
        self.send("ready", {"groups": self.groups.available, "cpu": self.groups.count_cpu, "root": self.is_root})
        while True:
            for descriptor, _ in self.poll.poll(_LOOK_MS if self.emptying else 1000 if self.killed else None):
                if descriptor == self.wake[0]:
                    os.read(descriptor, 4096)
                elif descriptor in self.lines:
                    self.read_incoming(descriptor)
                elif self.zygote is not None and descriptor == self.zygote.line.fileno():
                    return  # the zygote has ended: it sends nothing after "ready"
                elif descriptor == self.control.fileno() and not self.handle():
                    return
            self.reap()
            self.check_ended()

    def send(self, *message):
        """Send a message to the manager, if it still exists."""
        try:
            self.control.send(marshal.dumps(message))
        except OSError:
            return

    def handle(self):
        """Handle one message, and return False at the end."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.control, _MESSAGE_BYTES, 8)
        except ConnectionResetError:  # the manager was killed before it had read everything
            return False
        if not data:
            return False
        name, *arguments = marshal.loads(data)
        try:
            getattr(self, "on_" + name)(descriptors, *arguments)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def on_image(self, _, name, plan):
        """Build a tree."""
        try:
            if self.images is None:
                raise OSError("only root can build a file system")
            self.send("image", name, self.images.build(name, plan), "")
        except OSError as error:
            self.send("image", name, None, str(error))

    def on_forget(self, _, name):
        """Remove a tree; sandboxes that are in it keep it."""
        if self.images is not None:
            self.images.forget(name)

    def on_zygote(self, descriptors, arguments):
        """Start the zygote, and the first slots in advance."""
        try:
            self.zygote = Zygote(arguments, *descriptors)
            self.poll.register(self.zygote.line, select.POLLIN)
            self.free += [self.new_slot() for _ in range(_STANDING_SLOTS)]
            self.send("zygote", "")
        except OSError as error:
            self.send("zygote", str(error))

    def new_slot(self):
        """Make another slot."""
        number = self.num_slots
        group = self.groups.make(number) if self.groups.available else None
        slot = Slot(number, group, None if self.first_user is None else self.first_user + number % _SLOT_USERS)
        self.num_slots += 1
        self.open(slot)
        return slot

    def open(self, slot):
        """Start a process for the slot, if there is a zygote."""
        if self.zygote is not None and slot.line is None:
            line = slot.open(self.zygote)
            self.lines[line.fileno()] = slot
            self.poll.register(line, select.POLLIN)

    def on_start(self, descriptors, identity, tree, arguments, layers, limits):
        """Start a sandbox."""
        slot = None
        try:
            if len(descriptors) < 3:
                raise OSError("the spawner has reached its limit of open files (`ulimit -n`)")
            slot = self.free.pop() if self.free else self.new_slot()
            group = slot.group
            if group is not None:
                group.set_limits(
                    limits["max_processes"] + _OVERHEAD_PROCESSES, limits["memory_bytes"] + _OVERHEAD_BYTES
                )
            if tree is not None and self.zygote is not None:
                self.open(slot)
                slot.start(tree, *descriptors[:2])
            else:
                slot.start_bwrap(arguments, layers, *descriptors)
        except OSError as error:
            if slot is not None:
                self.free.insert(0, slot)
            self.send("ended", identity, 1, str(error))
            return
        slot.identity = identity
        self.running[identity] = slot
        self.send("started", identity, group.counters() if group is not None else None)

    def on_kill(self, _, identity):
        """End a sandbox."""
        slot = self.running.get(identity)
        if slot is not None:
            slot.kill()
            if slot not in self.killed:
                slot.give_up = time.monotonic() + _EMPTY_S
                self.killed.append(slot)

    def read_incoming(self, descriptor):
        """Read from a slot's process: the end of its sandbox, or the end of the process itself if it was killed."""
        slot = self.lines[descriptor]
        try:
            data = slot.line.recv(64)
        except OSError:
            data = b""
        if data:
            status, slot.own_pid = marshal.loads(data)
            if status is not None:
                self.ended(slot, status)
            return
        self.close_slot(slot)
        if slot in self.free:
            self.free.remove(slot)
        if slot.identity in self.running:
            self.ended(slot, -9, error="the process that started the sandbox was killed", usable=False)

    def ended(self, slot, status, *, error="", usable=True):
        """Record the end of a sandbox; processes left in its control group are killed."""
        del self.running[slot.identity]
        slot.pid, slot.end = 0, (status, error, usable)
        slot.give_up = time.monotonic() + _EMPTY_S
        self.emptying.append(slot)
        self.check_ended()

    def check_ended(self):
        """Free the slots whose sandboxes have ended with all their processes; retire the slots in which that fails."""
        now = time.monotonic()
        for slot in [slot for slot in self.killed if slot.identity not in self.running or now > slot.give_up]:
            self.killed.remove(slot)
            if slot.identity in self.running:
                self.ended(slot, -9, error="the processes of the sandbox do not end", usable=False)
        for slot in list(self.emptying):
            left = slot.kill_leftovers()
            if left and now < slot.give_up:
                continue
            self.emptying.remove(slot)
            status, error, usable = slot.end
            self.send(
                "ended", slot.identity, status, error or ("the processes of the sandbox do not end" if left else "")
            )
            slot.identity = None
            if usable and not left:
                self.release_slot(slot)
            else:
                self.close_slot(slot)

    def release_slot(self, slot):
        """Return a slot to the free list."""
        if len(self.free) >= _FREE_SLOTS:
            self.close_slot(slot)
            self.free.insert(0, slot)
        else:
            self.free.append(slot)

    def close_slot(self, slot):
        """End the slot's process."""
        if slot.line is not None:
            del self.lines[slot.line.fileno()]
            self.poll.unregister(slot.line)
            slot.line.close()
            slot.line = None

    def reap(self):
        """Reap bwrap processes that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.zygote is not None and pid == self.zygote.pid:
                self.zygote.pid = 0
            for slot in [slot for slot in self.running.values() if slot.pid == pid]:
                self.ended(slot, status)

    def close(self):
        """End every sandbox, the zygote, and all groups and mounts."""
        for slot in list(self.running.values()):
            slot.kill()
        for descriptor in (self.control, self.wake[0], *([self.zygote.line] if self.zygote is not None else ())):
            self.poll.unregister(descriptor)
        give_up = time.monotonic() + _END_S
        while (self.running or self.emptying) and time.monotonic() < give_up:
            self.reap()
            self.check_ended()
            for descriptor, _ in self.poll.poll(1):
                if descriptor in self.lines:
                    self.read_incoming(descriptor)
        if self.zygote is not None:
            self.zygote.close()
        self.groups.close()
        if self.images is not None:
            self.images.close()


def main():
    """Serve the manager, whose socket is file descriptor 3."""
    spawner = Spawner(socket.socket(fileno=3))
    try:
        spawner.serve()
    finally:
        spawner.close()
