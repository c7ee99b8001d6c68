"""System calls that Python's standard library does not provide.

`_ctypes` is called directly where possible: importing `ctypes` takes longer than the rest of a sandbox's start.
"""

from __future__ import annotations

import os
import sys

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CAP_SETPCAP, CAP_NET_ADMIN, CAP_SYS_CHROOT, CAP_SYS_ADMIN = 8, 12, 18, 21

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOEXEC = 2, 4, 4096, 16384, 1 << 18, 8
NOSUID_NODEV, PRIVATE = _MS_NOSUID | _MS_NODEV, _MS_REC | _MS_PRIVATE
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
_CAPABILITY_VERSION = 0x20080522
_NUM_CAPABILITIES = 64
_CLONE, _PIVOT_ROOT, _MOUNT_SETATTR = {"x86_64": (56, 155, 442), "aarch64": (220, 41, 442)}.get(
    os.uname().machine, (-1, -1, -1)
)
"""Numbers of system calls for which the C library has no function, or none with the needed arguments."""
_OPEN_TREE, _MOVE_MOUNT = 428, 429
_CLONE_TREE, _EMPTY_PATH, _MAPPED_OWNERS = 1, 0x1000, 0x100000
_bounding_set = range(_NUM_CAPABILITIES)
"""Capabilities that may still be in the bounding set of this process, which never grows."""
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_READ_ONLY_NOSUID_NODEV = 7


_LIBC_FUNCTIONS = "capset ioctl mallopt mount prctl setns sethostname socket syscall umount2 unshare".split()  # noqa: SIM905
"""Functions of the C library; they are looked up once, instead of in every fork."""


def _load_libc():
    try:
        import _ctypes

        handle = _ctypes.dlopen(None, 0)  # pyrefly: ignore[bad-argument-type]
        call, addresses = _ctypes.call_function, {}
        for name in _LIBC_FUNCTIONS:
            try:
                addresses[name] = _ctypes.dlsym(handle, name)
            except OSError:  # another C library
                continue
        return lambda name, *arguments: call(addresses[name], arguments)
    except (ImportError, AttributeError):  # these names are not public in Python
        import ctypes

        library = ctypes.CDLL(None)
        return lambda name, *arguments: getattr(library, name)(*arguments)


_call_libc = _load_libc()


def _check_call(name, value):
    if value != 0:
        raise OSError(name + " failed")


def write_proc_file(path, text):
    """Write `text` to a file of /proc.

    `open` is not used, because it modifies, and therefore copies, much more memory of a fork.
    """
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text)
    finally:
        os.close(descriptor)


def mount(source, target, fs_type, flags, options=None):
    """Call mount(2).

    Raises:
        OSError: the kernel refuses the mount.
    """
    encode = lambda text: None if text is None else text.encode()  # noqa: E731  (four times in one line)
    _check_call(
        "mount " + target, _call_libc("mount", encode(source), encode(target), encode(fs_type), flags, encode(options))
    )


def unmount(target):
    """Detach a mount (MNT_DETACH): it disappears immediately, and is freed when no process uses it any more."""
    _check_call("unmount " + target, _call_libc("umount2", target.encode(), 2))


def unshare(flags):
    """Move this process into new namespaces; a new PID namespace (CLONE_NEWPID) begins with the next child."""
    _check_call("unshare", _call_libc("unshare", flags))


def setns(descriptor, namespace_type):
    """Move this process into the namespace of type `namespace_type` (CLONE_NEW…) to which a file descriptor refers."""
    _check_call("setns", _call_libc("setns", descriptor, namespace_type))


def clone(flags):
    """Fork into new namespaces; return 0 in the child, and the child's pid in the parent.

    Use it only in a process with one thread and no `os.register_at_fork` callbacks, because Python does not detect this
    fork.
    """
    # 17 is SIGCHLD, the signal of a child made by fork(). Without a stack argument, the child continues with a copy of
    # this stack; the C library's clone() would need a function and a new stack.
    pid = _call_libc("syscall", _CLONE, flags | 17, 0, 0, 0, 0)
    if pid < 0:
        raise OSError("clone failed: the kernel does not permit new namespaces")
    return pid


def change_root(tree):
    """Make `tree` the root directory, with a /proc of this PID namespace. Needs new mount and PID namespaces."""
    # pivot_root(2) refuses shared mounts, and mounts below a shared one would appear in the host's namespace.
    mount("none", "/", None, PRIVATE)
    # Mounts that come from a namespace with more privileges are locked (mount_namespaces(7)), and pivot_root refuses a
    # locked one; a bind mount of it is not locked.
    bind_mount(tree, tree)
    # Before the old /proc disappears: the kernel permits a new /proc only while another one is fully visible.
    mount_proc(tree + "/proc")
    enter_root(tree)


def mount_proc(target):
    """Mount a /proc for the PID namespace of this process."""
    mount("proc", target, "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def bind_mount(source, target):
    """Bind-mount `source`, with everything mounted below it, at `target`."""
    mount(source, target, None, _MS_BIND | _MS_REC)


def enter_root(tree):
    """Make the mount at `tree` the root directory, and hide everything else. Needs a new mount namespace."""
    os.chdir(tree)
    # With the same directory twice, the old root needs no directory in the new root, which is read-only
    # (pivot_root(2), Notes).
    _check_call("pivot_root", _call_libc("syscall", _PIVOT_ROOT, b".", b"."))
    unmount(".")  # the old root, which now covers the new one
    os.chdir("/")


def make_read_only(target):
    """Make `target` and every mount below it read-only, without set-user-id and devices; keep their other flags."""
    # A remount (MS_REMOUNT | MS_BIND) would change one mount; 0x8000 (AT_RECURSIVE) includes the mounts below it.
    attributes = b"".join(value.to_bytes(8, sys.byteorder) for value in (_READ_ONLY_NOSUID_NODEV, 0, 0, 0))
    _check_call(
        "mount_setattr " + target, _call_libc("syscall", _MOUNT_SETATTR, -100, target.encode(), 0x8000, attributes, 32)
    )


def open_tree(path):
    """Return the file descriptor of a new, detached mount of a directory."""
    mount = _call_libc("syscall", _OPEN_TREE, -100, path.encode(), _CLONE_TREE | os.O_CLOEXEC)
    _check_call("open_tree " + path, min(mount, 0))
    return mount


def idmap_mount(mount, user_namespace):
    """Make a mount from `open_tree` read-only, and ID-mapped by a user namespace.

    Args:
        mount: file descriptor of the mount.
        user_namespace: file descriptor of the user namespace, which maps the owners of files.
    """
    flags = _MAPPED_OWNERS | _READ_ONLY_NOSUID_NODEV
    attributes = b"".join(value.to_bytes(8, sys.byteorder) for value in (flags, 0, 0, user_namespace))
    _check_call("mapped owners", _call_libc("syscall", _MOUNT_SETATTR, mount, b"", _EMPTY_PATH, attributes, 32))


def move_mount(mount, target):
    """Attach a mount from `open_tree` at `target`."""
    _check_call("move_mount " + target, _call_libc("syscall", _MOVE_MOUNT, mount, b"", -100, target.encode(), 4))


def set_host_name(name):
    """Set the host name. Needs a new UTS namespace."""
    _check_call("sethostname", _call_libc("sethostname", name.encode(), len(name)))


def bring_up_loopback():
    """Bring the loopback device up; the kernel then assigns its address. Needs a new network namespace."""
    # The request can be sent through any socket of the network namespace (netdevice(7)).
    line = _call_libc("socket", 2, 2, 0)
    request = b"lo".ljust(16, b"\0") + _IFF_UP.to_bytes(2, sys.byteorder) + bytes(22)
    result = _call_libc("ioctl", line, _SIOCSIFFLAGS, request)
    os.close(line)
    _check_call("ioctl(SIOCSIFFLAGS)", result)


def set_memory_hidden(hidden):
    """Set whether processes of the same UID are denied access to the memory and file descriptors of this process."""
    _check_call("prctl(PR_SET_DUMPABLE)", _call_libc("prctl", _PR_SET_DUMPABLE, 0 if hidden else 1, 0, 0, 0))


def set_malloc_perturb(enabled):
    """Set whether the C library overwrites freed memory (mallopt M_PERTURB; no effect in other C libraries)."""
    try:
        _call_libc("mallopt", -6, 0x55 if enabled else 0)
    except (AttributeError, KeyError):
        return


def set_parent_death_signal():
    """Have the kernel send SIGKILL to this process when its parent ends."""
    _check_call("prctl(PR_SET_PDEATHSIG)", _call_libc("prctl", _PR_SET_PDEATHSIG, 9, 0, 0, 0))


def become_subreaper():
    """Make this process a subreaper: it becomes the parent of descendants whose parent has ended."""
    _check_call("prctl(PR_SET_CHILD_SUBREAPER)", _call_libc("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def mount_private_proc():
    """Replace /proc by a /proc for this PID namespace. Needs new mount and PID namespaces."""
    mount("none", "/", None, PRIVATE)
    mount_proc("/proc")


def mount_writable_tmpfs(home, size_bytes, num_files):
    """Mount one new file system, of at most `size_bytes` and `num_files`, for home, /tmp and /dev/shm."""
    base = home[: home.rindex("/")]
    options = "size=%d,nr_inodes=%d,mode=755" % (size_bytes, num_files)  # noqa: UP031  (short and as fast)
    # One file system for three directories, so that the limits on bytes and files hold for all of them together.
    mount("tmpfs", base, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    os.mkdir(home, 0o755)
    for target in ("/tmp", "/dev/shm"):
        source = base + "/." + target[target.rindex("/") + 1 :]
        os.mkdir(source)
        os.chmod(source, 0o1777)
        mount(source, target, None, _MS_BIND)


def limit_capabilities(allowed):
    """Drop all capabilities except `allowed`; no exec, file or user can give this process another capability."""
    global _bounding_set
    _call_libc("prctl", _PR_CAP_AMBIENT, 4, 0, 0, 0)
    left = allowed
    # PR_CAPBSET_DROP needs CAP_SETPCAP, so the bounding set shrinks before `capset` drops that capability.
    for capability in _bounding_set:
        if capability not in allowed and _call_libc("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            if _call_libc("prctl", _PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
                left = _bounding_set  # the capability exists, but the kernel refuses: this process has no privileges
            break
    _bounding_set = left
    order = sys.byteorder
    mask = sum(1 << capability for capability in allowed).to_bytes(4, order)  # every allowed capability is below 32
    header = _CAPABILITY_VERSION.to_bytes(4, order) + bytes(4)
    # Effective and permitted; the inheritable set is empty, so that no exec passes a capability on (capabilities(7)).
    _check_call("capset", _call_libc("capset", header, mask + mask + bytes(16)))
    _check_call("prctl(PR_SET_NO_NEW_PRIVS)", _call_libc("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def drop_privileges(seccomp_filter):
    """Drop all capabilities permanently, and apply the seccomp filter, if there is one, to all further system calls."""
    limit_capabilities(())
    if seccomp_filter:
        order = sys.byteorder
        # prctl gets a `struct sock_fprog`: the number of instructions, padding, and their address. Without
        # CAP_SYS_ADMIN it needs PR_SET_NO_NEW_PRIVS (seccomp(2)), which `limit_capabilities` has set.
        address = id(seccomp_filter) + bytes.__basicsize__ - 1  # CPython stores the data of a bytes object here
        count = len(seccomp_filter) // 8
        program = count.to_bytes(2, order) + bytes(6) + address.to_bytes(8, order)
        _check_call("prctl(PR_SET_SECCOMP)", _call_libc("prctl", _PR_SET_SECCOMP, 2, program, 0, 0))
