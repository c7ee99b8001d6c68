"""Builds the file system of sandboxes, once per spawner that runs as root, in the spawner's mount namespace.

A plan is a list of steps: ("bind", source, target), ("copy", source, target), ("directory", path), ("file", path,
bytes), ("link", content, path) and ("layer", source, target) for a layer of an image. Small files are copied, since
every mount makes creating a namespace slower. The result is one read-only tree that every user can read, even if its
sources are not readable; it disappears with the namespace.
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


class FileSystemTrees:
    """Builds and removes the file-system trees of a spawner, by name."""

    def __init__(self):
        _remove_leftovers()
        kernel.unshare(kernel.CLONE_NEWNS)
        # On most hosts all mounts are shared (mount_namespaces(7)), so mounts made here would appear on the host.
        kernel.mount("none", "/", None, 16384 | (1 << 18))  # MS_REC | MS_PRIVATE
        self.root = _PREFIX + str(os.getpid())
        os.mkdir(self.root, 0o755)
        kernel.mount("tmpfs", self.root, "tmpfs", _NOSUID | _NODEV, "mode=755,size=16m")

    def build_tree(self, name, plan):
        """Build the tree `name` from a plan, and return its directory."""
        tree = os.path.join(self.root, name)
        os.mkdir(tree, 0o755)
        # Without MS_NODEV, since /dev is in this tree; the mounts in the tree have the flag.
        kernel.mount("tmpfs", tree, "tmpfs", _NOSUID, "mode=755,size=4m")
        # Sandboxes read the tree with other UIDs than the owner's.
        old = os.umask(0o022)
        try:
            for step in plan:
                _apply_step(tree, *step)
        finally:
            os.umask(old)
        kernel.mount("none", tree, None, _REMOUNT_READ_ONLY | _NOSUID)
        return tree

    def remove_tree(self, name):
        """Remove the tree `name`, even if it was built only in part; do nothing if it does not exist."""
        try:
            kernel.unmount(os.path.join(self.root, name))
        except OSError:
            return  # the tree does not exist
        for entry in os.listdir(self.root):
            if entry == name or entry.startswith(name + "-"):
                shutil.rmtree(os.path.join(self.root, entry), ignore_errors=True)

    def close(self):
        """Remove the directory of the trees, which is empty outside the spawner's mount namespace."""
        try:
            os.rmdir(self.root)
        except OSError:
            kernel.unmount(self.root)
            shutil.rmtree(self.root, ignore_errors=True)


def _apply_step(tree, step, source, target=b""):
    if step == "bind" and source.startswith("/dev/") and _make_device(source, tree + target):
        return
    if step == "bind" and source != target and os.path.isdir(source) and _mount_without_path(source, tree, target):
        return
    if step == "bind":
        target = tree + target
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            # A file can be mounted only on an existing file.
            with open(target, "ab"):
                pass
        kernel.mount(source, target, None, _BIND_RECURSIVE)
        _make_read_only(target, source.startswith("/dev/"))
    elif step == "layer":
        os.makedirs(tree + target)  # mounted for each sandbox, in its own namespace (`idmap.py`)
    elif step == "copy":
        os.makedirs(os.path.dirname(tree + target), exist_ok=True)
        if os.path.isdir(source):
            shutil.copytree(source, tree + target, symlinks=True, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(source, tree + target)
    elif step == "directory":
        os.makedirs(tree + source, exist_ok=True)
    elif step == "file":
        os.makedirs(os.path.dirname(tree + source), exist_ok=True)
        with open(tree + source, "wb") as file:
            file.write(target)
    else:
        os.symlink(source, tree + target)


def _mount_without_path(source, tree, target):
    """Mount a directory without revealing its path on the host, which a bind mount shows in /proc/self/mountinfo.

    Returns:
        False if the kernel does not support overlays, or does not support them on this file system.
    """
    place = tree + target.replace("/", "-")  # next to the tree, where no sandbox sees it
    layers = [os.path.join(place, name) for name in ("source", "nothing")]
    previous = os.getcwd()
    for directory in (tree + target, *layers):
        os.makedirs(directory, exist_ok=True)
    try:
        kernel.mount(source, layers[0], None, _BIND_RECURSIVE)
        try:
            os.chdir(place)  # relative names: mountinfo shows the layers as named here
            kernel.mount("none", tree + target, "overlay", _NOSUID | _NODEV | 1, "lowerdir=source:nothing")
        finally:
            os.chdir(previous)
            kernel.unmount(layers[0])  # the overlay keeps its own reference
    except OSError:
        return False
    _make_read_only(tree + target, False)
    return True


def _make_read_only(target, is_device):
    """Make a mount read-only, with everything mounted below it."""
    if not is_device:
        try:
            kernel.make_read_only(target)
            return
        except OSError:
            pass  # kernels before 5.12 support this only for single mounts
    # A bind mount has the flags of the original mount; only a remount changes them (mount(2)).
    kernel.mount("none", target, None, _REMOUNT_READ_ONLY | _NOSUID | (0 if is_device else _NODEV))


def _make_device(original, path):
    """Create a copy of the device node `original` that every user may open; return False if this is not permitted."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.stat(original).st_rdev)
        os.chmod(path, 0o666)
    except OSError:
        return False
    return True


def _remove_leftovers():
    """Remove the empty directories that killed spawners have left behind."""
    parent, prefix = os.path.split(_PREFIX)
    for name in os.listdir(parent):
        number = name[len(prefix) :]
        if name.startswith(prefix) and number.isdigit() and not os.path.exists("/proc/" + number):
            try:
                os.rmdir(os.path.join(parent, name))
            except OSError:
                continue
