"""System calls that Python's library does not offer.

`_ctypes` is called directly where it can be: importing `ctypes` takes longer than starting a sandbox otherwise does.
"""

from __future__ import annotations

import os
import sys

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOEXEC = 2, 4, 4096, 16384, 1 << 18, 8
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
_CAPABILITY_VERSION = 0x20080522
_NUM_CAPABILITIES = 64


def _library():
    try:
        import _ctypes

        handle = _ctypes.dlopen(None, 0)  # pyrefly: ignore[bad-argument-type]
        call, address = _ctypes.call_function, _ctypes.dlsym
        return lambda name, *arguments: call(address(handle, name), arguments)
    except (ImportError, AttributeError):  # these names are not a promise of Python's
        import ctypes

        library = ctypes.CDLL(None)
        return lambda name, *arguments: getattr(library, name)(*arguments)


_call = _library()


def _check(what, value):
    if value != 0:
        raise OSError(what + " failed")


def mount(source, target, kind, flags, options=None):
    """Raise OSError where the kernel refuses."""
    encode = lambda text: None if text is None else text.encode()  # noqa: E731  (four times in one line)
    _check("mount " + target, _call("mount", encode(source), encode(target), encode(kind), flags, encode(options)))


def unmount(target):
    """Take the mount away, at once for lookups and when nobody uses it any more for good (MNT_DETACH)."""
    _check("unmount " + target, _call("umount2", target.encode(), 2))


def unshare(flags):
    """Leave namespaces (for CLONE_NEWPID: the next child does)."""
    _check("unshare", _call("unshare", flags))


def setns(descriptor, kind):
    """Enter the namespace behind a file descriptor."""
    _check("setns", _call("setns", descriptor, kind))


def hide_memory(hidden):
    """Whether processes of the same user are kept from this one's memory and file descriptors."""
    _check("prctl(PR_SET_DUMPABLE)", _call("prctl", _PR_SET_DUMPABLE, 0 if hidden else 1, 0, 0, 0))


def overwrite_freed_memory(wanted):
    """Whether the C library overwrites what is freed (mallopt M_PERTURB; where there is another library, nothing)."""
    try:
        _call("mallopt", -6, 0x55 if wanted else 0)
    except (AttributeError, OSError):
        return


def die_with_parent():
    """SIGKILL for this process when its parent ends."""
    _check("prctl(PR_SET_PDEATHSIG)", _call("prctl", _PR_SET_PDEATHSIG, 9, 0, 0, 0))


def adopt_orphans():
    """Become the parent of descendants whose parent ends."""
    _check("prctl(PR_SET_CHILD_SUBREAPER)", _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def private_proc():
    """In new mount and PID namespaces: show those in /proc."""
    mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def writable_space(home, size_bytes, num_files):
    """One fresh file system of limited size for home, /tmp and /dev/shm."""
    base = home[: home.rindex("/")]
    options = "size=%d,nr_inodes=%d,mode=755" % (size_bytes, num_files)  # noqa: UP031  (short and as fast)
    mount("tmpfs", base, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    os.mkdir(home, 0o755)
    for target in ("/tmp", "/dev/shm"):
        source = base + "/." + target[target.rindex("/") + 1 :]
        os.mkdir(source)
        os.chmod(source, 0o1777)
        mount(source, target, None, _MS_BIND)


def give_up_privileges(seccomp_filter):
    """No capabilities, none to be gained, and the filter (if any) on every further system call."""
    _call("prctl", _PR_CAP_AMBIENT, 4, 0, 0, 0)
    for capability in range(_NUM_CAPABILITIES):
        if _call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    order = sys.byteorder
    header = _CAPABILITY_VERSION.to_bytes(4, order) + bytes(4)
    _check("capset", _call("capset", header, bytes(24)))
    _check("prctl(PR_SET_NO_NEW_PRIVS)", _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if seccomp_filter:
        address = id(seccomp_filter) + bytes.__basicsize__ - 1  # where CPython keeps the bytes of a bytes object
        count = len(seccomp_filter) // 8
        program = count.to_bytes(2, order) + bytes(6) + address.to_bytes(8, order)
        _check("prctl(PR_SET_SECCOMP)", _call("prctl", _PR_SET_SECCOMP, 2, program, 0, 0))
