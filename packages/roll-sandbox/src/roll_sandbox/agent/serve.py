"""The agent: starts programs and shells in its sandbox, enforces their limits, and sends their output to the host.

    host ──► fd 0: frames  length(4) marshal(message)
    host ◄── fd 1: frames  length(4) kind(1) channel(4) payload;  kind: o, e, r = output;  u = microseconds of CPU used;
                           x = the end, JSON

    messages  ("data", channel, bytes)    part of the standard input of the next program
              ("run", channel, request)   start a program; ends with x
              ("shell", channel, {})      open a shell session; x when it is ready
              ("line", channel, request)  a command for a session; ends with x
              ("input", channel, bytes)   more standard input for an interactive program; b"" closes it
              ("tty", channel, size, n)   the size of a program's terminal; n further bytes of its output were shown
              ("measure", channel, {})    answered by x with the resource usage of this sandbox
              ("bound", channel, s, s)    new limits on the wall and CPU time of a program, from now on; answered by u
              ("kill", channel)           end a program, or interrupt a session's command
              ("close", channel)          end a session

The agent has one thread, with a loop over poll(). When the host closes fd 0, everything ends.

Invariants:
    - every "run" and "line" is answered by exactly one x;
    - all output of a program is sent before its x;
    - the time of a program is measured from its fork;
    - no program can block the loop: the agent waits only in poll(), and for the host to read;
    - a program is started only after the programs that were killed before it have ended, with all their processes.
"""

from __future__ import annotations

import _signal  # pyrefly: ignore[missing-import]
import marshal
import os
import select

from roll_sandbox.agent import kernel, layers, locks, programs, spare, usage
from roll_sandbox.agent.requests import Request, Settings
from roll_sandbox.agent.run import RunningProgram, read_clock
from roll_sandbox.agent.shell import Shell
from roll_sandbox.agent.termination import END_TIMEOUT_S, NEVER, Terminator

_READ_BYTES = 1 << 16


class Agent:
    """The agent of one sandbox."""

    def __init__(self, incoming, outgoing):
        self.incoming, self.outgoing = incoming, outgoing
        self.buffer = bytearray()
        self.poll = select.poll()
        self.poll.register(incoming, select.POLLIN)
        self.wake = os.pipe()
        for end in self.wake:
            os.set_blocking(end, False)
        self.poll.register(self.wake[0], select.POLLIN)
        # Python restarts poll() after a signal (PEP 475); a byte in this pipe makes it return when a child has ended.
        _signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # as in PID 1, which gets no signal without a handler
        self.stdin, self.runs, self.shells, self.owners = {}, {}, {}, {}
        self.spare: spare.SpareChild | None = None
        self.can_use_spares = False
        """If True, fork spare children."""
        self.last_was_fresh: bool | None = None
        """True if the last program was `fresh`; None before the first."""
        self.num_cpus = len(os.sched_getaffinity(0))
        self.settings, self.namespace, self.counter = Settings({"limits": {}, "image": None}), -1, -1
        self.next_lock_check = NEVER
        """Time of the next check of file locks."""
        self.has_no_children = True
        self.terminator = Terminator()

    def configure(self, settings):
        """Prepare the sandbox with the settings from the host's first message."""
        self.settings = settings = Settings(settings)
        self.can_use_spares = spare.can_have_spares(settings)
        self.counter = usage.CPU_COUNTER_FD if settings.counts_cpu else -1
        if settings.has_own_cgroup:
            self.counter = usage.open_cpu_counter()
        if settings.mount_space:
            self.namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
            if settings.image:
                layers.enter_file_system(settings)
            else:
                limits = settings.limits
                kernel.mount_writable_tmpfs(settings.home, limits.disk_bytes, limits.max_files)
        kernel.set_memory_hidden(True)
        # Programs are forks of this process, so freed memory is overwritten: it must not contain data of earlier
        # programs. With PYTHONMALLOC=malloc (see `host/slots.py`), this includes Python's small objects.
        kernel.set_malloc_perturb(True)
        if os.getpid() != 1:
            kernel.become_subreaper()
        import sys

        sys.path[:0] = settings.python_path
        for name in settings.preload:
            __import__(name)
        import gc

        gc.freeze()  # so that garbage collection in forks does not touch, and so copy, the agent's pages

    def start(self, request):
        """Start a program in the spare child if it is suitable, otherwise in a new child; return the program."""
        self.last_was_fresh = request.fresh
        if self.spare is not None and self.spare.can_run(request):
            try:
                started = self.spare.launch(request)
            except OSError:
                pass  # the spare was killed, perhaps for lack of memory
            else:
                self.spare = None
                return started
        # A spare must not exist while another program runs, since the program could interact with it (`spare.py`).
        self.drop_spare()
        return programs.start(request, self.settings, self.namespace)

    def drop_spare(self, *, reaped=False):
        """End the spare child, if there is one; `reaped` is true if the agent has already reaped it."""
        if self.spare is not None:
            self.spare.discard(reaped=reaped)
            self.spare = None

    def fork_spare(self):
        """Fork a spare child for the type of program that ran last, if the agent is idle."""
        # A waiting message may be the next program, which this fork would delay.
        idle = self.spare is None and not self.runs and not self.shells
        if not self.can_use_spares or not idle or self.poll.poll(0):
            return
        try:
            self.spare = spare.SpareChild(bool(self.last_was_fresh), self.settings, self.namespace)
        except OSError:
            return  # starting the next program reports the error

    def serve(self):
        """Run the event loop until the host closes the connection."""
        while True:
            self.handle_messages()
            self.fork_spare()
            now = read_clock()
            busy = [*self.runs.values(), *self.shells.values()]
            self.schedule_lock_check(now, busy)
            # poll() needs a finite integer, and rounds down. So one millisecond is added; otherwise it would return
            # again and again just before the deadline.
            wait = min(now + 3600, self.next_lock_check, *(x.get_deadline() for x in (self.terminator, *busy))) - now
            for descriptor, _ in self.poll.poll(max(0, int(wait * 1000) + 1)):
                if descriptor == self.incoming:
                    if not self.read_incoming():
                        return
                elif descriptor == self.wake[0]:
                    os.read(descriptor, 4096)
                elif descriptor in self.owners:
                    self.owners[descriptor].read(descriptor)
            self.reap()
            now = read_clock()
            if now >= self.next_lock_check:
                self.check_locks()
            if now >= self.terminator.get_deadline():
                self.terminator.kill_leftovers(now, idle=not self.runs and not self.shells)
            for each in [*self.runs.values(), *self.shells.values()]:
                if now >= each.get_deadline():
                    each.enforce_limits(now)

    def schedule_lock_check(self, now, busy):
        """Schedule a check of file locks if a program runs, or if processes without a PID namespace may be left."""
        left = self.last_was_fresh is False and not self.has_no_children and not self.settings.mount_space
        if not (self.settings.isolated and (busy or left)):
            self.next_lock_check = NEVER
        elif self.next_lock_check == NEVER:
            self.next_lock_check = now + locks.CHECK_INTERVAL_S

    def check_locks(self):
        """Kill the processes that hold file locks, and end all programs, if the sandbox has too many locks."""
        self.next_lock_check = NEVER
        owners = locks.find_lock_holders()
        for pid in owners:
            try:
                os.kill(pid, 9)
            except OSError:
                continue
        if owners:
            for run in list(self.runs.values()):
                run.end("memory")

    def read_cpu_s(self):
        """Return the CPU seconds of everything in the sandbox's control group; None if there is no counter."""
        return usage.read_cpu_s(self.counter) if self.counter >= 0 else None

    def read_incoming(self):
        """Read bytes from the host into `buffer`; return False if the host has closed the connection."""
        data = os.read(self.incoming, _READ_BYTES)  # gone after this call, since spares would inherit the bytes
        self.buffer += data
        return bool(data)

    def handle_messages(self):
        """Handle complete messages in order; programs and sessions wait until all killed programs have ended."""
        start = 0
        while len(self.buffer) - start >= 4:
            end = start + 4 + int.from_bytes(self.buffer[start : start + 4], "little")
            if len(self.buffer) < end:
                break
            message = marshal.loads(memoryview(self.buffer)[start + 4 : end])
            if self.terminator and message[0] in ("run", "shell"):
                break  # processes that are being ended may still count against the limit of processes
            start = end
            getattr(self, "on_" + message[0])(*message[1:])
        if start:
            self.buffer = self.buffer[start:]  # not `del`, which keeps the bytes in memory

    def on_data(self, channel, data):
        """Store `data` in a file in memory, as standard input of the next program on `channel`."""
        if channel not in self.stdin:
            self.stdin[channel] = os.memfd_create("stdin")
        view = memoryview(data)
        while view:
            view = view[os.write(self.stdin[channel], view) :]

    def on_run(self, channel, request):
        """Start a program with the standard input from the `data` messages of its channel."""
        stdin = self.stdin.pop(channel, None)
        if stdin is None:
            stdin = os.open("/dev/null", os.O_RDONLY)
        else:
            os.lseek(stdin, 0, 0)
        request = Request({**request, "stdin": stdin})
        try:
            run = RunningProgram(self, channel, request)
        except BlockingIOError:  # what else runs here has taken all processes
            self.send_end(channel, programs.START_FAILED_CODE, 0, ["processes"], 0.0, 0.0, 0)
        except OSError as error:
            self.send_error(channel, error)
        else:
            self.runs[channel] = run
            self.watch(run.open, run)
        os.close(stdin)  # not in `finally`, which would also run in the forked program, with other descriptors

    def on_shell(self, channel, request):
        """Open a session."""
        self.last_was_fresh = False
        self.drop_spare()
        try:
            self.shells[channel] = shell = Shell(self, channel, Request(request))
        except BlockingIOError:  # what else runs here has taken all processes
            self.send_end(channel, programs.START_FAILED_CODE, 0, ["processes"], 0.0, 0.0, 0, closed=True)
        except OSError as error:
            self.send_error(channel, error)
        else:
            self.watch([shell.status], shell)

    def on_line(self, channel, request):
        """Start a command in a session, or report an error if the session has ended."""
        shell = self.shells.get(channel)
        if shell is None:
            self.send_error(channel, OSError("the session has ended"))
        else:
            shell.start_command(Request(request))

    def on_input(self, channel, data):
        """Write to the standard input of an interactive program."""
        if channel in self.runs:
            self.runs[channel].write_input(data)

    def on_bound(self, channel, wall_s, cpu_s):
        """Set new limits for a running program. If the program has already ended, its end message is the only reply."""
        if channel in self.runs:
            self.runs[channel].set_limits(wall_s, cpu_s)

    def on_tty(self, channel, rows, columns, shown):
        """Set the size of a program's terminal, and count `shown` further bytes of its output as shown."""
        if channel in self.runs:
            self.runs[channel].update_terminal((rows, columns), shown)

    def on_measure(self, channel, _):
        """Report the CPU time and memory of the whole sandbox, in the format of a program's end message."""
        cpu = self.read_cpu_s()
        if cpu is None:
            cpu = usage.read_reaped_cpu_s() + usage.CpuSampler().sample(os.getpid(), without_root=True)[1]
        self.send_end(channel, 0, 0, (), 0.0, cpu, usage.measure_memory(os.getpid()))

    def on_kill(self, channel):
        """End a program, or interrupt a session's command."""
        for group in (self.runs, self.shells):
            if channel in group:
                group[channel].end()

    def on_close(self, channel):
        """End a session."""
        if channel in self.shells:
            self.shells[channel].close()

    def reap(self):
        """Reap the children that have ended, and report the ends of programs and sessions to the host."""
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self.has_no_children = True
                return
            self.has_no_children = False
            if pid == 0:
                return
            self.terminator.record_reaped(pid)
            if self.spare is not None and self.spare.started.pid == pid:
                self.drop_spare(reaped=True)
                self.can_use_spares = False  # spares do not work here; the next program will report why
            for group in (self.runs, self.shells):
                for channel, each in list(group.items()):
                    if each.started.pid == pid:
                        del group[channel]
                        self.terminator.clean_up(each.started)
                        each.report_end(status, used)

    def watch(self, descriptors, owner, events=select.POLLIN):
        """Call `owner.read` whenever one of the descriptors has one of the poll events `events`."""
        for descriptor in descriptors:
            self.owners[descriptor] = owner
            self.poll.register(descriptor, events)

    def unwatch(self, descriptors):
        """Stop watching the descriptors."""
        for descriptor in descriptors:
            if self.owners.pop(descriptor, None) is not None:
                self.poll.unregister(descriptor)

    def close_descriptor(self, descriptor):
        """Stop watching a descriptor, and close it."""
        self.unwatch([descriptor])
        os.close(descriptor)

    def send(self, kind, channel, data):
        """Send one frame to the host."""
        frame = (len(data) + 5).to_bytes(4, "little") + kind.encode() + channel.to_bytes(4, "little") + data
        view = memoryview(frame)
        while view:
            view = view[os.write(self.outgoing, view) :]

    def send_end(self, channel, code, number, limits, wall_s, cpu_s, peak_bytes, closed=False, counted=()):
        """Report to the host, in a message `x`, that a program or a session's command has ended."""
        self.send("x", channel, _format_end(code, number, limits, wall_s, cpu_s, peak_bytes, closed, counted).encode())

    def send_error(self, channel, error):
        """Report to the host, in a message `x`, that the request on `channel` failed with an error of the agent."""
        text = "".join(letter if " " <= letter <= "~" and letter not in '"\\' else "?" for letter in str(error))
        self.send("x", channel, ('{"error":"' + text + '"}').encode())


def _format_end(code, number, limits, wall_s, cpu_s, peak_bytes, closed, counted):
    """Format the end of a program as JSON. All strings are constants, so none of them needs to be escaped.

    The module `json` is not used, since importing it would delay the start of every sandbox.
    """
    names, counted_names = (",".join('"' + limit + '"' for limit in each) for each in (limits, counted))
    return (
        f'{{"code":{code},"signal":{number},"limits":[{names}],"wall_s":{wall_s:.6f},"cpu_s":{cpu_s:.6f},'
        f'"peak":{peak_bytes},"counted":[{counted_names}],"closed":{"true" if closed else "false"}}}'
    )


def main():
    """Move the connection away from the file descriptors 0 and 1, and run the agent."""
    # Programs get the numbers 0 and 1, which must not be the connection in any fork.
    incoming, outgoing = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    agent = Agent(incoming, outgoing)
    header = b""
    while len(header) < 4:
        header += os.read(incoming, 4 - len(header)) or os._exit(0)
    size, body = int.from_bytes(header, "little"), b""
    while len(body) < size:
        body += os.read(incoming, size - len(body)) or os._exit(0)
    try:
        agent.configure(marshal.loads(body))
    except BaseException as error:
        agent.send_error(0, error)
        os._exit(1)
    agent.send("x", 0, b"{}")
    try:
        agent.serve()
    finally:
        if os.getpid() != 1 and not isinstance(__import__("sys").exc_info()[1], programs.UnwindAndRun):
            usage.kill_all(lambda: usage.list_descendant_pids(os.getpid()), END_TIMEOUT_S)
    os._exit(0)
