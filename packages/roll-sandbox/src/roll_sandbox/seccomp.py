"""The system-call filter of sandboxed programs, as a BPF program for `prctl(PR_SET_SECCOMP)`.

Default deny: the filter lists the allowed calls (`syscalls.py`). A refused call fails with EPERM, a call newer than the
list with ENOSYS (so that libraries fall back); a call of a foreign architecture (32-bit calls) kills the program. The
kernel caches which calls are always allowed, so the length of the list costs nothing per call.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator

from roll_sandbox.syscalls import get_number, list_allowed

__all__ = ["SUPPORTED", "seccomp_filter"]

SUPPORTED = ("x86_64", "aarch64")

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH = 0, 4
"""Offsets in `struct seccomp_data`."""

_X32_BIT = 0x40000000
_FIRST_UNKNOWN = 463
_NEW_NAMESPACE_FLAGS = 0x7E020080
_UNIX, _INTERNET = 1, (2, 10)
"""AF_UNIX; AF_INET and AF_INET6, which reach only the sandbox's loopback. Not vsock, not netlink."""
_SOCKET_KINDS, _PROTOCOLS = (1, 2), (0, 6, 17)
"""Streams and datagrams; TCP and UDP. A request for another protocol makes the kernel load its module."""
_TERMINAL_INJECTION = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which inject input into the terminal from which the sandbox was started."""
_SIGXFSZ = 25
"""SIGXFSZ. A program that ignores it, as Python does, sees only a failed write, and the limit would not be noticed."""
_PRIO_USER = 2
"""PRIO_USER: all processes of a user."""
_THREAD, _SHARED_FILES = 0x10000, 0x400
"""CLONE_THREAD, CLONE_FILES. Locks belong to a file table, and are listed by process: see `agent/locks.py`."""
_OPEN_FILE_LOCKS = (37, 38)
"""F_OFD_SETLK and F_OFD_SETLKW: such locks are listed without their owner."""
_RWF_NOWAIT = 8
"""RWF_NOWAIT, which reveals the pages of the host's files that were read before, in a sandbox or outside."""
_CORE_SIZE = 4
"""RLIMIT_CORE, which is 1 in sandboxes: only then does no crash run the host's core file handler."""


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _return_error(error: int) -> bytes:
    return _instruction(_RETURN, _FAIL | error)


def _load_argument(index: int, *, high: bool = False) -> bytes:
    """Load half of an argument. Arguments that are checked are 32 bits wide, except for pointers."""
    return _instruction(_LOAD, 16 + 8 * index + 4 * high)


_ALLOWED = _instruction(_RETURN, _ALLOW)


def _only_for(call: int, body: list[bytes]) -> list[bytes]:
    """Run `body` for `call`, and skip it for other calls."""
    return [_instruction(_JUMP_EQUAL, call, 0, len(body)), *body]


def _one_of(values: tuple[int, ...], then: bytes, otherwise: bytes) -> list[bytes]:
    tests = [_instruction(_JUMP_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
    return [*tests, otherwise, then]


def _if_not_equal(value: int, then: list[bytes]) -> list[bytes]:
    """Continue if `value` is loaded; else run `then`."""
    return [_instruction(_JUMP_EQUAL, value, len(then), 0), *then]


def _if_equal(value: int, then: list[bytes]) -> list[bytes]:
    """Run `then` if `value` is loaded; else continue."""
    return [_instruction(_JUMP_EQUAL, value, 0, len(then)), *then]


def _allow_queries(pointer: int) -> list[bytes]:
    """Allow a call that only queries; report success without effect for one that sets.

    Some programs (Go) abort if the setting fails.
    """
    done = [_return_error(0)]
    return [
        _load_argument(pointer),
        *_if_not_equal(0, done),
        _load_argument(pointer, high=True),
        *_if_not_equal(0, done),
        _ALLOWED,
    ]


def _ranges(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last of each run of consecutive numbers."""
    first = last = numbers[0]
    for value in numbers[1:]:
        if value != last + 1:
            yield first, last
            first = value
        last = value
    yield first, last


def _socket_rules() -> list[bytes]:
    """Return the rules of `socket`: local sockets, and internet sockets that need no kernel module."""
    internet = [
        _load_argument(1),
        _instruction(_AND, 0xF),  # the rest are flags
        _instruction(_JUMP_EQUAL, _SOCKET_KINDS[0], 2, 0),
        _instruction(_JUMP_EQUAL, _SOCKET_KINDS[1], 1, 0),
        _return_error(errno.ESOCKTNOSUPPORT),
        _load_argument(2),
        *_one_of(_PROTOCOLS, _ALLOWED, _return_error(errno.EPROTONOSUPPORT)),
    ]
    return [
        _load_argument(0),
        _instruction(_JUMP_EQUAL, _UNIX, 0, 1),
        _ALLOWED,
        _instruction(_JUMP_EQUAL, _INTERNET[0], 2, 0),
        _instruction(_JUMP_EQUAL, _INTERNET[1], 1, 0),
        _return_error(errno.EAFNOSUPPORT),
        *internet,
    ]


def _argument_rules() -> list[tuple[str, list[bytes]]]:
    """Return the calls that depend on their arguments, each with its rules."""
    refused = _return_error(errno.EPERM)
    clones = [
        _load_argument(0),
        _instruction(_JUMP_ANY_BIT, _NEW_NAMESPACE_FLAGS, 0, 1),
        refused,
        _instruction(_JUMP_ANY_BIT, _THREAD, 0, 1),
        _ALLOWED,
        _instruction(_JUMP_ANY_BIT, _SHARED_FILES, 0, 1),
        refused,
        _ALLOWED,
    ]
    # For another family, the kernel makes a socket, and loads its module, before it finds that it cannot be paired.
    pairs = [_load_argument(0), *_if_not_equal(_UNIX, [_return_error(errno.EAFNOSUPPORT)]), _ALLOWED]
    locks = [_load_argument(1), *_one_of(_OPEN_FILE_LOCKS, _return_error(errno.EINVAL), _ALLOWED)]
    reads = [
        _load_argument(5),
        _instruction(_JUMP_ANY_BIT, _RWF_NOWAIT, 0, 1),
        _return_error(errno.EOPNOTSUPP),
        _ALLOWED,
    ]
    terminal = [_load_argument(1), *_one_of(_TERMINAL_INJECTION, refused, _ALLOWED)]
    limits = [_load_argument(0), *_if_not_equal(_CORE_SIZE, [_ALLOWED]), _return_error(0)]
    own_limits = [
        _load_argument(0),
        *_if_not_equal(0, [refused]),
        _load_argument(1),
        *_if_not_equal(_CORE_SIZE, [_ALLOWED]),
        *_allow_queries(2),
    ]
    signals = [_load_argument(0), *_if_not_equal(_SIGXFSZ, [_ALLOWED]), *_allow_queries(1)]
    # The agent, the first process, must get CPU time when a program's time is over.
    priority = [
        _load_argument(0),
        *_if_equal(_PRIO_USER, [refused]),
        _load_argument(1),
        *_if_equal(1, [refused]),
        _ALLOWED,
    ]
    turns = [_load_argument(0), *_if_equal(1, [refused]), _ALLOWED]
    return [
        ("clone", clones),
        ("clone3", [_return_error(errno.ENOSYS)]),  # its flags are behind a pointer; libraries fall back to clone
        ("socket", _socket_rules()),
        ("socketpair", pairs),
        ("fcntl", locks),
        ("preadv2", reads),
        ("ioctl", terminal),
        ("setrlimit", limits),
        ("prlimit64", own_limits),
        ("rt_sigaction", signals),
        ("setpriority", priority),
        ("sched_setaffinity", turns),
        ("sched_setparam", turns),
        ("sched_setscheduler", turns),
        ("sched_setattr", turns),
        # Not EPERM, for which cp, mv and sed would report an error for every file.
        *((name, [_return_error(errno.EOPNOTSUPP)]) for name in ("setxattr", "lsetxattr", "fsetxattr")),
    ]


def seccomp_filter(architecture: str | None = None) -> bytes:
    """Return the filter as an array of `struct sock_filter`.

    Raises:
        ValueError: this architecture is not supported.
    """
    architecture = architecture or platform.machine()
    if architecture not in SUPPORTED:
        raise ValueError(f"architecture must be one of {', '.join(SUPPORTED)}, got '{architecture}'")
    refused = _return_error(errno.EPERM)
    program = [
        _instruction(_LOAD, _ARCH),
        _instruction(_JUMP_EQUAL, _AUDIT_ARCH[architecture], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    if architecture == "x86_64":
        program += [_instruction(_JUMP_AT_LEAST, _X32_BIT, 0, 1), _instruction(_RETURN, _KILL)]
    for name, body in _argument_rules():
        program += _only_for(get_number(name, architecture), body)
    program += [_instruction(_JUMP_AT_LEAST, _FIRST_UNKNOWN, 0, 1), _return_error(errno.ENOSYS)]
    for first, last in _ranges(list_allowed(architecture)):
        program += [
            _instruction(_JUMP_AT_LEAST, last + 1, 3, 0),
            _instruction(_JUMP_AT_LEAST, first, 0, 1),
            _ALLOWED,
            refused,
        ]
    program.append(refused)
    return b"".join(program)
