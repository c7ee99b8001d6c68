"""The file system of a sandbox with an image: its read-only layers below a writable one of the sandbox's own.

    where the agent begins     /.layers/0 (uppermost) … /.layers/N, /.roll and /dev (see `images/system.py`)
    where it goes on           an overlay of these; /.roll, /dev and mounts bound into it; home, /tmp and /dev/shm
                               and changes to the image, in one file system of limited size

A fresh program returns to where the agent began, and mounts another overlay for itself. Where the kernel does not
support such overlays, there is one merged layer, which is read-only.
"""

from __future__ import annotations

import os

from roll_sandbox.agent import kernel

_SPACE, _ROOT, _LAYERS = "/.space", "/.image", "/.layers"


def prepare(settings):
    """Move the agent into the file system that it shares with programs that are not fresh."""
    settings.beginning = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    kernel.unshare(kernel.CLONE_NEWNS)
    mount_layers(settings)


def return_to_first_namespace(settings):
    """Return a fresh program to the agent's first mount namespace, before its own namespaces are made."""
    kernel.setns(settings.beginning, kernel.CLONE_NEWNS)


def mount_layers(settings):
    """Mount the image's layers, the writable space and /proc, and enter them. Needs new mount and PID namespaces."""
    kernel.mount("none", "/", None, kernel.PRIVATE)
    _mount_space(settings.limits)
    image = settings.image
    if image.layers == 1:
        kernel.bind_mount(_LAYERS + "/0", _ROOT)
    else:
        os.chdir(_LAYERS)  # keeps the names short: all options of a mount must fit into a page
        lower = ":".join(map(str, range(image.layers)))
        options = "userxattr,lowerdir=" + lower + ",upperdir=" + _SPACE + "/upper,workdir=" + _SPACE + "/work"
        kernel.mount("overlay", _ROOT, "overlay", kernel.NOSUID_NODEV, options)
    for place in image.binds:
        kernel.bind_mount(place, _ROOT + place)
    for name, place in (("home", settings.home), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        kernel.bind_mount(_SPACE + "/" + name, _ROOT + place)
    kernel.mount_proc(_ROOT + "/proc")
    kernel.enter_root(_ROOT)


def _mount_space(limits):
    options = "size=%d,nr_inodes=%d,mode=755" % (limits.disk_bytes, limits.max_files)  # noqa: UP031
    kernel.mount("tmpfs", _SPACE, "tmpfs", kernel.NOSUID_NODEV, options)
    for name, mode in (("upper", 0o755), ("work", 0o755), ("home", 0o755), ("tmp", 0o1777), ("shm", 0o1777)):
        os.mkdir(_SPACE + "/" + name)
        os.chmod(_SPACE + "/" + name, mode)
