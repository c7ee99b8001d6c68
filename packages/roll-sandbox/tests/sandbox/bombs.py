"""Programs that multiply and try to stay, and a count of what is left of them that asks the kernel and not ROLL.

Each is a text for bash. `LEFT` processes at most are alive at once: a bomb fills its sandbox and no more.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BOMBS", "Bomb", "command_lines", "processes_left"]

_HELP = "import os, sys, time, signal, threading, ctypes\nlibc = ctypes.CDLL(None)\n"


@dataclass(frozen=True)
class Bomb:
    """One kind."""

    name: str
    text: str
    """For bash; it may end at once or never."""


def _python(name: str, source: str) -> Bomb:
    return Bomb(name, f"python3 -I -S -c {shlex.quote(_HELP + source)}")


BOMBS = [
    _python(
        "double fork with setsid",
        """
for _ in range(12):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(1000)
        os._exit(0)
""",
    ),
    Bomb("shell fork bomb", ":() { :|:& }; :"),
    _python(
        "fork and exit 1",
        """
while True:
    try:
        if os.fork(): os._exit(1)
    except OSError: pass
""",
    ),
    _python(
        "twenty that fork and exit",
        """
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        while True:
            try:
                if os.fork(): os._exit(1)
            except OSError: pass
""",
    ),
    Bomb(
        "loops of exec",
        """for _ in 1 2 3 4; do sh -c 'exec sh -c "$0" "$0"' 'exec sh -c "$0" "$0"' & done; sleep 0.1""",
    ),
    Bomb(
        "loops of fork and exec",
        """for _ in 1 2 3; do setsid sh -c 'sh -c "$0" "$0" & exit 1' 'sh -c "$0" "$0" & exit 1' & done; sleep 0.1""",
    ),
    _python(
        "signals ignored",
        """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
for _ in range(8):
    if os.fork() == 0: break
while True: time.sleep(1000)
""",
    ),
    _python(
        "daemons that start another when they end",
        """
def daemon():
    if os.fork(): os._exit(0)
    os.setsid()
    if os.fork(): os._exit(0)
    os.chdir("/"); os.umask(0); os.closerange(0, 256)
for _ in range(6):
    if os.fork() == 0:
        daemon()
        while True:
            time.sleep(0.002)
            try: daemon()
            except OSError: pass
""",
    ),
    Bomb("nohup and disown", "for _ in {1..12}; do nohup sleep 1000 >/dev/null 2>&1 & disown; done"),
    _python(
        "vfork and clone",
        """
SIGCHLD, PARENT, VFORK, VM = 17, 0x8000, 0x4000, 0x100
number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
for flags in (0, SIGCHLD, PARENT | SIGCHLD, PARENT, VFORK | SIGCHLD, 2, PARENT | 9) * 2:
    if libc.syscall(number, flags, 0, 0, 0, 0) == 0:
        if not flags & VFORK: time.sleep(1000)
        if libc.syscall(number, PARENT | SIGCHLD, 0, 0, 0, 0) == 0: time.sleep(1000)
        os._exit(0)
for _ in range(4): os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ)
""",
    ),
    _python(
        "threads that fork",
        """
def work():
    while True:
        try:
            if os.fork() == 0: time.sleep(1000)
        except OSError: time.sleep(0.01)
for _ in range(6): threading.Thread(target=work).start()
ctypes.CDLL(None).pthread_exit(None)
""",
    ),
    _python(
        "stopped, or traced where that is allowed",
        """
for n in range(10):
    if os.fork() == 0:
        if n % 2: libc.ptrace(0, 0, 0, 0)
        os.setsid()
        os.kill(os.getpid(), signal.SIGSTOP)
        while True: time.sleep(1000)
""",
    ),
    _python(
        "zombies",
        """
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        try:
            while True:
                if os.fork() == 0: os._exit(0)
        except OSError: time.sleep(1000)
""",
    ),
    Bomb("open pipes held", "for _ in {1..12}; do sleep 1000 & done; sleep 1000 | sleep 1000 & echo started"),
    Bomb(
        "background jobs",
        "(while :; do sleep 0.01; done) & (setsid sh -c 'while :; do sleep 0.01 & done') & "
        "(trap '' INT TERM HUP; exec sleep 1000) & { sleep 1000; } &",
    ),
    _python(
        "after closing everything",
        """
os.closerange(0, 256)
if os.fork(): os._exit(0)
os.setsid()
while True:
    try:
        if os.fork() == 0:
            while True: time.sleep(1000)
    except OSError: time.sleep(0.01)
""",
    ),
    Bomb(
        "an environment and a name of another",
        "for _ in {1..8}; do env -i bash -c 'exec -a kworker sleep 1000' & setsid env -i sleep 1000 & done",
    ),
]


def _read(process: Path, name: str) -> bytes:
    try:
        return (process / name).read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def _all_processes() -> list[Path]:
    return [each for each in Path("/proc").iterdir() if each.name.isdigit()]


def _user_namespace(process: Path) -> str:
    """Its name, which every process of a sandbox has and no other; empty where this user may not know."""
    try:
        return str((process / "ns" / "user").readlink())
    except OSError:
        return ""


def command_lines(namespace: str) -> set[bytes]:
    """Command lines of the processes of a user namespace."""
    return {_read(process, "cmdline") for process in _all_processes() if _user_namespace(process) == namespace}


def processes_left(marker: str, namespace: str | None, known: set[bytes]) -> list[str]:
    """Processes that have the marker in their environment, or are the sandbox's and have no known command line.

    Args:
        marker: in the environment that the program was given.
        namespace: of the sandbox's user; None: that of another process may not be asked.
        known: command lines of the sandbox's own processes.
    """
    found = []
    for process in _all_processes():
        marked = marker.encode() in _read(process, "environ")
        own = namespace is not None and _user_namespace(process) == namespace
        if marked or (own and _read(process, "cmdline") not in known and _read(process, "stat")):
            found.append(f"{process.name} {_read(process, 'cmdline')!r:.60} {_read(process, 'stat')!r:.60}")
    return found
