"""The file system of a sandbox with an image: the image's read-only layers below the sandbox's writable layer.

    when the agent starts      /.layers/0 (uppermost) … /.layers/N, /.roll and /dev (see `images/system.py`)
    afterwards                 an overlay of the layers, with /.roll, /dev and mounts bound into it; one file system of
                               limited size for home, /tmp, /dev/shm and changes to the image

A fresh program returns to the mount namespace in which the agent started, and mounts another overlay for itself. If the
kernel does not support such overlays, there is one merged layer, which is read-only.
"""

from __future__ import annotations

import os

from roll_sandbox.agent import kernel

_SPACE, _ROOT, _LAYERS = "/.space", "/.image", "/.layers"


def enter_file_system(settings):
    """Mount the file system of the agent and of all programs that are not `fresh`, and move the agent into it."""
    # `enter_root` hides the layers in the new namespace, and every fresh program needs them for its overlay.
    settings.first_mount_namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    kernel.unshare(kernel.CLONE_NEWNS)
    mount_layers(settings)


def return_to_initial_mount_namespace(settings):
    """Move a `fresh` program into the agent's initial mount namespace, before it gets its own namespaces."""
    # In addition to CAP_SYS_ADMIN, this needs CAP_SYS_CHROOT (setns(2)), which agents keep if there is an image.
    kernel.setns(settings.first_mount_namespace, kernel.CLONE_NEWNS)


def mount_layers(settings):
    """Mount an overlay of the image's layers with writable directories and /proc, and make it the root directory.

    Needs new mount and PID namespaces.
    """
    kernel.mount("none", "/", None, kernel.PRIVATE)
    _mount_writable_directories(settings.limits)
    image = settings.image
    if image.layers == 1:
        kernel.bind_mount(_LAYERS + "/0", _ROOT)
    else:
        # All options of a mount must fit into a page (mount(2)), so the layers have short, relative names.
        os.chdir(_LAYERS)
        lower = ":".join(map(str, range(image.layers)))
        # A user namespace gives no access to the attributes trusted.overlay.*; with `userxattr` (Linux 5.11) overlayfs
        # reads user.overlay.*, which `images/unpack.py` writes.
        options = "userxattr,lowerdir=" + lower + ",upperdir=" + _SPACE + "/upper,workdir=" + _SPACE + "/work"
        kernel.mount("overlay", _ROOT, "overlay", kernel.NOSUID_NODEV, options)
    for place in image.binds:
        kernel.bind_mount(place, _ROOT + place)
    for name, place in (("home", settings.home), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        kernel.bind_mount(_SPACE + "/" + name, _ROOT + place)
    kernel.mount_proc(_ROOT + "/proc")
    kernel.enter_root(_ROOT)


def _mount_writable_directories(limits):
    options = "size=%d,nr_inodes=%d,mode=755" % (limits.disk_bytes, limits.max_files)  # noqa: UP031
    kernel.mount("tmpfs", _SPACE, "tmpfs", kernel.NOSUID_NODEV, options)
    for name, mode in (("upper", 0o755), ("work", 0o755), ("home", 0o755), ("tmp", 0o1777), ("shm", 0o1777)):
        os.mkdir(_SPACE + "/" + name)
        os.chmod(_SPACE + "/" + name, mode)
