"""Programs that try to get out, to harm, to stay, or to cheat: run by `test_hostile.py`, listed in docs/security.md.

A program that succeeds prints BREACH. `HOST_…` words are replaced by facts of the host (a canary's path, a port). On
the host, and with a checker, there is a secret of the form CANARY-<32 hexadecimal digits>.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from roll_sandbox import Command, Limit, Outcome, Program, PythonCode

__all__ = ["HOSTILE", "Hostile"]

_HELP = """
import ctypes, errno, os, resource, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def refused(action, *arguments):
    try:
        value = action(*arguments)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print("refused", getattr(error, "errno", None))
    else:
        print("BREACH", value)
"""


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """One attack."""

    name: str
    proves: str
    program: Program
    outcomes: frozenset[Outcome] = frozenset({Outcome.EXITED})
    limits: frozenset[Limit] = field(default_factory=frozenset)
    """That must have been hit."""
    says: bytes | None = None
    """What standard output must contain."""


def _python(name: str, proves: str, source: str, *, help: bool = True, **settings: Any) -> Hostile:
    program = {key: settings.pop(key) for key in ("wall_s", "cpu_s", "result", "output_bytes") if key in settings}
    return Hostile(
        name=name, proves=proves, program=PythonCode(source=(_HELP if help else "") + source, **program), **settings
    )


def _refused(name: str, proves: str, action: str) -> Hostile:
    return _python(name, proves, action, says=b"refused")


def _ends(*outcomes: Outcome) -> dict[str, Any]:
    limits = {Limit(outcome.value) for outcome in outcomes if outcome.value in set(Limit)}
    return {"outcomes": frozenset(outcomes), "limits": frozenset(limits) if len(outcomes) == 1 else frozenset()}


_RESOURCES = [
    _python(
        "fork bomb",
        "the number of processes is bounded",
        "while True: os.fork()",
        wall_s=3.0,
        outcomes=frozenset({Outcome.PROCESSES, Outcome.WALL_TIME, Outcome.MEMORY}),
    ),
    _python(
        "fork bomb that ignores errors",
        "the number of processes is bounded, and all are killed",
        """
while True:
    try: os.fork()
    except OSError: pass
""",
        wall_s=3.0,
        outcomes=frozenset({Outcome.WALL_TIME, Outcome.MEMORY}),
        limits=frozenset({Limit.PROCESSES}),
    ),
    Hostile(
        name="shell fork bomb",
        proves="the number of processes is bounded, and all are killed",
        program=Command(argv=("bash", "-c", ":() { :|:& }; :; sleep 50"), wall_s=1.0),
        outcomes=frozenset({Outcome.WALL_TIME, Outcome.PROCESSES}),
        limits=frozenset({Limit.PROCESSES}),
    ),
    _python(
        "thread bomb",
        "threads count as processes",
        """
import threading
try:
    for _ in range(5000): threading.Thread(target=time.sleep, args=(50,), daemon=True).start()
    print("BREACH")
except RuntimeError:
    os._exit(3)
""",
        outcomes=frozenset({Outcome.PROCESSES}),
        limits=frozenset({Limit.PROCESSES}),
    ),
    _python(
        "zombies",
        "zombies count as processes",
        """
try:
    for _ in range(5000):
        if os.fork() == 0: os._exit(0)
    print("BREACH")
except OSError:
    os._exit(3)
""",
        outcomes=frozenset({Outcome.PROCESSES}),
        limits=frozenset({Limit.PROCESSES}),
    ),
    _python(
        "memory bomb",
        "the memory of a program is bounded",
        "x = bytearray(2**31); x[::4096] = b'1' * len(x[::4096])",
        **_ends(Outcome.MEMORY),
    ),
    _python(
        "memory in many processes",
        "the memory of all processes together is bounded",
        """
for _ in range(20):
    if os.fork() == 0:
        x = bytearray(20 * 2**20)
        time.sleep(50)
while True: os.wait()
""",
        wall_s=2.0,
        outcomes=frozenset({Outcome.MEMORY, Outcome.WALL_TIME}),
        limits=frozenset({Limit.MEMORY}),
    ),
    _python(
        "memory in anonymous files",
        "memfd files count as memory",
        """
fd = os.memfd_create("x")
while True:
    os.lseek(fd, 0, os.SEEK_SET)
    fd = os.memfd_create("x")
    for _ in range(7): os.write(fd, bytes(2**20))
""",
        outcomes=frozenset({Outcome.MEMORY}),
        limits=frozenset({Limit.MEMORY}),
    ),
    _python(
        "memory shared between processes",
        "shared memory counts as memory",
        """
import mmap
x = mmap.mmap(-1, 2**30)
for i in range(0, 2**30, 4096): x[i] = 1
print("BREACH")
""",
        **_ends(Outcome.MEMORY),
    ),
    _python(
        "huge integer",
        "a computation that is too long ends at the time limit",
        "10 ** 10 ** 10",
        cpu_s=0.5,
        outcomes=frozenset({Outcome.CPU_TIME, Outcome.MEMORY}),
    ),
    _python(
        "catastrophic regular expression",
        "C code that never returns is killed",
        """
import re
re.match(r"(a+)+$", "a" * 60 + "b")
""",
        cpu_s=0.5,
        **_ends(Outcome.CPU_TIME),
    ),
    _python(
        "endless loop in four processes",
        "the CPU time of all processes together is bounded",
        """
for _ in range(3): os.fork()
while True: pass
""",
        cpu_s=0.6,
        wall_s=15.0,
        **_ends(Outcome.CPU_TIME),
    ),
    _python("sleep", "the wall time is bounded", "time.sleep(1000)", wall_s=0.3, **_ends(Outcome.WALL_TIME)),
    _python(
        "sleep that ignores signals",
        "a program cannot avoid being killed",
        """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True:
    time.sleep(1000)
""",
        wall_s=0.3,
        **_ends(Outcome.WALL_TIME),
    ),
    _python(
        "stopped process",
        "a stopped process is killed",
        "os.kill(os.getpid(), signal.SIGSTOP); print('BREACH')",
        wall_s=0.3,
        **_ends(Outcome.WALL_TIME),
    ),
    _python(
        "endless recursion in C",
        "a crash ends only that program",
        """
sys.setrecursionlimit(10**9)
class A: pass
a = A()
A.__getattr__ = lambda self, name: getattr(self, name)
def f(n): return f(n + 1) if n % 2 else sorted([1, 2], key=lambda _: f(n + 1))
f(0)
""",
        outcomes=frozenset({Outcome.SIGNALLED, Outcome.MEMORY, Outcome.EXITED}),
    ),
    _python(
        "disk filler",
        "the size of all files together is bounded",
        """
for n in range(100):
    with open(f"f{n}", "wb") as f: f.write(bytes(4 * 2**20))
print("BREACH")
""",
        outcomes=frozenset({Outcome.DISK}),
        limits=frozenset({Limit.DISK}),
    ),
    _python(
        "disk filler elsewhere",
        "/tmp and /dev/shm share this limit with home",
        """
for n in range(20):
    for d in ("/tmp", "/dev/shm"):
        with open(f"{d}/f{n}", "wb") as f: f.write(bytes(4 * 2**20))
print("BREACH")
""",
        outcomes=frozenset({Outcome.DISK}),
        limits=frozenset({Limit.DISK}),
    ),
    _python(
        "file flood",
        "the number of files is bounded",
        """
for n in range(10**6): open(f"f{n}", "w").close()
print("BREACH")
""",
        outcomes=frozenset({Outcome.DISK}),
        limits=frozenset({Limit.DISK}),
    ),
    _python(
        "huge sparse file",
        "the size of one file is bounded",
        "os.truncate(os.open('f', os.O_CREAT | os.O_RDWR), 2**40)",
        **_ends(Outcome.FILE_SIZE),
    ),
    _python(
        "a file limit passed through a pointer",
        "a pointer whose lower half is zero is not treated as null",
        """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
place = libc.mmap(1 << 32, 4096, 3, 0x32, -1, 0)
ctypes.c_long.from_address(place).value = 1  # SIG_IGN
call(13, 25, place, 0, 8)
try: open("f", "wb").truncate(2**40)
except OSError: print("BREACH")
""",
        **_ends(Outcome.FILE_SIZE),
    ),
    _python(
        "output flood",
        "the size of the output is bounded",
        "while True: os.write(1, b'x' * 65536)",
        **_ends(Outcome.OUTPUT),
    ),
    _python(
        "error flood",
        "the size of standard error is bounded",
        "while True: os.write(2, b'x' * 65536)",
        **_ends(Outcome.OUTPUT),
    ),
    _python(
        "result flood",
        "the size of the result is bounded",
        "while True: os.write(3, b'x' * 65536)",
        result=True,
        **_ends(Outcome.OUTPUT),
    ),
    _python(
        "output flood by a child",
        "the output of all processes together is bounded",
        """
if os.fork() == 0:
    while True: os.write(1, b"y" * 65536)
time.sleep(1000)
""",
        **_ends(Outcome.OUTPUT),
    ),
    _refused(
        "file descriptors", "the number of open files is bounded", "refused(lambda: [os.dup(0) for _ in range(100000)])"
    ),
    _python(
        "sockets within sockets",
        "the number of descriptors in flight between sockets is bounded",
        """
first, second = socket.socketpair()
try:
    for _ in range(100000):
        outer, inner = socket.socketpair()
        socket.send_fds(outer, [b"x"], [first.fileno(), second.fileno()])
        first, second = outer, inner
    print("BREACH")
except OSError: print("refused")
""",
        says=b"refused",
    ),
    _python(
        "out of memory in the agent",
        "the program is treated as having exceeded its memory limit, whichever process the kernel kills",
        """
with open("/proc/self/oom_score_adj", "w") as file: file.write("0")
for n in range(12):
    with open(f"f{n}", "wb") as file: file.write(bytes(2**20))
kept = []
while True:
    kept.append(os.memfd_create("x"))
    os.write(kept[-1], bytes(2**20))
""",
        **_ends(Outcome.MEMORY),
    ),
    _python(
        "file locks",
        "locks use kernel memory that no cgroup counts: a program with thousands of them is killed",
        """
import fcntl, struct
try:
    while True:
        fd = os.memfd_create("x")
        for n in range(500): fcntl.fcntl(fd, fcntl.F_SETLK, struct.pack("hhlli", fcntl.F_WRLCK, 0, 2 * n, 1, 0))
except OSError as error: print(error)
time.sleep(1000)
""",
        wall_s=5.0,
        **_ends(Outcome.MEMORY),
    ),
    _python(
        "file locks of processes that ended",
        "locks that belong to no single process are refused, because they could not be attributed to a program",
        """
import fcntl, struct
refused(call, 56, 0x400 | 17, 0, 0, 0, 0)
refused(fcntl.fcntl, os.memfd_create("x"), 37, struct.pack("hhlli", fcntl.F_WRLCK, 0, 0, 1, 0))
""",
        says=b"refused 1\nrefused 22\n",
    ),
    _python(
        "queues of input and output",
        "a program cannot use up the host's asynchronous queues",
        """
place = ctypes.create_string_buffer(8)
refused(call, 206, 65536, place)
""",
        says=b"refused 1\n",
    ),
    _python(
        "CPU time of children that no process waits for",
        "the kernel counts their time, so a program cannot hide it by not waiting for them",
        """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        end = time.perf_counter() + 0.05
        while time.perf_counter() < end: pass
        os._exit(0)
    time.sleep(0.05)
""",
        cpu_s=0.6,
        wall_s=12.0,
        **_ends(Outcome.CPU_TIME),
    ),
    _python(
        "CPU time without a timer",
        "CPU time is counted even if a program changes its own timers and limits",
        """
for timer in (signal.ITIMER_PROF, signal.ITIMER_VIRTUAL, signal.ITIMER_REAL): signal.setitimer(timer, 0)
for number in (signal.SIGPROF, signal.SIGXCPU, signal.SIGVTALRM): signal.signal(number, signal.SIG_IGN)
while True: pass
""",
        cpu_s=0.4,
        wall_s=12.0,
        **_ends(Outcome.CPU_TIME),
    ),
    _refused(
        "raising a limit",
        "limits cannot be raised",
        "refused(resource.setrlimit, resource.RLIMIT_NOFILE, (10**6, 10**6))",
    ),
    _refused(
        "limits of the first process",
        "a program cannot set the limits of other processes",
        "refused(resource.prlimit, 1, resource.RLIMIT_NOFILE, (0, 0))",
    ),
]

_NETWORK = [
    _refused(
        "TCP to the internet",
        "there is no network",
        """
s = socket.socket(); s.settimeout(2)
refused(s.connect, ("1.1.1.1", 53))
""",
    ),
    _refused(
        "UDP to the internet",
        "there is no network",
        "refused(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto, b'x', ('8.8.8.8', 53))",
    ),
    _refused(
        "a server on the host",
        "the host's loopback is not reachable",
        """
s = socket.socket(); s.settimeout(2)
refused(s.connect, ("127.0.0.1", HOST_PORT))
""",
    ),
    _refused(
        "an abstract socket of the host",
        "abstract sockets are per network namespace",
        "refused(socket.socket(socket.AF_UNIX).connect, '\\0HOST_ABSTRACT')",
    ),
    _refused(
        "a socket file of the host",
        "the host's files are not visible",
        "refused(socket.socket(socket.AF_UNIX).connect, 'HOST_SOCKET')",
    ),
    _refused("name lookup", "there is no network", "refused(socket.getaddrinfo, 'example.com', 80)"),
    _refused(
        "vsock",
        "the socket of a virtual machine to its host is blocked",
        "refused(socket.socket, 40, socket.SOCK_STREAM)",
    ),
    _refused("raw packets", "packet sockets are blocked", "refused(socket.socket, 17, socket.SOCK_RAW)"),
    _python(
        "rare protocols",
        "only TCP and UDP are allowed, so a program cannot make the kernel load a module",
        """
for kind in ((1, 132), (5, 0), (5, 132), (6, 0), (6, 33), (2, 136), (1, 262), (2, 1), (3, 255)):
    try: socket.socket(2, *kind); print("BREACH", kind)
    except OSError as error:
        if error.errno in (errno.ESOCKTNOSUPPORT, errno.EPROTONOSUPPORT): print("refused")
""",
        says=b"refused\n" * 9,
    ),
    _python(
        "socket pairs of other families",
        "socket pairs of families other than local are blocked",
        """
for family in (2, 10, 16, 17, 38, 40, 45):
    for kind, protocol in ((1, 0), (2, 0), (3, 0), (1, 262), (2, 136)):
        try: socket.socketpair(family, kind, protocol); print("BREACH", family)
        except OSError as error: print("refused" if error.errno == errno.EAFNOSUPPORT else f"BREACH {family} {error}")
""",
        says=b"refused\n" * 35,
    ),
    _refused("netlink", "the kernel's network configuration is blocked", "refused(socket.socket, 16, socket.SOCK_RAW)"),
    _python(
        "network devices",
        "the only device is the program's own loopback",
        """
names = {line.split(":")[0].strip() for line in open("/proc/net/dev").read().splitlines()[2:]}
print("refused" if names <= {"lo"} else f"BREACH {names}")
""",
        says=b"refused",
    ),
]

_HOST = [
    _refused("passwords", "the host's /etc is not visible", "refused(lambda: open('/etc/shadow').read())"),
    _refused(
        "a file in the host's /tmp", "the host's /tmp is not visible", "refused(lambda: open('HOST_CANARY').read())"
    ),
    _refused("a file of ROLL", "the host's files are not visible", "refused(lambda: open('HOST_SOURCE').read())"),
    _python(
        "homes",
        "the only home is the sandbox's own",
        """
print("refused" if {name for name in os.listdir("/home") if name[0] != "."} == {"user"} else "BREACH")
""",
        says=b"refused",
    ),
    _python(
        "environment",
        "the environment has no variable of the host",
        """
texts = [repr(dict(os.environ))]
for pid in filter(str.isdigit, os.listdir("/proc")):
    try: texts.append(open(f"/proc/{pid}/environ").read())
    except OSError: pass
import re
print("BREACH" if re.search("CANARY" + "-[0-9a-f]{32}", "".join(texts)) else "refused")
""",
        says=b"refused",
    ),
    _refused(
        "the root of the first process", "the agent's files cannot be reached", "refused(os.listdir, '/proc/1/root')"
    ),
    _refused(
        "the descriptors of the first process",
        "the agent's connection to the host cannot be reached",
        "refused(os.listdir, '/proc/1/fd')",
    ),
    _python(
        "a core file",
        "a crash does not start the host's core-dump handler",
        """
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print("refused" if resource.getrlimit(resource.RLIMIT_CORE) == (1, 1) else "BREACH")
""",
        says=b"refused",
    ),
    _refused(
        "the memory of the first process",
        "the agent's memory cannot be read or changed",
        "refused(open, '/proc/1/mem', 'r+b')",
    ),
    _python(
        "own descriptors",
        "a program inherits only its own descriptors",
        """
found = {int(name) for name in os.listdir("/proc/self/fd")}
print("refused" if max(found) <= 3 else f"BREACH {found}")
""",
        says=b"refused",
    ),
    _python(
        "system settings",
        "nothing in /proc/sys can be written",
        """
for path in ("sys/kernel/core_pattern", "sys/vm/drop_caches", "sysrq-trigger", "sys/kernel/hostname"):
    refused(open, "/proc/" + path, "w")
""",
        says=b"refused",
    ),
    _python(
        "kernel memory",
        "there is no device that gives access to kernel memory",
        """
for path in ("/dev/mem", "/dev/kmsg", "/proc/kcore", "/dev/vda", "/dev/sda", "/proc/kmsg"):
    refused(lambda: open(path, "rb").read(1))
""",
        says=b"refused",
    ),
    _python(
        "control groups",
        "a program cannot change its own limits",
        """
for directory, _, names in os.walk("/sys/fs/cgroup"):
    for name in names:
        try: os.close(os.open(f"{directory}/{name}", os.O_WRONLY | os.O_NONBLOCK)); print("BREACH", name)
        except OSError: pass
print("refused")
""",
        says=b"refused",
    ),
    _python(
        "writing to the system",
        "the system is read-only",
        """
for path in ("/usr/bin/roll-test", "/roll-test", "/etc/passwd", "/dev/roll-test", "/usr/bin/env"):
    refused(open, path, "ab")
""",
        says=b"refused",
    ),
    _refused(
        "hard link to a system file",
        "a link does not make the file writable",
        "refused(os.link, '/usr/bin/env', 'env')",
    ),
    _python(
        "symbolic link to a system file",
        "a link does not make the file writable",
        """
os.symlink("/usr/bin/env", "link")
refused(open, "link", "ab")
""",
        says=b"refused",
    ),
]

_KERNEL = [
    _python(
        "mounting",
        "mounts and namespaces are refused, which removes the kernel's largest attack surface",
        """
refused(call, 165, b"none", b"/tmp", b"tmpfs", 0, 0)
refused(call, 166, b"/proc", 2)
refused(call, 165, b"none", b"/", 0, 32 | 4096, 0)
refused(call, 428, -100, b"/", 1)
refused(call, 442, -100, b"/", 0, 0, 0)
""",
        says=b"refused",
    ),
    _python(
        "new namespaces",
        "a program cannot create a user namespace, in which it would be root",
        """
for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000): refused(call, 272, flag)
refused(call, 56, 0x10000000 | 17, 0, 0, 0, 0)
refused(call, 435, 0, 0)
refused(call, 308, os.open("/proc/self/ns/mnt", os.O_RDONLY), 0)
""",
        says=b"refused",
    ),
    _python(
        "changing the root",
        "chroot and pivot_root are refused",
        """
refused(os.chroot, "/tmp")
refused(call, 155, b"/tmp", b"/tmp")
""",
        says=b"refused",
    ),
    _python(
        "becoming root",
        "a program cannot gain another UID or capabilities",
        """
refused(os.setuid, 0)
refused(os.setgid, 0)
refused(os.setgroups, [0])
status = open("/proc/self/status").read()
print("BREACH" if "NoNewPrivs:\\t1" not in status or "CapEff:\\t0000000000000000" not in status else "refused")
print("BREACH" if "CapBnd:\\t0000000000000000" not in status or "Seccomp:\\t2" not in status else "refused")
""",
        says=b"refused",
    ),
    Hostile(
        name="set-user-id programs",
        proves="set-user-id bits have no effect",
        program=Command(
            argv=(
                "bash",
                "-c",
                "for p in $(find /usr/bin -perm -4000); do echo x | timeout 1 $p -c id; done; id -u; echo refused",
            )
        ),
        says=b"1000\nrefused",
    ),
    _python(
        "devices",
        "a program cannot create a device",
        "refused(os.mknod, 'disk', 0o60666, os.makedev(254, 0))",
        says=b"refused",
    ),
    _python(
        "tracing",
        "no process can be traced or read",
        """
pid = os.fork()
if pid == 0:
    time.sleep(50); os._exit(0)
for target in (1, pid):
    refused(call, 101, 16, target, 0, 0)
    refused(call, 310, target, b"", 0, b"", 0, 0)
    refused(call, 438, os.pidfd_open(target), 0, 0)
os.kill(pid, 9)
""",
        says=b"refused",
    ),
    _python(
        "kernel interfaces",
        "BPF, performance events, io_uring, userfaultfd, keys and modules are blocked",
        """
for number in (321, 298, 425, 323, 248, 249, 250, 175, 313, 246, 304, 180, 103, 227, 159, 303):
    refused(call, number, 0, 0, 0, 0, 0)
""",
        says=b"refused",
    ),
    _python(
        "extended attributes",
        "a program cannot set extended attributes, which hold file capabilities",
        """
open("f", "w").close()
refused(os.setxattr, "f", "user.x", b"1")
""",
        says=b"refused",
    ),
    _python(
        "cached pages of files",
        "a program cannot find out which pages of the host's files an earlier program has read",
        """
fd = os.open("/usr/bin/env", os.O_RDONLY)
refused(os.preadv, fd, [bytearray(1)], 0, 8)
refused(call, 451, fd, bytes(16), bytes(40), 0)
""",
        says=b"refused",
    ),
    _python(
        "system calls of the x32 table",
        "a system call through another call table ends the program",
        "call(0x40000000 | 39); print('BREACH')",
        outcomes=frozenset({Outcome.SIGNALLED}),
    ),
    _python(
        "typing into a terminal",
        "TIOCSTI is refused",
        """
import fcntl
refused(fcntl.ioctl, 0, 0x5412, b"x")
refused(fcntl.ioctl, 0, 0x541C, b"x")
""",
        says=b"refused",
    ),
    _python(
        "lifting the filter",
        "the filter cannot be removed",
        """
refused(call, 157, 22, 0, 0, 0, 0)
refused(call, 317, 0, 0, 0)
""",
        says=b"refused",
    ),
]

_PROCESSES = [
    _python(
        "killing the first process",
        "signals do not reach the agent",
        """
for number in (9, 15, 19, 11):
    try: os.kill(1, number)
    except OSError: pass
time.sleep(0.05)
print("alive")
""",
        says=b"alive",
    ),
    _python(
        "delaying the first process",
        "the agent, which enforces the time limit, still runs",
        """
refused(os.setpriority, os.PRIO_PROCESS, 1, 19)
refused(os.setpriority, os.PRIO_PGRP, 1, 19)
refused(os.setpriority, os.PRIO_USER, 0, 19)
refused(os.setpriority, os.PRIO_USER, os.getuid(), 19)
refused(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0))
refused(os.sched_setaffinity, 1, {min(os.sched_getaffinity(0))})
os.nice(1)
os.sched_setaffinity(0, os.sched_getaffinity(0))
""",
        says=b"refused 1\n" * 6,
    ),
    _python(
        "killing everything",
        "a program can end only its own processes",
        "os.kill(-1, 9); print('BREACH')",
        outcomes=frozenset({Outcome.SIGNALLED, Outcome.EXITED}),
    ),
    _python(
        "killing processes of the host",
        "the host's process IDs have no meaning in a sandbox",
        """
for pid in (HOST_PID, HOST_PID + 1, 2**21, 400):
    refused(os.kill, pid, 9)
""",
        says=b"refused",
    ),
    _python(
        "seeing processes of the host",
        "a program sees only its own processes",
        """
print("BREACH" if len([n for n in os.listdir("/proc") if n.isdigit()]) > 2 else "refused")
""",
        says=b"refused",
    ),
    _python(
        "staying alive",
        "a daemon ends with its program",
        """
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        time.sleep(1000)
print("left")
""",
        says=b"left",
    ),
    _python(
        "holding the output open",
        "the end of a program does not wait for its daemons",
        """
if os.fork() == 0:
    os.setsid(); time.sleep(1000)
os.write(1, b"left"); os._exit(0)
""",
        wall_s=10.0,
        says=b"left",
    ),
    _python(
        "waking up later",
        "timers and alarms end with the program",
        """
signal.signal(signal.SIGALRM, lambda *_: print("BREACH"))
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
print("left"); os._exit(0)
""",
    ),
]

_CHEATING = [
    _python("exiting early", "an exit code of 0 without output is not a result", "os._exit(0)"),
    _python(
        "forging the agent's report",
        "a program's output is never read as a report",
        """
frame = b'x' + (1).to_bytes(4, 'little') + b'{"code":0,"signal":0,"limits":[],"wall_s":0,"cpu_s":0,"peak":0}'
frame = len(frame).to_bytes(4, 'little') + frame
for fd in range(0, 300):
    try: os.write(fd, frame)
    except OSError: pass
os._exit(7)
""",
        says=b'"code":0',
    ),
    _python(
        "imitating the init",
        "a program cannot write the report of a program's end",
        """
for name in ("/proc/1/fd/4", "/proc/self/fd/4", "/dev/fd/4"): refused(os.open, name, os.O_WRONLY)
""",
        says=b"refused",
    ),
    _python(
        "looking through the interpreter",
        "no frame, object or module leads to the agent's data",
        """
import gc
def words():
    frame = sys._getframe()
    while frame:
        yield from map(str, frame.f_globals); yield from map(str, frame.f_locals)
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, dict):
            for key, value in list(thing.items()):
                if isinstance(value, (str, bytes)): yield repr(value)
import re
print("BREACH" if any(re.search("CANARY" + "-[0-9a-f]{32}", word) for word in words()) else "refused")
""",
        says=b"refused",
    ),
    _python(
        "searching the memory",
        "the process contains no data of the host or the checker",
        """
import re
pattern, found = re.compile(b"CANARY" + b"-[0-9a-f]{32}"), []
with open("/proc/self/mem", "rb", 0) as memory:
    for line in open("/proc/self/maps").read().splitlines():
        span, rights, *_ = line.split()
        start, end = (int(x, 16) for x in span.split("-"))
        if rights[0] != "r" or "[v" in line: continue
        memory.seek(start)
        try: found += pattern.findall(memory.read(end - start))
        except OSError: continue
print("BREACH" if found else "searched")
""",
        says=b"searched",
    ),
]

HOSTILE = [*_RESOURCES, *_NETWORK, *_HOST, *_KERNEL, *_PROCESSES, *_CHEATING]
