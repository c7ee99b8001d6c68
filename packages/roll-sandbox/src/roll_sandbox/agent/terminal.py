"""Terminals for programs: pairs of descriptors, from a devpts file system of this sandbox's own.

Imports are inside the functions, so that sandboxes without terminals do not pay for them.
"""

from __future__ import annotations

import os

from roll_sandbox.agent import kernel

_DIRECTORY = "/dev/pts"
_UNLOCK, _PEER, _SIZE, _CONTROL = 0x40045431, 0x5441, 0x5414, 0x540E
"""TIOCSPTLCK, TIOCGPTPEER, TIOCSWINSZ, TIOCSCTTY."""
MOST = 16
"""Most terminals of a sandbox that has a file system of its own."""


def open_pair(own, size):
    """Open a terminal of this size, and return the descriptors of the agent's end and of the program's."""
    import fcntl

    place = _DIRECTORY + "/ptmx"
    if own and not os.path.exists(place):
        kernel.mount("devpts", _DIRECTORY, "devpts", 2 | 8, "newinstance,ptmxmode=0666,mode=620,max=%d" % MOST)  # noqa: UP031
    if not os.path.exists(place):
        place = "/dev/ptmx"
    ours = os.open(place, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(ours, _UNLOCK, bytes(4))
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


def control(terminal):
    """Make the terminal the controlling one of this process, which must lead a new session."""
    import fcntl

    fcntl.ioctl(terminal, _CONTROL, 0)
