"""The system-call filter of sandboxed programs, as a BPF program for `prctl(PR_SET_SECCOMP)`.

By default calls are refused: the filter lists the allowed calls (`syscalls.py`). A refused call fails with EPERM; a
call that is newer than the list fails with ENOSYS, so that libraries fall back to an older one. A call of another
architecture (such as a 32-bit call) kills the program. The kernel caches which calls are always allowed, so the length
of the list does not slow down calls.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator

from roll_sandbox.syscalls import get_syscall_number, list_allowed_syscalls

__all__ = ["SUPPORTED_ARCHITECTURES", "make_seccomp_filter"]

SUPPORTED_ARCHITECTURES = ("x86_64", "aarch64")

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH = 0, 4
"""Offsets of the call's number and of the architecture in `struct seccomp_data`."""

_X32_BIT = 0x40000000
_FIRST_UNKNOWN_SYSCALL = 463
_NEW_NAMESPACE_FLAGS = 0x7E020080
_UNIX, _INTERNET = 1, (2, 10)
"""The allowed address families: AF_UNIX, AF_INET and AF_INET6. The last two reach only the sandbox's loopback."""
_SOCKET_KINDS, _PROTOCOLS = (1, 2), (0, 6, 17)
"""The allowed internet sockets: streams and datagrams; default protocol (0), TCP and UDP. For another protocol, the
kernel would load a module.
"""
_TERMINAL_INJECTION_IOCTLS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which inject input into the terminal from which the sandbox was started."""
_SIGXFSZ = 25
"""SIGXFSZ must not be ignored: a program that ignores it, as Python does, would only see a failed write, and the agent
would not notice that the program hit the limit."""
_PRIO_USER = 2
"""PRIO_USER: setpriority(2) then changes all processes of a user."""
_THREAD, _SHARED_FILES = 0x10000, 0x400
"""CLONE_THREAD and CLONE_FILES. Only threads may share a file table, since file locks belong to it but are listed by
process (see `agent/locks.py`).
"""
_OPEN_FILE_LOCK_COMMANDS = (37, 38)
"""F_OFD_SETLK and F_OFD_SETLKW: such locks are listed without their owner."""
_RWF_NOWAIT = 8
"""RWF_NOWAIT, which reveals which pages of the host's files were read before, in a sandbox or outside."""
_RLIMIT_CORE = 4
"""RLIMIT_CORE, which must remain 1 in sandboxes: otherwise a crash would run the host's handler of core files."""


def _make_instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _return_error(error: int) -> bytes:
    return _make_instruction(_RETURN, _FAIL | error)


def _load_argument(index: int, *, high: bool = False) -> bytes:
    """Return an instruction that loads the lower half of the call's argument `index`, or its upper half if `high`.

    Only pointers need both halves; all other checked arguments have 32 bits.
    """
    return _make_instruction(_LOAD, 16 + 8 * index + 4 * high)


_ALLOW_INSTRUCTION = _make_instruction(_RETURN, _ALLOW)


def _match_syscall(syscall: int, instructions: list[bytes]) -> list[bytes]:
    """Return instructions that run `instructions` for the system call `syscall` only."""
    return [_make_instruction(_JUMP_EQUAL, syscall, 0, len(instructions)), *instructions]


def _match_any(values: tuple[int, ...], if_match: bytes, if_no_match: bytes) -> list[bytes]:
    tests = [_make_instruction(_JUMP_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
    return [*tests, if_no_match, if_match]


def _branch_if_not_equal(value: int, instructions: list[bytes]) -> list[bytes]:
    """Return instructions that run `instructions` if the loaded value is not `value`."""
    return [_make_instruction(_JUMP_EQUAL, value, len(instructions), 0), *instructions]


def _branch_if_equal(value: int, instructions: list[bytes]) -> list[bytes]:
    """Return instructions that run `instructions` if the loaded value is `value`."""
    return [_make_instruction(_JUMP_EQUAL, value, 0, len(instructions)), *instructions]


def _ignore_unless_null(argument: int) -> list[bytes]:
    """Return instructions for a call that sets a value, or only queries it if the pointer argument is NULL.

    Queries are allowed. A call that sets a value succeeds without an effect, because some programs (Go) abort if it
    fails. `argument` is the index of the pointer argument.
    """
    # An instruction compares 32 bits. A pointer whose lower half is 0 is not NULL, so both halves are tested.
    done = [_return_error(0)]
    return [
        _load_argument(argument),
        *_branch_if_not_equal(0, done),
        _load_argument(argument, high=True),
        *_branch_if_not_equal(0, done),
        _ALLOW_INSTRUCTION,
    ]


def _group_consecutive(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last number of each range of consecutive numbers in a sorted list."""
    first = last = numbers[0]
    for value in numbers[1:]:
        if value != last + 1:
            yield first, last
            first = value
        last = value
    yield first, last


def _make_socket_rules() -> list[bytes]:
    """Return the rules for `socket`: allow local sockets, and internet sockets that need no kernel module."""
    internet = [
        _load_argument(1),
        _make_instruction(_AND, 0xF),  # the rest are flags
        _make_instruction(_JUMP_EQUAL, _SOCKET_KINDS[0], 2, 0),
        _make_instruction(_JUMP_EQUAL, _SOCKET_KINDS[1], 1, 0),
        _return_error(errno.ESOCKTNOSUPPORT),
        _load_argument(2),
        *_match_any(_PROTOCOLS, _ALLOW_INSTRUCTION, _return_error(errno.EPROTONOSUPPORT)),
    ]
    return [
        _load_argument(0),
        _make_instruction(_JUMP_EQUAL, _UNIX, 0, 1),
        _ALLOW_INSTRUCTION,
        _make_instruction(_JUMP_EQUAL, _INTERNET[0], 2, 0),
        _make_instruction(_JUMP_EQUAL, _INTERNET[1], 1, 0),
        _return_error(errno.EAFNOSUPPORT),
        *internet,
    ]


def _make_argument_rules() -> list[tuple[str, list[bytes]]]:
    """Return, for each syscall in `CHECKED_SYSCALLS`, the BPF instructions that allow or deny it by its arguments."""
    refused = _return_error(errno.EPERM)
    clones = [
        _load_argument(0),
        _make_instruction(_JUMP_ANY_BIT, _NEW_NAMESPACE_FLAGS, 0, 1),
        refused,
        _make_instruction(_JUMP_ANY_BIT, _THREAD, 0, 1),
        _ALLOW_INSTRUCTION,
        _make_instruction(_JUMP_ANY_BIT, _SHARED_FILES, 0, 1),
        refused,
        _ALLOW_INSTRUCTION,
    ]
    # For another family, the kernel would create a socket and load its module before it finds that it cannot pair it.
    pairs = [_load_argument(0), *_branch_if_not_equal(_UNIX, [_return_error(errno.EAFNOSUPPORT)]), _ALLOW_INSTRUCTION]
    locks = [_load_argument(1), *_match_any(_OPEN_FILE_LOCK_COMMANDS, _return_error(errno.EINVAL), _ALLOW_INSTRUCTION)]
    reads = [
        _load_argument(5),
        _make_instruction(_JUMP_ANY_BIT, _RWF_NOWAIT, 0, 1),
        _return_error(errno.EOPNOTSUPP),
        _ALLOW_INSTRUCTION,
    ]
    terminal = [_load_argument(1), *_match_any(_TERMINAL_INJECTION_IOCTLS, refused, _ALLOW_INSTRUCTION)]
    limits = [_load_argument(0), *_branch_if_not_equal(_RLIMIT_CORE, [_ALLOW_INSTRUCTION]), _return_error(0)]
    own_limits = [
        _load_argument(0),
        *_branch_if_not_equal(0, [refused]),
        _load_argument(1),
        *_branch_if_not_equal(_RLIMIT_CORE, [_ALLOW_INSTRUCTION]),
        *_ignore_unless_null(2),
    ]
    signals = [_load_argument(0), *_branch_if_not_equal(_SIGXFSZ, [_ALLOW_INSTRUCTION]), *_ignore_unless_null(1)]
    # The agent, the first process, must get CPU time when a program's time is over.
    priority = [
        _load_argument(0),
        *_branch_if_equal(_PRIO_USER, [refused]),
        _load_argument(1),
        *_branch_if_equal(1, [refused]),
        _ALLOW_INSTRUCTION,
    ]
    turns = [_load_argument(0), *_branch_if_equal(1, [refused]), _ALLOW_INSTRUCTION]
    return [
        ("clone", clones),
        ("clone3", [_return_error(errno.ENOSYS)]),  # its flags are behind a pointer; libraries fall back to clone
        ("socket", _make_socket_rules()),
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


def make_seccomp_filter(architecture: str | None = None) -> bytes:
    """Return the filter for an architecture, by default this machine's, as an array of `struct sock_filter`.

    Raises:
        ValueError: this architecture is not supported.
    """
    architecture = architecture or platform.machine()
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ValueError(f"architecture must be one of {', '.join(SUPPORTED_ARCHITECTURES)}, got '{architecture}'")
    refused = _return_error(errno.EPERM)
    # Numbers of system calls depend on the architecture, which a program can choose for each call (seccomp(2)).
    program = [
        _make_instruction(_LOAD, _ARCH),
        _make_instruction(_JUMP_EQUAL, _AUDIT_ARCH[architecture], 1, 0),
        _make_instruction(_RETURN, _KILL),
        _make_instruction(_LOAD, _NUMBER),
    ]
    if architecture == "x86_64":  # x32 calls have the same architecture, and this bit in their number
        program += [_make_instruction(_JUMP_AT_LEAST, _X32_BIT, 0, 1), _make_instruction(_RETURN, _KILL)]
    for name, body in _make_argument_rules():
        program += _match_syscall(get_syscall_number(name, architecture), body)
    program += [_make_instruction(_JUMP_AT_LEAST, _FIRST_UNKNOWN_SYSCALL, 0, 1), _return_error(errno.ENOSYS)]
    for first, last in _group_consecutive(list_allowed_syscalls(architecture)):
        program += [
            _make_instruction(_JUMP_AT_LEAST, last + 1, 3, 0),
            _make_instruction(_JUMP_AT_LEAST, first, 0, 1),
            _ALLOW_INSTRUCTION,
            refused,
        ]
    program.append(refused)
    return b"".join(program)
