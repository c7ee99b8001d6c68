"""Ends programs and sessions with all processes that they started, fork bombs included, or else the whole sandbox.

With a PID namespace the init of the program is killed: the kernel then kills every process of the namespace, and lets
the init be reaped only when no process is left. Without one (`docker`, `subprocess`) processes are found by their
parents and their session, stopped and killed; processes that left both are ended with the last program or session.
"""

from __future__ import annotations

import os
import time

from roll_sandbox.agent import usage

NEVER = float("inf")
END_S = 5.0
"""How long an agent in the host's PID namespace tries to end leftover processes before it exits."""
_EMPTY_S = 10.0
"""How long the processes of a program may take to end after SIGKILL. After that, the whole sandbox is discarded."""
_SWEEP_S = 0.2
"""How long ending processes one by one may block the loop before it serves others and tries again."""
_REST = 0
"""Key in `_until` of the processes that no program or session owns any more."""


class Terminator:
    """Programs and sessions that were killed and have not been reaped yet."""

    def __init__(self):
        self._until = {}
        """The time by which each init or program must have ended, by pid."""
        self._sweep_at = NEVER

    def __bool__(self):
        """Return whether a process that was to end may still exist."""
        return bool(self._until)

    def end(self, started):
        """End a program or a session."""
        self._until.setdefault(started.pid, time.monotonic() + _EMPTY_S)
        if started.status is not None:
            os.kill(started.pid, 9)
        else:
            usage.kill_all(lambda: usage.list_program_pids(started.pid), _SWEEP_S)

    def reaped(self, pid):
        """Record that a child of the agent was reaped."""
        self._until.pop(pid, None)

    def clean_up(self, started):
        """End the processes that a reaped program or session may have left behind."""
        if started.status is None:
            usage.kill_all(lambda: usage.list_program_pids(started.pid), _SWEEP_S)
            self._sweep_at = time.monotonic()

    def deadline(self):
        """Return the time at which `check` must be called."""
        return min([self._sweep_at, *self._until.values()])

    def check(self, now, idle):
        """End the processes that are left, and the whole sandbox if that takes too long.

        Args:
            now: the time, at or after `deadline`.
            idle: whether no program and no session runs, so that every process here was left behind.
        """
        if now >= self._sweep_at:
            self._sweep_at = NEVER
            if idle and usage.kill_all(lambda: usage.list_descendants(os.getpid()), _SWEEP_S):
                self._until.pop(_REST, None)
            elif idle:
                self._until.setdefault(_REST, now + _EMPTY_S)
                self._sweep_at = now + _SWEEP_S
        if self._until and now >= min(self._until.values()):
            os.write(2, b"sandbox: the processes of a program do not end; the sandbox is discarded\n")
            usage.send_signal(9, usage.list_descendants(os.getpid()))
            os._exit(1)
