"""ID-mapped mounts: they show the layers of an image as owned by a sandbox's user instead of root.

Each sandbox has its own UID, and an overlay copies up only files whose owner exists in the sandbox. Files on the disk
do not change. ID-mapped mounts need Linux 5.12, and overlays of them 5.19; the file system must support them (ext4,
xfs, btrfs; tmpfs since 6.3).
"""

from __future__ import annotations

import os
import signal
import socket

from roll_sandbox.agent import kernel


def mount_idmapped(layers, user):
    """Mount layers (source, target) read-only, as if this user owned their files. Needs a new mount namespace.

    Raises:
        OSError: the kernel or the file system does not support ID-mapped mounts.
    """
    users = _open_user_namespace(user)
    try:
        for source, target in layers:
            mount = kernel.open_tree(source)
            try:
                kernel.idmap_mount(mount, users)
                kernel.move_mount(mount, target)
            finally:
                os.close(mount)
    finally:
        os.close(users)


def _open_user_namespace(user):
    """Return the file descriptor of a user namespace that maps this user and group to 0."""
    ours, theirs = socket.socketpair()
    # A user namespace exists only while a process is in it, or while a descriptor of its file is open.
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
        # To map another user than its own, a process needs CAP_SETUID in the parent namespace (user_namespaces(7)).
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(f"0 {user} 1")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        ours.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
