"""A running program: its limits, its output and its end."""

from __future__ import annotations

import os
import select
import sys
import time

from roll_sandbox.agent import programs, terminal, usage

_READ_BYTES = 1 << 16
_MIN_CHECK_DELAY_S = 0.01
"""Minimum seconds between two checks of the limits."""
_MAX_CHECK_DELAY_S = 0.2
_MAX_UNSHOWN_BYTES = 1 << 20
"""Maximum bytes of a terminal's output that the host has not shown yet; beyond it, the program waits."""
_SAMPLE_INTERVAL_S = 0.02
"""Seconds between two samples of the processes, if no control group counts their CPU time."""


def read_clock():
    """Return the monotonic time in seconds."""
    return time.monotonic()


class RunningProgram:
    """A running program, whose limits are enforced and whose output is sent to the host."""

    def __init__(self, agent, channel, request):
        self.agent, self.channel = agent, channel
        self.wall_s, self.cpu_s, self.output_left = request.wall_s, request.cpu_s, request.output_bytes
        self.limits = []
        self.reaped_before = usage.read_reaped_cpu_s() if request.alone and not request.fresh else None
        """CPU seconds of the processes that were reaped before this program. None if other programs share the sandbox,
        or if this program has a PID namespace.
        """
        self.counted_before = agent.read_cpu_s() if request.alone else None
        """CPU seconds that the control group had counted before this program. None without a CPU counter, or if
        other programs share the sandbox.
        """
        self.cpu_sampler = usage.CpuSampler()
        self.counts = usage.read_kernel_counts() if agent.settings.has_own_cgroup else {}
        self.cpu_used = 0.0
        self.code = None
        self.full = False
        self.killed = self.reaped = False
        self.began = read_clock()
        self.pending, self.input, self.input_over = bytearray(), -1, False
        self.unshown_bytes = None
        """Bytes of the terminal's output that the host has not shown yet; None without a terminal."""
        if request.terminal:
            pair = terminal.open_terminal(agent.settings.mount_space, request.terminal)
            request.terminal_fds, request.stdin, self.input = pair, os.dup(pair[1]), os.dup(pair[0])
            self.unshown_bytes = 0
        elif request.interactive:
            request.stdin, self.input = os.pipe()
            os.set_blocking(self.input, False)
        try:
            self.started = agent.start(request)
        except OSError:
            self._close_input()
            raise
        finally:
            # Not in the forked child, which raises UnwindAndRun, and in which these numbers are other descriptors.
            if self.input >= 0 and not isinstance(sys.exc_info()[1], programs.UnwindAndRun):
                os.close(request.stdin)  # the program has its own copy
        self.open = set(self.started.streams)
        self.next_check = self.began + self._compute_check_delay(0.0)

    def get_deadline(self):
        """Return the time at which the event loop must next call `enforce_limits`."""
        return min(self.began + self.wall_s, self.next_check)

    def _compute_check_delay(self, cpu_used):
        if self.agent.settings.watch_memory:
            return _MIN_CHECK_DELAY_S
        if self.cpu_s is None:
            return 1e9
        if self.counted_before is None:
            return _SAMPLE_INTERVAL_S
        # Even if the program keeps every core busy, the rest of its limit lasts this long.
        left = (self.cpu_s - cpu_used) / self.agent.num_cpus
        return min(max(left, _MIN_CHECK_DELAY_S), _MAX_CHECK_DELAY_S + left)

    def enforce_limits(self, now):
        """End the program if it exceeds a limit that the kernel does not enforce."""
        if now >= self.began + self.wall_s:
            self.end("wall_time")
        elif now >= self.next_check:
            cpu, memory, threads = self._measure_usage()
            self.cpu_used = max(cpu, self.cpu_used)
            limits = self.agent.settings.limits
            # `memory` counts shared pages once per process; the exact sum takes longer to compute.
            over = self.agent.settings.watch_memory and memory > limits.memory_bytes
            if over and usage.measure_memory(self.started.pid) > limits.memory_bytes:
                self.end("memory")
            if self.agent.settings.watch_memory and threads >= limits.max_processes:
                self.record_limit("processes")
            if self.cpu_s is not None and cpu >= self.cpu_s:
                self.end("cpu_time")
            self.next_check = now + self._compute_check_delay(cpu)

    def _measure_usage(self):
        """Return the program's CPU seconds, resident bytes and threads. With a CPU counter but without `watch_memory`,
        bytes and threads are 0.
        """
        if self.counted_before is not None and not self.agent.settings.watch_memory:
            return self.agent.read_cpu_s() - self.counted_before, 0, 0
        before = self.reaped_before
        alone = before is not None
        seen, cpu, memory, threads = self.cpu_sampler.sample(
            os.getpid() if alone else self.started.pid, without_root=alone
        )
        if before is not None:
            cpu += usage.read_reaped_cpu_s() - before
        if self.counted_before is not None:
            return self.agent.read_cpu_s() - self.counted_before, memory, threads
        return max(seen, cpu), memory, threads

    def set_limits(self, wall_s, cpu_s):
        """Set new limits, counted from now on, and report the CPU time used so far to the host."""
        self.cpu_used = max(self._measure_usage()[0], self.cpu_used)
        if not self.killed:
            self.wall_s = read_clock() - self.began + wall_s
            self.cpu_s = None if cpu_s is None else self.cpu_used + cpu_s
            self.next_check = read_clock() + self._compute_check_delay(self.cpu_used)
        self.agent.send("u", self.channel, int(self.cpu_used * 1e6).to_bytes(8, "little"))

    def record_limit(self, limit):
        """Record that the program has hit `limit`."""
        if limit not in self.limits:
            self.limits.append(limit)

    def end(self, limit=None):
        """Kill the program, because it has hit `limit`, or because the host requests its end (`limit` is None)."""
        if limit is not None:
            self.record_limit(limit)
        # `enforce_limits` must not end the program a second time, with another limit.
        self.wall_s = self.cpu_s = 1e9
        self.killed = True
        if not self.reaped:  # the last output of a program that has ended may still reach a limit
            self.agent.terminator.end(self.started)

    def write_input(self, data):
        """Write `data` to standard input, or close it if `data` is empty; buffer data that the program has not read
        yet.
        """
        if self.input >= 0:
            self.pending += data
            self.input_over = not data and self.unshown_bytes is None
            self._flush()

    def update_terminal(self, size, num_shown_bytes):
        """Set the terminal's size, and count `num_shown_bytes` further bytes of its output as shown."""
        if self.unshown_bytes is None:
            return
        terminal.resize(self.input, size)
        self.unshown_bytes = max(0, self.unshown_bytes - num_shown_bytes)
        if self.unshown_bytes < _MAX_UNSHOWN_BYTES:
            self.agent.watch([each for each in self.open if each not in self.agent.owners], self)

    def _flush(self):
        self.agent.unwatch([self.input])
        try:
            while self.pending:
                del self.pending[: os.write(self.input, memoryview(self.pending)[:_READ_BYTES])]
        except BlockingIOError:
            self.agent.watch([self.input], self, select.POLLOUT)
            return
        except OSError:  # no process reads it
            self.input_over = True
        if self.input_over:
            self._close_input()

    def _close_input(self):
        if self.input >= 0:
            self.agent.close_descriptor(self.input)
            self.input = -1
            self.pending.clear()

    def read(self, descriptor):
        """Read output and send it to the host; return whether there may be more output.

        If `descriptor` is the program's standard input, write the pending input to it instead, and return False.
        """
        if descriptor == self.input:
            self._flush()
            return False
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # a terminal that no process has open
            data = b""
        if not data:
            self.open.discard(descriptor)
            self.agent.close_descriptor(descriptor)
            return False
        if self.output_left > 0:
            self.agent.send(self.started.streams[descriptor], self.channel, data[: self.output_left])
            self.output_left -= len(data)
            if self.output_left <= 0:
                self.end("output")
        if self.unshown_bytes is not None:
            self.unshown_bytes += len(data)
            if self.unshown_bytes >= _MAX_UNSHOWN_BYTES:
                self.agent.unwatch([descriptor])
                return False
        return self.output_left > 0

    def report_end(self, status, rusage):
        """Read the remaining output of the ended program, and report its end to the host.

        Args:
            status: the wait status of the program's first process.
            rusage: the resource usage of that process (`os.wait4`).
        """
        self.reaped = True
        self._close_input()
        self.unshown_bytes = None
        own_namespace = self.started.status is not None
        reported, self.full, refused = self.started.read_end_report(status)
        if refused:
            self.record_limit("processes")
        if reported is not None:
            status = reported
        elif not self.killed:
            # An init always reports its program's end, so this one failed before it started the program, or was killed.
            for descriptor in list(self.open):
                self.agent.close_descriptor(descriptor)
            self.agent.send_error(self.channel, "cannot create the namespaces of the program")
            return
        if not own_namespace:
            self.full = programs.is_disk_full(self.agent.settings)
        for descriptor in list(self.open):
            while self.read(descriptor):
                pass
            if descriptor in self.open:
                self.agent.close_descriptor(descriptor)
        number = status & 0x7F
        code = 128 + number if number else status >> 8
        # SIGXCPU and SIGXFSZ, the signals of RLIMIT_CPU and RLIMIT_FSIZE (setrlimit(2)).
        for number_of_limit, limit in ((24, "cpu_time"), (25, "file_size")):
            if number == number_of_limit:
                self.record_limit(limit)
        if self.full:
            self.record_limit("disk")
        now = usage.read_kernel_counts() if self.counts else {}
        counted = [limit for limit in now if now[limit] > self.counts.get(limit, now[limit])]
        wall = read_clock() - self.began
        cpu = max(rusage.ru_utime + rusage.ru_stime, self.cpu_used)
        if self.counted_before is not None:
            cpu = self.agent.read_cpu_s() - self.counted_before
        if self.cpu_s is not None and cpu >= self.cpu_s:
            self.record_limit("cpu_time")
        self.agent.send_end(
            self.channel, code, number, self.limits, wall, cpu, rusage.ru_maxrss * 1024, counted=counted
        )
