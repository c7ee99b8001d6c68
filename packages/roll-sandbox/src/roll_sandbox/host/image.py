"""The file system that sandboxes see, built once by a spawner that is root, in its own mount namespace.

A plan is a list of steps: ("bind", source, target), ("copy", source, target), ("directory", path), ("file", path,
bytes), ("link", content, path) and ("layer", source, target) for a layer of an image. Small files are copied, since
every mount costs time whenever a namespace is made. The result is one read-only tree that every user can read, even if
its sources are not readable; it disappears with the namespace.
"""

from __future__ import annotations

import os
import shutil
import stat

from roll_sandbox.agent import kernel

_PREFIX = "/tmp/roll-sandbox-"
_BIND_RECURSIVE = 4096 | 16384
_REMOUNT_READ_ONLY = 4096 | 32 | 1
_NOSUID, _NODEV = 2, 4


class Images:
    """The trees that a spawner has built, by name."""

    def __init__(self):
        _sweep()
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, 16384 | (1 << 18))  # MS_REC | MS_PRIVATE
        self.root = _PREFIX + str(os.getpid())
        os.mkdir(self.root, 0o755)
        kernel.mount("tmpfs", self.root, "tmpfs", _NOSUID | _NODEV, "mode=755,size=16m")

    def build(self, name, plan):
        """Build a tree from a plan, and return its directory."""
        tree = os.path.join(self.root, name)
        os.mkdir(tree, 0o755)
        kernel.mount("tmpfs", tree, "tmpfs", _NOSUID, "mode=755,size=4m")
        old = os.umask(0o022)
        try:
            for step in plan:
                _do(tree, *step)
        finally:
            os.umask(old)
        kernel.mount("none", tree, None, _REMOUNT_READ_ONLY | _NOSUID)
        return tree

    def forget(self, name):
        """Remove a tree, even an unfinished one."""
        try:
            kernel.unmount(os.path.join(self.root, name))
        except OSError:
            return  # it was never begun
        for entry in os.listdir(self.root):
            if entry == name or entry.startswith(name + "-"):
                shutil.rmtree(os.path.join(self.root, entry), ignore_errors=True)

    def close(self):
        """Remove everything from the host, which sees only an empty directory."""
        try:
            os.rmdir(self.root)
        except OSError:
            kernel.unmount(self.root)
            shutil.rmtree(self.root, ignore_errors=True)


def _do(tree, step, first, second=b""):
    if step == "bind" and first.startswith("/dev/") and _make_device(first, tree + second):
        return
    if step == "bind" and first != second and os.path.isdir(first) and _show_unnamed(first, tree, second):
        return
    if step == "bind":
        target = tree + second
        if os.path.isdir(first):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "ab"):
                pass
        kernel.mount(first, target, None, _BIND_RECURSIVE)
        _restrict(target, first.startswith("/dev/"))
    elif step == "layer":
        os.makedirs(tree + second)  # mounted for each sandbox, in its own namespace (`idmap.py`)
    elif step == "copy":
        os.makedirs(os.path.dirname(tree + second), exist_ok=True)
        if os.path.isdir(first):
            shutil.copytree(first, tree + second, symlinks=True, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(first, tree + second)
    elif step == "directory":
        os.makedirs(tree + first, exist_ok=True)
    elif step == "file":
        os.makedirs(os.path.dirname(tree + first), exist_ok=True)
        with open(tree + first, "wb") as file:
            file.write(second)
    else:
        os.symlink(first, tree + second)


def _show_unnamed(source, tree, target):
    """Show a directory without its host path, which a bind mount would reveal in /proc/self/mountinfo.

    Returns:
        False if the kernel has no overlays, or none of this file system.
    """
    place = tree + target.replace("/", "-")  # next to the tree, where no sandbox sees it
    layers = [os.path.join(place, name) for name in ("source", "nothing")]
    here = os.getcwd()
    for directory in (tree + target, *layers):
        os.makedirs(directory, exist_ok=True)
    try:
        kernel.mount(source, layers[0], None, _BIND_RECURSIVE)
        try:
            os.chdir(place)  # relative names: mountinfo shows the layers as named here
            kernel.mount("none", tree + target, "overlay", _NOSUID | _NODEV | 1, "lowerdir=source:nothing")
        finally:
            os.chdir(here)
            kernel.unmount(layers[0])
    except OSError:
        return False
    _restrict(tree + target, False)
    return True


def _restrict(target, is_device):
    """Make a mount read-only, with everything mounted below it."""
    if not is_device:
        try:
            kernel.make_read_only(target)
            return
        except OSError:
            pass  # a kernel older than 5.12 supports this only per mount
    kernel.mount("none", target, None, _REMOUNT_READ_ONLY | _NOSUID | (0 if is_device else _NODEV))


def _make_device(original, path):
    """Make a device node that is open to every user, which the host's may not be; return False if not permitted."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.stat(original).st_rdev)
        os.chmod(path, 0o666)
    except OSError:
        return False
    return True


def _sweep():
    """Remove empty directories of spawners that were killed."""
    parent, prefix = os.path.split(_PREFIX)
    for name in os.listdir(parent):
        number = name[len(prefix) :]
        if name.startswith(prefix) and number.isdigit() and not os.path.exists("/proc/" + number):
            try:
                os.rmdir(os.path.join(parent, name))
            except OSError:
                continue
