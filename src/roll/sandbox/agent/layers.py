"""The file system of a sandbox with an image: its layers, read-only, below a writable one that is the sandbox's own.

    the agent's own system      /layers/0 (uppermost) … /layers/N, /.roll and /dev (see `images/system.py`)
    the system of programs      an overlay of these; /.roll, /dev and mounts bound into it; home, /tmp and /dev/shm
                                beside what is changed of the image, in one file system of limited size

The agent never leaves its own. Programs that share the sandbox enter a mount namespace that was made in the beginning;
a fresh one makes another of these. Where no overlay may be written to, the image is read-only (`settings["image"]`
then says `read_only`).
"""

from __future__ import annotations

import os

from roll.sandbox.agent import kernel

SPACE = "/space"
_ROOT = "/image"
_NAMESPACE = "/proc/self/ns/mnt"


def prepare(settings):
    """In the agent: make the namespace of programs that share this sandbox."""
    own = os.open(_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    kernel.mount("none", "/", None, kernel.PRIVATE)
    _mount_space(settings)  # before: so the agent, too, sees how full it is
    kernel.unshare(kernel.CLONE_NEWNS)
    _enter(settings)
    settings["namespace"] = os.open(_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    kernel.setns(own, kernel.CLONE_NEWNS)
    os.close(own)


def join(settings):
    """In a program that shares the sandbox."""
    kernel.setns(settings["namespace"], kernel.CLONE_NEWNS)


def make(settings):
    """In a program, in mount and PID namespaces of its own: the same, untouched."""
    kernel.mount("none", "/", None, kernel.PRIVATE)
    _mount_space(settings)
    _enter(settings)


def _mount_space(settings):
    limits = settings["limits"]
    options = "size=%d,nr_inodes=%d,mode=755" % (limits["disk_bytes"], limits["max_files"])  # noqa: UP031
    kernel.mount("tmpfs", SPACE, "tmpfs", kernel.NOSUID_NODEV, options)
    for name, mode in (("upper", 0o755), ("work", 0o755), ("home", 0o755), ("tmp", 0o1777), ("shm", 0o1777)):
        os.mkdir(SPACE + "/" + name)
        os.chmod(SPACE + "/" + name, mode)


def _enter(settings):
    image = settings["image"]
    os.chdir("/layers")  # names are short then: all options of a mount have a page
    options = "userxattr,lowerdir=" + ":".join(map(str, range(image["layers"])))
    if not image["read_only"]:
        options += ",upperdir=" + SPACE + "/upper,workdir=" + SPACE + "/work"
    kernel.mount("overlay", _ROOT, "overlay", kernel.NOSUID_NODEV, options)
    for source, target in image["binds"]:
        kernel.bind(source, _ROOT + target)
    for name, target in (("home", settings["home"]), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        kernel.bind(SPACE + "/" + name, _ROOT + target)
    kernel.mount_proc(_ROOT + "/proc")
    kernel.enter_root(_ROOT)
