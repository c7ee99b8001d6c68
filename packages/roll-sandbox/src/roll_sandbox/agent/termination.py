"""Ends programs and sessions with all processes that they started, even fork bombs; if that fails, the whole sandbox.

If a program has a PID namespace, its init is killed: the kernel then kills every process of the namespace, and the
init can be reaped only when no process is left. Without a PID namespace (`docker`, `subprocess`), processes are found
by their parents and their session, stopped and killed. Processes that have left both are killed when no program and no
session runs.
"""

from __future__ import annotations

import os
import time

from roll_sandbox.agent import usage

NEVER = float("inf")
END_TIMEOUT_S = 5.0
"""Maximum seconds for which an agent in the host's PID namespace tries to end leftover processes before it exits."""
_EXIT_TIMEOUT_S = 10.0
"""Seconds that the processes of a program have to end after SIGKILL; then the whole sandbox is discarded."""
_KILL_TIMEOUT_S = 0.2
"""Maximum seconds during which ending processes one by one may block the loop; then it is retried later."""
_LEFTOVERS_KEY = 0
"""Key in `_until` for processes that no longer belong to a program or session."""


class Terminator:
    """Ends programs and sessions, and tracks killed programs and sessions until they are reaped."""

    def __init__(self):
        self._until = {}
        """The time by which each killed init or program must have ended, by pid."""
        self._sweep_at = NEVER

    def __bool__(self):
        """Return whether a killed process may still exist."""
        return bool(self._until)

    def end(self, started):
        """Kill a program or a session, with all processes that it started, without waiting for the end."""
        # A second request to end it does not extend the time.
        self._until.setdefault(started.pid, time.monotonic() + _EXIT_TIMEOUT_S)
        if started.status is not None:
            # SIGKILL to the init of a PID namespace ends all of its processes (pid_namespaces(7)).
            os.kill(started.pid, 9)
        else:
            usage.kill_all(lambda: usage.list_program_pids(started.pid), _KILL_TIMEOUT_S)

    def record_reaped(self, pid):
        """Stop tracking a process, since the agent has reaped it."""
        self._until.pop(pid, None)

    def clean_up(self, started):
        """End the processes that a reaped program or session may have left behind."""
        if started.status is None:
            usage.kill_all(lambda: usage.list_program_pids(started.pid), _KILL_TIMEOUT_S)
            # Processes that left both the tree and the session can be told apart only when no program or session runs.
            self._sweep_at = time.monotonic()

    def get_deadline(self):
        """Return the time at which `kill_leftovers` must be called."""
        return min([self._sweep_at, *self._until.values()])

    def kill_leftovers(self, now, idle):
        """End the leftover processes, or the whole sandbox if that takes too long.

        Args:
            now: the current time, at or after `get_deadline()`.
            idle: true if no program and no session runs, so that every process here is a leftover.
        """
        if now >= self._sweep_at:
            self._sweep_at = NEVER
            if idle and usage.kill_all(lambda: usage.list_descendant_pids(os.getpid()), _KILL_TIMEOUT_S):
                self._until.pop(_LEFTOVERS_KEY, None)
            elif idle:
                self._until.setdefault(_LEFTOVERS_KEY, now + _EXIT_TIMEOUT_S)
                self._sweep_at = now + _KILL_TIMEOUT_S
        if self._until and now >= min(self._until.values()):
            os.write(2, b"sandbox: the processes of a program do not end; the sandbox is discarded\n")
            usage.send_signal(9, usage.list_descendant_pids(os.getpid()))
            # The agent is the first process of its PID namespace, so all other processes end with it.
            os._exit(1)
