"""A shell session: one bash that keeps its directory, variables, functions and jobs between commands.

    command ──► bash's standard input:   eval '…' </dev/null
                                         __roll_end          ──► status pipe: the exit code
    bash's output ──► pipes, read only while a command runs; else output of background jobs stays in the pipes

bash is interactive (without a terminal), so that SIGINT aborts a command without ending the session. If a command
exceeds its time limit, bash is interrupted, and every child of bash and every orphan that has appeared since the start
of the command is killed. If the command has still not ended after two seconds, bash is killed, which ends the session.

Like every program, a session has its own PID namespace (`programs.py`). Its background jobs, including daemons, outlive
the command that started them, and end with the session.
"""

from __future__ import annotations

import _signal  # pyrefly: ignore[missing-import]
import os
import time

from roll_sandbox.agent import programs, usage
from roll_sandbox.agent.requests import Request

# History expansion would change commands that contain "!". The empty prompts must not be exported to child shells.
_BASH_SETUP = (
    "set +o history +H; set -m; export -n PS1 PS2; "
    '__roll_end() { local s=$?; builtin printf "%d\\n" "$s" >&4; return "$s"; }'
)
_RETRY_DELAY_S = 0.05
_GRACE_PERIOD_S = 2.0
"""Seconds that an interrupted command has to end before its session is ended; 1 s was too short on a busy machine."""
_KILL_TIMEOUT_S = 0.1
"""Seconds for which ending the leftover processes of an interrupted command may block the loop."""


class Shell:
    """A shell session. The host ensures that at most one command runs at a time."""

    def __init__(self, agent, channel, request):
        self.agent, self.channel = agent, channel
        self.status, status_write = os.pipe()
        os.set_blocking(self.status, False)
        lines_read, self.lines = os.pipe()
        environment = {"PS1": "", "PS2": "", "HISTFILE": "", **request.env}
        program = {
            "fresh": False,
            "result": False,
            "stdin": lines_read,
            "files": {},
            "cwd": request.cwd,
            "env": environment,
            "cpu_s": None,
            "source": None,
            "argv": ["bash", "--norc", "--noprofile", "--noediting", "-i"],
            "exit_code_fd": status_write,
        }
        try:
            self.started = programs.start(Request(program), agent.settings, agent.namespace)
        except OSError:
            for descriptor in (self.status, self.lines, lines_read, status_write):
                os.close(descriptor)
            raise
        os.close(lines_read)
        os.close(status_write)
        self.bash = self.started.pid if self.started.status is None else None
        """Pid of bash; None until bash has reported it, since bash is the child of an init."""
        self.partial = b""
        self.reaped = False
        self.limits = []
        self.began = 0.0
        self._begin_command(Request({"wall_s": 10.0, "output_bytes": 0}))
        self._write((_BASH_SETUP + "\n__roll_end\n").encode())

    def get_deadline(self):
        """Return the time at which the event loop must next call `enforce_limits`."""
        return self.stop_at

    def _begin_command(self, request):
        self.began = time.monotonic()
        self.stop_at = self.began + request.wall_s
        self.kill_at = None
        self.output_left = request.output_bytes
        self.limits = []
        self.before = {(pid, entry[5]) for pid, entry in usage.list_processes().items()}
        """Pid and start time of every process that existed before the command. Both, since pids are reused."""
        self.agent.watch(self.started.streams, self)

    def start_command(self, request):
        """Start a command."""
        self._begin_command(request)
        # bash reads its next command from its standard input, so the command must not read that.
        quoted = request.command.replace("'", "'\\''")
        self._write(("builtin eval '" + quoted + "' </dev/null\n__roll_end\n").encode("utf-8", "surrogateescape"))

    def _write(self, data):
        """Write to the standard input of bash, in parts if necessary; close the session if bash does not read."""
        os.set_blocking(self.lines, False)
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.lines, view) :]
            except BlockingIOError:
                if time.monotonic() > self.began + _GRACE_PERIOD_S:
                    self.close()
                    return
                time.sleep(0.001)
            except BrokenPipeError:
                return

    def enforce_limits(self, now):
        """Interrupt a command that exceeds its time limit; end the session if an interrupted command does not end."""
        if self.kill_at is None:
            self.limits.append("wall_time")
        self.end()

    def end(self):
        """Interrupt the running command, or close the session if an interrupted command does not end in time.

        `enforce_limits` calls this again until the command has ended.
        """
        now = time.monotonic()
        if self.kill_at is None:
            self.kill_at = now + _GRACE_PERIOD_S
        if now >= self.kill_at or self.bash is None:
            self.close()
            self.stop_at = now + 3600
            return
        # Interrupt first, then kill: if the command ended before the interrupt, bash would run the next command.
        usage.send_signal(_signal.SIGINT, [self.bash])
        # No SIGSTOP before: bash treats a stopped job as done, and continues.
        usage.send_signal(9, self._list_command_pids())
        self.stop_at = now + _RETRY_DELAY_S

    def _list_command_pids(self):
        """List the pids of the running command: new children of bash and orphans of the session, with descendants."""
        processes = usage.list_processes()
        # The parent of orphans is the init of the session's PID namespace. Without a namespace it is the agent (a
        # subreaper), also for orphans of other programs; the session id tells them apart.
        own_namespace = self.started.status is not None
        adopter = self.started.pid if own_namespace else os.getpid()
        roots = []
        for pid, entry in processes.items():
            orphan = entry[0] == adopter and pid != self.bash and (own_namespace or entry[6] == self.bash)
            if (orphan or entry[0] == self.bash) and (pid, entry[5]) not in self.before:
                roots.append(pid)
        return usage.list_live_pids(roots, processes)

    def close(self):
        """End the shell and all processes that it started."""
        if not self.reaped:
            self.agent.terminator.end(self.started)

    def read(self, descriptor):
        """Send output to the host, or read the exit code of the command; return whether there may be more data."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.agent.unwatch([descriptor])
            return False
        if descriptor == self.status:
            self.partial += data
            if b"\n" in self.partial:
                line, self.partial = self.partial.split(b"\n")[-2], b""
                self._finish(int(line) & 0xFF if line.isdigit() else 255)
            return False
        if self.output_left > 0:
            self.agent.send(self.started.streams[descriptor], self.channel, data[: self.output_left])
            self.output_left -= len(data)
            if self.output_left <= 0:
                self.limits.append("output")
                self.end()
        return True

    def _finish(self, code, closed=False):
        if self.bash is None and not closed:
            self.bash = min(
                usage.list_descendant_pids(self.started.pid), default=None
            )  # bash is the only child, since no command has run yet
        if self.kill_at is not None and not closed:
            usage.kill_all(self._list_command_pids, _KILL_TIMEOUT_S)
        # The exit code comes through a separate pipe, and may arrive before output that was written earlier.
        for descriptor in self.started.streams:
            if descriptor in self.agent.owners:
                while self.read(descriptor) and self.output_left > 0:
                    pass
        self.agent.unwatch(self.started.streams)
        wall = time.monotonic() - self.began
        self.stop_at = time.monotonic() + 3600
        self.agent.send_end(self.channel, code, 0, self.limits, wall, 0.0, 0, closed)

    def report_end(self, status, rusage):
        """Report the end of bash, which has exited or was killed."""
        self.reaped = True
        reported, _, refused = self.started.read_end_report(status)
        if refused:
            self.limits.append("processes")
        status = status if reported is None else reported
        number = status & 0x7F
        self._finish(128 + number if number else status >> 8, closed=True)
        self.agent.unwatch([self.status])
        for descriptor in (self.status, self.lines, *self.started.streams):
            os.close(descriptor)
