"""The zygote: a Python process that has imported the agent and forks agents, so that no interpreter has to start.

    spawner ══ seqpacket socket ══ zygote ── fork ──► slot: enters a control group, changes its UID permanently
       ╚════════ seqpacket socket, one per slot ════════╝ └── clone ──► agent: first process of new namespaces

To the zygote:  (control group files, user) with the slot's socket; the slot's process ends when the socket closes
To a slot:      ("start", tree) with the agent's socket, the file for error messages and, if there is one, the CPU
                counter; ("kill",) ends the sandbox
From a slot:    (None, the slot's pid) when it is ready; (status, the slot's pid) when nothing is left of its sandbox

A slot is a separate process because entering a control group can take tens of milliseconds, and forks of a member are
members. It starts one sandbox after another, and has the role of bwrap's outer process for each.

Invariants:
    - the zygote and the slots receive no programs, inputs, settings or answers, so sandboxes inherit no data of others;
    - a slot has one sandbox at a time, and outlives all processes of the sandbox;
    - each process ends with its parent;
    - `main` returns only in an agent.
"""

from __future__ import annotations

import _signal  # pyrefly: ignore[missing-import]
import _socket  # pyrefly: ignore[missing-import]
import array
import marshal
import os
import select

from roll_sandbox.agent import kernel, usage

_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)
_MESSAGE_BYTES = 1 << 14
_SANDBOX_USER = 1000
"""UID and GID of a sandbox, as seen from inside."""
_FAILED_CODE = 125
_MAX_DESCRIPTORS = 3


def main():
    """Run the zygote; the spawner's socket is file descriptor 0. Return only in an agent."""
    connection, user = _fork_slots(_socket.socket(fileno=0))
    tree = _start_sandboxes(connection)
    _run_or_exit(_enter_sandbox, tree, user)


def receive_message(connection):
    """Receive a message and its file descriptors; the message is None if the socket was closed."""
    size = array.array("i").itemsize
    data, ancillary, _, _ = connection.recvmsg(_MESSAGE_BYTES, _socket.CMSG_SPACE(_MAX_DESCRIPTORS * size))
    descriptors = array.array("i")
    for _, _, content in ancillary:
        descriptors.frombytes(content[: len(content) // size * size])
    return marshal.loads(data) if data else None, list(descriptors)


def _run_or_exit(function, *arguments):
    """Run `function` in a fork; on an error, exit instead of returning to the parent's loop."""
    try:
        return function(*arguments)
    except BaseException as error:
        os.write(2, ("roll-sandbox: " + str(error) + "\n").encode())
    os._exit(_FAILED_CODE)


def _fork_slots(control):
    """Fork slots until the spawner closes the socket. Return only in a slot, with the slot's socket and UID."""
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)  # the kernel reaps slots; the spawner sees their sockets close
    zygote = os.getpid()
    control.send(b"ready")
    while True:
        message, descriptors = receive_message(control)
        if message is None:
            os._exit(0)
        if os.fork() == 0:
            control.detach()
            _run_or_exit(_set_up_slot, zygote, *message)
            os.dup2(descriptors[0], 0)
            os.dup2(0, 1)
            os.closerange(3, 1 << 16)
            return _socket.socket(fileno=0), message[1]
        for descriptor in descriptors:
            os.close(descriptor)


def _set_up_slot(zygote, groups, user):
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    os.setsid()
    for path in groups:
        with open(path, "w") as file:
            file.write("0")
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    kernel.set_parent_death_signal()  # after setresuid, which resets it
    if os.getppid() != zygote:  # the zygote ended before the call above, which then has no effect (prctl(2))
        raise OSError("the zygote has exited")
    kernel.set_memory_hidden(False)  # reset as well; no other process has this UID, and sandboxes write to /proc/self


def _start_sandboxes(connection):
    """Start sandboxes until the spawner closes the socket; return only in the first process of a sandbox, with the
    directory of its file system.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    connection.send(marshal.dumps((None, os.getpid())))
    pid, watch = 0, -1
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == watch:
                poll.unregister(watch)
                os.close(watch)
                connection.send(marshal.dumps((os.waitpid(pid, 0)[1], os.getpid())))
                pid, watch = 0, -1
                continue
            message, descriptors = receive_message(connection)
            if message is not None and message[0] == "start":
                try:
                    # The kernel creates the user namespace first, and its capabilities permit creating the others
                    # (user_namespaces(7)).
                    pid = kernel.clone(_NAMESPACES)
                except OSError as error:
                    os.write(descriptors[1], ("roll-sandbox: " + str(error) + "\n").encode())
                    connection.send(marshal.dumps((_FAILED_CODE << 8, os.getpid())))
                else:
                    if pid == 0:
                        connection.detach()
                        for new, old in enumerate((descriptors[0], *descriptors[:2])):
                            os.dup2(old, new)
                        for old in descriptors[2:]:
                            os.dup2(old, usage.CPU_COUNTER_FD)
                        os.closerange(3, usage.CPU_COUNTER_FD)
                        os.closerange(usage.CPU_COUNTER_FD + len(descriptors[2:]), 1 << 16)
                        return message[1]
                    # A pidfd becomes readable when its process has ended, so one poll() waits for that and for
                    # messages.
                    watch = os.pidfd_open(pid)
                    poll.register(watch, select.POLLIN)
            elif pid:
                os.kill(pid, 9)
            for descriptor in descriptors:
                os.close(descriptor)
            if message is None:
                if pid:
                    os.waitpid(pid, 0)
                os._exit(0)


def _enter_sandbox(tree, user):
    """Set up a sandbox in new namespaces, like bwrap, and keep only the agent's capabilities (docs/security.md)."""
    mapping = b"%d %d 1" % (_SANDBOX_USER, user)

    for name, text in (("setgroups", b"deny"), ("uid_map", mapping), ("gid_map", mapping)):
        kernel.write_proc_file("/proc/self/" + name, text)
    kernel.change_root(tree)
    kernel.bring_up_loopback()
    kernel.set_host_name("sandbox")
    os.setsid()
    kernel.limit_capabilities((kernel.CAP_SETPCAP, kernel.CAP_NET_ADMIN, kernel.CAP_SYS_ADMIN))
    kernel.set_parent_death_signal()
