"""ID-mapped mounts: show layers of an image, which this machine's root owns, as if another user owned them.

Each sandbox has a UID of its own, and an overlay copies up only files of a user that its sandbox has. Nothing on the
disk changes. Needs Linux 5.12, and 5.19 for an overlay of such mounts; the file system must support it (ext4, xfs,
btrfs, tmpfs since 6.3).
"""

from __future__ import annotations

import os
import signal
import socket

from roll_sandbox.agent import kernel


def mount_idmapped(layers, user):
    """Show layers (source, target) read-only, as if this user owned them. Needs a mount namespace of its own.

    Raises:
        OSError: the kernel or the file system does not support it.
    """
    users = _users(user)
    try:
        for source, target in layers:
            mount = kernel.open_tree(source)
            try:
                kernel.map_owners(mount, users)
                kernel.move_mount(mount, target)
            finally:
                os.close(mount)
    finally:
        os.close(users)


def _users(user):
    """Return the file descriptor of a user namespace in which this user and group are 0."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            kernel.unshare(kernel.CLONE_NEWUSER)
            theirs.send(b"1")
            ours.close()
            theirs.recv(1)
        finally:
            os._exit(0)
    theirs.close()
    try:
        ours.recv(1)
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(f"0 {user} 1")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        ours.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
