"""The filter, interpreted instruction by instruction."""

from __future__ import annotations

import errno
import struct

import pytest

from roll_sandbox.seccomp import make_seccomp_filter
from roll_sandbox.syscalls import CHECKED_SYSCALLS, get_syscall_number, list_allowed_syscalls

ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
architectures = pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])


def verdict(architecture: str, call: int, *arguments: int, arch: int | None = None) -> int:
    """What the kernel would do, by the rules of classic BPF."""
    values = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", call, ARCH[architecture] if arch is None else arch, 0, *values)
    program = list(struct.iter_unpack("=HBBI", make_seccomp_filter(architecture)))
    position = accumulator = 0
    while True:
        code, if_true, if_false, value = program[position]
        position += 1
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, value)[0]
        elif code == 0x54:
            accumulator &= value
        elif code == 0x06:
            return value
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            position += if_true if holds else if_false


@architectures
def test_sandbox_seccomp_exactly_the_listed_calls_are_allowed(architecture: str) -> None:
    checked = {get_syscall_number(name, architecture) for name in CHECKED_SYSCALLS}
    permitted = {call for call in range(600) if call not in checked and verdict(architecture, call) == ALLOW}
    assert permitted == set(list_allowed_syscalls(architecture))


@architectures
def test_sandbox_seccomp_refused_calls_fail_and_newer_ones_do_not_exist(architecture: str) -> None:
    refused = (
        set(range(463))
        - set(list_allowed_syscalls(architecture))
        - {get_syscall_number(name, architecture) for name in CHECKED_SYSCALLS}
    )
    assert {verdict(architecture, call) for call in refused} == {FAIL | errno.EPERM}
    assert verdict(architecture, 463) == FAIL | errno.ENOSYS


@architectures
def test_sandbox_seccomp_arguments_decide_about_fifteen_calls(architecture: str) -> None:
    def of(name: str, *arguments: int) -> int:
        return verdict(architecture, get_syscall_number(name, architecture), *arguments)

    assert of("clone", 0x003D0F00) == ALLOW  # a thread
    assert of("clone", 17) == ALLOW  # a process
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x80):
        assert of("clone", flag | 17) == FAIL | errno.EPERM
    assert of("clone", 0x400 | 17) == FAIL | errno.EPERM  # another process with the same table of files
    assert of("clone", 0x4000 | 0x100 | 17) == ALLOW  # as `posix_spawn` does
    assert of("clone3") == FAIL | errno.ENOSYS
    assert {family: of("socket", family, 1) for family in (1, 2, 10, 16, 17, 38, 40)} == {
        1: ALLOW,
        2: ALLOW,
        10: ALLOW,
        **dict.fromkeys((16, 17, 38, 40), FAIL | errno.EAFNOSUPPORT),
    }
    close_on_exec = 0x80000
    for family in (2, 10):
        for kind, protocol in ((1, 0), (1, 6), (2, 0), (2, 17)):
            assert of("socket", family, kind | close_on_exec, protocol) == ALLOW
        for kind in (0, 3, 4, 5, 6, 10):  # raw, sequences of packets, DCCP
            assert of("socket", family, kind | close_on_exec, 0) == FAIL | errno.ESOCKTNOSUPPORT
        for protocol in (1, 33, 132, 136, 255, 262):  # ICMP, DCCP, SCTP, UDP-Lite, raw, Multipath TCP
            assert of("socket", family, 1, protocol) == FAIL | errno.EPROTONOSUPPORT
    assert of("socket", 1, 5, 0) == ALLOW
    for kind in (1, 2, 5):
        assert of("socketpair", 1, kind | close_on_exec, 0) == ALLOW
        assert {of("socketpair", family, kind) for family in (0, 2, 10, 16, 17, 38, 40)} == {FAIL | errno.EAFNOSUPPORT}
    assert of("fcntl", 3, 6) == of("fcntl", 3, 7) == of("fcntl", 3, 1030) == ALLOW
    assert of("fcntl", 3, 37) == of("fcntl", 3, 38) == FAIL | errno.EINVAL
    assert of("preadv2", 3, 0x1000, 1, 0, 0, 0) == of("preadv2", 3, 0x1000, 1, 0, 0, 1) == ALLOW
    assert of("preadv2", 3, 0x1000, 1, 0, 0, 8) == of("preadv2", 3, 0x1000, 1, 0, 0, 9) == FAIL | errno.EOPNOTSUPP
    assert of("ioctl", 0, 0x5401) == ALLOW
    assert of("ioctl", 0, 0x5412) == FAIL | errno.EPERM
    assert of("prlimit64", 0) == ALLOW
    assert of("prlimit64", 1) == FAIL | errno.EPERM
    own = 4711  # a thread of one's own
    for name in ("sched_setaffinity", "sched_setparam", "sched_setscheduler", "sched_setattr"):
        assert of(name, 0) == of(name, own) == ALLOW
        assert of(name, 1) == FAIL | errno.EPERM
    assert of("setpriority", 0, 0, 5) == of("setpriority", 0, own, 5) == of("setpriority", 1, 0, 5) == ALLOW
    assert of("setpriority", 0, 1, 5) == of("setpriority", 1, 1, 5) == of("setpriority", 2, 0, 5) == FAIL | errno.EPERM
    pointers = (0x1000, 1 << 32, 1 << 46)  # one whose low half is 0 is none the less a pointer
    assert of("setrlimit", 7, 0x1000) == of("prlimit64", 0, 7, 0x1000) == of("prlimit64", 0, 4, 0) == ALLOW
    assert {of("setrlimit", 4, pointer) for pointer in pointers} == {FAIL}
    assert {of("prlimit64", 0, 4, pointer) for pointer in pointers} == {FAIL}
    assert of("rt_sigaction", 2, 0x1000) == of("rt_sigaction", 25, 0) == ALLOW  # another signal; only asking
    assert {of("rt_sigaction", 25, pointer) for pointer in pointers} == {FAIL}  # does nothing, and says 0


@architectures
def test_sandbox_seccomp_other_tables_of_calls_end_the_program(architecture: str) -> None:
    assert verdict(architecture, 0, arch=0x40000003) == KILL  # 32-bit x86
    assert verdict("x86_64", 0x40000000) == KILL  # x32


def test_sandbox_seccomp_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"x86_64.*'riscv64'"):
        make_seccomp_filter("riscv64")


@architectures
def test_sandbox_seccomp_extended_attributes_are_not_offered(architecture: str) -> None:
    for name in ("setxattr", "lsetxattr", "fsetxattr"):
        assert verdict(architecture, get_syscall_number(name, architecture)) == FAIL | errno.EOPNOTSUPP
