"""The spawner: a small process that starts sandboxes for a manager, and ends when the manager ends.

    manager ══ seqpacket socket ══ spawner ══ zygote ── slot ── agent      where the spawner is root
                                      └── fork, exec ──► bwrap ── agent    elsewhere, or on request

It is a separate process because the manager is large (forking it would copy page tables of gigabytes), has threads, and
may be killed. If the manager is killed, the socket closes; then the spawner ends every sandbox, removes the groups and
mounts, and exits.

Messages (marshal):  ("image", name, plan) → ("image", name, directory or None, error)
                     ("forget", name): remove an image
                     ("zygote", arguments) with file descriptors: stderr_fd, code → ("zygote", error)
                     ("start", id, tree or None, arguments, layers, limits) with file descriptors: the agent's
                       line, stderr_fd, code → ("started", id, counters), later ("ended", id, status, error)
                     ("kill", id)
Its first message is ("ready", facts).

Invariants, in addition to those of `slots.py`:
    - every "start" is answered by exactly one "ended", after nothing of the sandbox is left or ending it has failed;
    - if the zygote ends, the spawner ends.
"""

from __future__ import annotations

import _signal  # pyrefly: ignore[missing-import]
import marshal
import os
import select
import socket
import time

from roll_sandbox.host.cgroup import CgroupPool
from roll_sandbox.host.image import FileSystemTrees
from roll_sandbox.host.slots import Slot, Zygote

_OVERHEAD_BYTES = 32 * 2**20
"""Bytes for bwrap and the agent, in addition to the sandbox's memory limit."""
_OVERHEAD_PROCESSES = 8
"""Processes in addition to the sandbox's limit: the slot or bwrap, the agent, and the inits of the first programs or a
spare child with its init."""
_MESSAGE_BYTES = 1 << 17
_NUM_SLOT_USERS = 1 << 16
_NUM_INITIAL_SLOTS = 4
"""Number of slots created when the zygote starts, so that the first sandboxes do not wait for control groups."""
_MAX_FREE_SLOTS = 64
"""Maximum number of free slots that keep their processes; the processes of further slots end with their sandboxes."""
_END_TIMEOUT_S = 5.0
_EXIT_TIMEOUT_S = 10.0
"""Seconds that a sandbox has to end with an empty control group; otherwise its slot is not reused."""
_POLL_MS = 5


def _find_first_uid():
    """Return the first UID of slots: a high number, without an account, that exists in this user namespace."""
    with open("/proc/self/uid_map") as file:
        num_users = sum(int(line.split()[2]) for line in file)
    return 0x6F000000 if num_users > 0x70000000 else max(num_users - _NUM_SLOT_USERS // 2, num_users // 2)


class Spawner:
    """Starts and ends sandboxes on request of the manager."""

    def __init__(self, control):
        self.control = control
        self.is_root = os.geteuid() == 0
        self.groups = CgroupPool()
        self.trees = FileSystemTrees() if self.is_root else None
        self.first_user = _find_first_uid() if self.is_root else None
        self.zygote = None
        self.num_slots, self.free = 0, []
        self.connections, self.running = {}, {}
        """Slots, by the file descriptor of their socket, and by the id of their sandbox."""
        self.emptying, self.killed = [], []
        """Slots whose sandbox has ended, but whose group may not be empty yet; slots whose sandbox is being ended."""
        self.wake = os.pipe()
        for end in self.wake:
            os.set_blocking(end, False)
        self.poll = select.poll()
        self.poll.register(self.control, select.POLLIN)
        self.poll.register(self.wake[0], select.POLLIN)
        _signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            _signal.signal(getattr(_signal, name), _signal.SIG_IGN)  # only the manager ends it, by closing the socket

    def serve(self):
        """Handle messages until the manager closes the socket or the zygote ends."""
        self.send("ready", {"groups": self.groups.is_available, "cpu": self.groups.counts_cpu, "root": self.is_root})
        while True:
            # No event reports that the last process of a control group has ended, so such groups are polled.
            for descriptor, _ in self.poll.poll(_POLL_MS if self.emptying else 1000 if self.killed else None):
                if descriptor == self.wake[0]:
                    os.read(descriptor, 4096)
                elif descriptor in self.connections:
                    self.read_incoming(descriptor)
                elif self.zygote is not None and descriptor == self.zygote.connection.fileno():
                    return  # the zygote has ended, since it sends nothing after "ready"
                elif descriptor == self.control.fileno() and not self.handle_message():
                    return
            self.reap()
            self.free_ended_slots()

    def send(self, *message):
        """Send a message to the manager, if it still exists."""
        try:
            self.control.send(marshal.dumps(message))
        except OSError:
            return

    def handle_message(self):
        """Handle one message; return False if the manager has closed the socket."""
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
        """Build the file-system tree `name`, and send its directory or the error to the manager."""
        try:
            if self.trees is None:
                raise OSError("creating a file system requires root privileges")
            self.send("image", name, self.trees.build_tree(name, plan), "")
        except OSError as error:
            self.send("image", name, None, str(error))

    def on_forget(self, _, name):
        """Remove the file-system tree `name`; sandboxes that run in it can still use it."""
        if self.trees is not None:
            self.trees.remove_tree(name)

    def on_zygote(self, descriptors, arguments):
        """Start the zygote and the first slots, and report the result to the manager."""
        try:
            self.zygote = Zygote(arguments, *descriptors)
            self.poll.register(self.zygote.connection, select.POLLIN)
            self.free += [self.add_slot() for _ in range(_NUM_INITIAL_SLOTS)]
            self.send("zygote", "")
        except OSError as error:
            self.send("zygote", str(error))

    def add_slot(self):
        """Create another slot, and return it."""
        number = self.num_slots
        group = self.groups.make_group(number) if self.groups.is_available else None
        slot = Slot(number, group, None if self.first_user is None else self.first_user + number % _NUM_SLOT_USERS)
        self.num_slots += 1
        self.start_slot_process(slot)
        return slot

    def start_slot_process(self, slot):
        """Start a process for the slot, if there is a zygote."""
        if self.zygote is not None and slot.connection is None:
            connection = slot.start_process(self.zygote)
            self.connections[connection.fileno()] = slot
            self.poll.register(connection, select.POLLIN)

    def on_start(self, descriptors, identity, tree, arguments, layers, limits):
        """Start a sandbox in a free or new slot, and report the result to the manager."""
        slot = None
        try:
            if len(descriptors) < 3:  # the kernel drops descriptors beyond the limit (unix(7), MSG_CTRUNC)
                raise OSError("the spawner has reached its limit on open files (`ulimit -n`)")
            slot = self.free.pop() if self.free else self.add_slot()
            group = slot.group
            if group is not None:
                group.set_limits(
                    limits["max_processes"] + _OVERHEAD_PROCESSES, limits["memory_bytes"] + _OVERHEAD_BYTES
                )
            if tree is not None and self.zygote is not None:
                self.start_slot_process(slot)
                slot.start_sandbox(tree, *descriptors[:2])
            else:
                slot.start_bwrap(arguments, layers, *descriptors)
        except OSError as error:
            if slot is not None:
                self.free.insert(0, slot)
            self.send("ended", identity, 1, str(error))
            return
        slot.identity = identity
        self.running[identity] = slot
        self.send("started", identity, group.list_counters() if group is not None else None)

    def on_kill(self, _, identity):
        """Kill a sandbox, unless it has already ended."""
        slot = self.running.get(identity)
        if slot is not None:
            slot.kill()
            if slot not in self.killed:
                slot.end_deadline = time.monotonic() + _EXIT_TIMEOUT_S
                self.killed.append(slot)

    def read_incoming(self, descriptor):
        """Handle a message of a slot's process (slot ready, or sandbox ended); close the slot if its process has
        ended."""
        slot = self.connections[descriptor]
        try:
            data = slot.connection.recv(64)
        except OSError:
            data = b""
        if data:
            status, slot.own_pid = marshal.loads(data)
            if status is not None:
                self.record_end(slot, status)
            return
        self.close_slot(slot)
        if slot in self.free:
            self.free.remove(slot)
        if slot.identity in self.running:
            self.record_end(slot, -9, error="the process that started the sandbox was killed", usable=False)

    def record_end(self, slot, status, *, error="", usable=True):
        """Record the end of a sandbox, and kill its leftover processes. The slot is used again if `usable` is true."""
        del self.running[slot.identity]
        slot.pid, slot.end = 0, (status, error, usable)
        slot.end_deadline = time.monotonic() + _EXIT_TIMEOUT_S
        self.emptying.append(slot)
        self.free_ended_slots()

    def free_ended_slots(self):
        """Report the sandboxes that have ended with all their processes, and free their slots.

        If the processes of a sandbox do not end in time, report this, and do not reuse the slot.
        """
        now = time.monotonic()
        for slot in [slot for slot in self.killed if slot.identity not in self.running or now > slot.end_deadline]:
            self.killed.remove(slot)
            if slot.identity in self.running:
                self.record_end(slot, -9, error="the processes of the sandbox did not exit", usable=False)
        for slot in list(self.emptying):
            left = slot.kill_leftovers()
            if left and now < slot.end_deadline:
                continue
            self.emptying.remove(slot)
            status, error, usable = slot.end
            self.send(
                "ended", slot.identity, status, error or ("the processes of the sandbox did not exit" if left else "")
            )
            slot.identity = None
            if usable and not left:
                self.release_slot(slot)
            else:
                self.close_slot(slot)

    def release_slot(self, slot):
        """Add a slot to the free slots; end its process if there are already `_MAX_FREE_SLOTS`."""
        if len(self.free) >= _MAX_FREE_SLOTS:
            self.close_slot(slot)
            self.free.insert(0, slot)  # `on_start` takes slots from the end: slots with a process come first
        else:
            self.free.append(slot)

    def close_slot(self, slot):
        """End the slot's process."""
        if slot.connection is not None:
            del self.connections[slot.connection.fileno()]
            self.poll.unregister(slot.connection)
            slot.connection.close()
            slot.connection = None

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
                self.record_end(slot, status)

    def close(self):
        """End every sandbox and the zygote, and remove all groups and mounts."""
        for slot in list(self.running.values()):
            slot.kill()
        # Poll only the slots from now on: a closed socket is always readable, and would keep the loop busy.
        for descriptor in (self.control, self.wake[0], *([self.zygote.connection] if self.zygote is not None else ())):
            self.poll.unregister(descriptor)
        end_deadline = time.monotonic() + _END_TIMEOUT_S
        while (self.running or self.emptying) and time.monotonic() < end_deadline:
            self.reap()
            self.free_ended_slots()
            for descriptor, _ in self.poll.poll(1):
                if descriptor in self.connections:
                    self.read_incoming(descriptor)
        if self.zygote is not None:
            self.zygote.close()
        self.groups.close()  # after the zygote: a group with processes in it cannot be removed
        if self.trees is not None:
            self.trees.close()


def main():
    """Run the spawner; the manager's socket is file descriptor 3."""
    spawner = Spawner(socket.socket(fileno=3))
    try:
        spawner.serve()
    finally:
        spawner.close()
