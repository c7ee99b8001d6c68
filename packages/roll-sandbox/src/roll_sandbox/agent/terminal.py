"""Terminals for programs, from a devpts file system of this sandbox.

Imports are inside the functions, so that they do not delay sandboxes without terminals.
"""

from __future__ import annotations

import os

from roll_sandbox.agent import kernel

_PTY_DIRECTORY = "/dev/pts"
_UNLOCK, _PEER, _SIZE, _CONTROL = 0x40045431, 0x5441, 0x5414, 0x540E
"""Numbers of the ioctl requests TIOCSPTLCK, TIOCGPTPEER, TIOCSWINSZ and TIOCSCTTY."""
MAX_TERMINALS = 16
"""Maximum number of terminals in a sandbox that has its own file system."""


def open_terminal(has_own_files, size):
    """Open a terminal of this size; return the file descriptors of the agent's end and of the program's end."""
    import fcntl

    place = _PTY_DIRECTORY + "/ptmx"
    if has_own_files and not os.path.exists(place):
        # MS_NOSUID | MS_NOEXEC. Without `ptmxmode`, the `ptmx` of a devpts file system has the mode 0000.
        options = "newinstance,ptmxmode=0666,mode=620,max=%d" % MAX_TERMINALS  # noqa: UP031
        kernel.mount("devpts", _PTY_DIRECTORY, "devpts", 2 | 8, options)
    if not os.path.exists(place):
        place = "/dev/ptmx"
    ours = os.open(place, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        # A new terminal is locked until TIOCSPTLCK, as after posix_openpt(3).
        fcntl.ioctl(ours, _UNLOCK, bytes(4))
        # TIOCGPTPEER opens the other end without its path, which may be in another mount namespace (ioctl_tty(2)).
        theirs = fcntl.ioctl(ours, _PEER, os.O_RDWR | os.O_NOCTTY)
        resize(ours, size)
    except OSError:
        os.close(ours)
        raise
    os.set_blocking(ours, False)
    return ours, theirs


def resize(terminal, size):
    """Set a terminal's rows and columns; programs in it get SIGWINCH if they change."""
    import fcntl

    rows, columns = size
    order = __import__("sys").byteorder
    fcntl.ioctl(terminal, _SIZE, rows.to_bytes(2, order) + columns.to_bytes(2, order) + bytes(4))


def set_controlling_terminal(terminal):
    """Make this the controlling terminal of this process, which must lead a new session."""
    import fcntl

    fcntl.ioctl(terminal, _CONTROL, 0)
