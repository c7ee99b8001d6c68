"""The agent: starts programs and shells in its sandbox, enforces their limits, and sends their output.

    host ──► fd 0: frames  length(4) marshal(message)
    host ◄── fd 1: frames  length(4) kind(1) channel(4) payload;  kind: o, e, r = output;  u = microseconds of CPU used;
                           x = the end, JSON

    messages  ("data", channel, bytes)    part of the standard input of the next program
              ("run", channel, request)   start a program; ends with x
              ("shell", channel, {})      open a shell session; x when it is ready
              ("line", channel, request)  a command for a session; ends with x
              ("input", channel, bytes)   standard input for a running program that takes it piece by piece; b"" ends it
              ("tty", channel, size, n)   of a program with a terminal: its size, and that n more bytes were shown
              ("measure", channel, {})    x with what this sandbox uses
              ("bound", channel, s, s)    new limits of a program on wall and CPU time, from now on; answered by u
              ("kill", channel)           end a program, or interrupt a session's command
              ("close", channel)          end a session

One thread; one loop over poll(). Invariants: every "run" and "line" is answered by exactly one x; output is sent before
the x of its program; a program's time runs from its fork; no program can block the loop, since the agent waits only in
poll() and for the host to read; a program is started only after all programs that were to end before it have ended,
with all their processes. When the host closes fd 0, everything ends.
"""

from __future__ import annotations

import _signal  # pyrefly: ignore[missing-import]
import marshal
import os
import select

from roll_sandbox.agent import kernel, layers, locks, programs, spare, usage
from roll_sandbox.agent.requests import Request, Settings
from roll_sandbox.agent.run import Run, clock
from roll_sandbox.agent.shell import Shell
from roll_sandbox.agent.termination import END_S, NEVER, Terminator

_READ_BYTES = 1 << 16


class Agent:
    """The agent of one sandbox; see the module."""

    def __init__(self, incoming, outgoing):
        self.incoming, self.outgoing = incoming, outgoing
        self.buffer = bytearray()
        self.poll = select.poll()
        self.poll.register(incoming, select.POLLIN)
        self.wake = os.pipe()
        for end in self.wake:
            os.set_blocking(end, False)
        self.poll.register(self.wake[0], select.POLLIN)
        _signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # as for PID 1, which gets no signal that it does not handle
        self.stdin, self.runs, self.shells, self.owners = {}, {}, {}, {}
        self.spare: spare.Spare | None = None
        self.can_use_spares = False
        """Whether to fork spare children."""
        self.last_was_fresh: bool | None = None
        """Whether the last program was `fresh`; None before the first."""
        self.num_cpus = len(os.sched_getaffinity(0))
        self.settings, self.namespace, self.counter = Settings({"limits": {}, "image": None}), -1, -1
        self.next_lock_check = NEVER
        """Time of the next check of the locks that programs hold."""
        self.has_no_children = True
        self.terminator = Terminator()

    def configure(self, settings):
        """Prepare the sandbox with the settings that the host sent first."""
        self.settings = settings = Settings(settings)
        self.can_use_spares = spare.can_have_spares(settings)
        self.counter = usage.COUNTER if settings.counts_cpu else -1
        if settings.has_own_cgroup:
            self.counter = usage.open_cpu_counter()
        if settings.mount_space:
            self.namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
            if settings.image:
                layers.prepare(settings)
            else:
                limits = settings.limits
                kernel.mount_writable_space(settings.home, limits.disk_bytes, limits.max_files)
        kernel.hide_memory(True)
        # Programs are forks of this process, so data of earlier programs must not be left in its memory. With
        # PYTHONMALLOC=malloc (see `host/slots.py`) that covers Python's small objects, too.
        kernel.overwrite_freed_memory(True)
        if os.getpid() != 1:
            kernel.adopt_orphans()
        import sys

        sys.path[:0] = settings.python_path
        for name in settings.preload:
            __import__(name)
        import gc

        gc.freeze()  # so that collections in forks do not touch, and so copy, the agent's pages

    def start(self, request):
        """Start a program: in the spare child, if it fits, else in a new child."""
        self.last_was_fresh = request.fresh
        if self.spare is not None and self.spare.suits(request):
            try:
                started = self.spare.launch(request)
            except OSError:
                pass  # the spare was killed, perhaps for lack of memory
            else:
                self.spare = None
                return started
        self.drop_spare()
        return programs.start(request, self.settings, self.namespace)

    def drop_spare(self, *, reaped=False):
        """End the spare child."""
        if self.spare is not None:
            self.spare.discard(reaped=reaped)
            self.spare = None

    def prepare(self):
        """Fork a spare child for the kind of program that ran last, if the agent is idle."""
        idle = self.spare is None and not self.runs and not self.shells
        if not self.can_use_spares or not idle or self.poll.poll(0):
            return
        try:
            self.spare = spare.Spare(bool(self.last_was_fresh), self.settings, self.namespace)
        except OSError:
            return  # starting the next program reports the error

    def serve(self):
        """Run the loop until the host closes its end."""
        while True:
            self.handle_messages()
            self.prepare()
            now = clock()
            busy = [*self.runs.values(), *self.shells.values()]
            self.schedule_lock_check(now, busy)
            wait = min(now + 3600, self.next_lock_check, *(x.deadline() for x in (self.terminator, *busy))) - now
            for descriptor, _ in self.poll.poll(max(0, int(wait * 1000) + 1)):
                if descriptor == self.incoming:
                    if not self.read_incoming():
                        return
                elif descriptor == self.wake[0]:
                    os.read(descriptor, 4096)
                elif descriptor in self.owners:
                    self.owners[descriptor].read(descriptor)
            self.reap()
            now = clock()
            if now >= self.next_lock_check:
                self.check_locks()
            if now >= self.terminator.deadline():
                self.terminator.check(now, idle=not self.runs and not self.shells)
            for each in [*self.runs.values(), *self.shells.values()]:
                if now >= each.deadline():
                    each.check(now)

    def schedule_lock_check(self, now, busy):
        """Schedule a look at the locks while a program runs, or while processes without a PID namespace may be left."""
        left = self.last_was_fresh is False and not self.has_no_children and not self.settings.mount_space
        if not (self.settings.isolated and (busy or left)):
            self.next_lock_check = NEVER
        elif self.next_lock_check == NEVER:
            self.next_lock_check = now + locks.CHECK_S

    def check_locks(self):
        """End the processes that hold too many locks."""
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
        """Return the CPU seconds of everything in the sandbox's control group; None without a counter."""
        return usage.read_cpu_s(self.counter) if self.counter >= 0 else None

    def read_incoming(self):
        """Read from the host; return False at the end. No local variable keeps the bytes: spares would inherit it."""
        data = os.read(self.incoming, _READ_BYTES)
        self.buffer += data
        return bool(data)

    def handle_messages(self):
        """Handle all complete frames in order."""
        start = 0
        while len(self.buffer) - start >= 4:
            end = start + 4 + int.from_bytes(self.buffer[start : start + 4], "little")
            if len(self.buffer) < end:
                break
            message = marshal.loads(memoryview(self.buffer)[start + 4 : end])
            if self.terminator and message[0] in ("run", "shell"):
                break  # processes that are being ended may take up the limit
            start = end
            getattr(self, "on_" + message[0])(*message[1:])
        if start:
            self.buffer = self.buffer[start:]  # not `del`, which keeps the bytes in memory

    def on_data(self, channel, data):
        """Store standard input in a file in memory, so that a program that reads slowly cannot block the agent."""
        if channel not in self.stdin:
            self.stdin[channel] = os.memfd_create("stdin")
        view = memoryview(data)
        while view:
            view = view[os.write(self.stdin[channel], view) :]

    def on_run(self, channel, request):
        """Start a program."""
        stdin = self.stdin.pop(channel, None)
        if stdin is None:
            stdin = os.open("/dev/null", os.O_RDONLY)
        else:
            os.lseek(stdin, 0, 0)
        request = Request({**request, "stdin": stdin})
        try:
            run = Run(self, channel, request)
        except BlockingIOError:  # what else runs here has taken all processes
            self.send_end(channel, programs.FAILED_TO_START, 0, ["processes"], 0.0, 0.0, 0)
        except OSError as error:
            self.fail(channel, error)
        else:
            self.runs[channel] = run
            self.watch(run.open, run)
        os.close(stdin)  # not in `finally`: the forked program leaves this frame too, with other descriptors

    def on_shell(self, channel, request):
        """Open a session."""
        self.last_was_fresh = False
        self.drop_spare()
        try:
            self.shells[channel] = shell = Shell(self, channel, Request(request))
        except BlockingIOError:  # what else runs here has taken all processes
            self.send_end(channel, programs.FAILED_TO_START, 0, ["processes"], 0.0, 0.0, 0, closed=True)
        except OSError as error:
            self.fail(channel, error)
        else:
            self.watch([shell.status], shell)

    def on_line(self, channel, request):
        """Run a command in a session."""
        shell = self.shells.get(channel)
        if shell is None:
            self.fail(channel, OSError("the session has ended"))
        else:
            shell.run(Request(request))

    def on_input(self, channel, data):
        """Write to the standard input of a running program."""
        if channel in self.runs:
            self.runs[channel].write_input(data)

    def on_bound(self, channel, wall_s, cpu_s):
        """Set new limits for a running program. For a program that has ended, its end is the answer."""
        if channel in self.runs:
            self.runs[channel].set_limits(wall_s, cpu_s)

    def on_tty(self, channel, rows, columns, shown):
        """Set the size of a terminal, and count `shown` further bytes of its output as shown."""
        if channel in self.runs:
            self.runs[channel].update_terminal((rows, columns), shown)

    def on_measure(self, channel, _):
        """Report CPU time and memory of the whole sandbox, in the fields of a program's end."""
        cpu = self.read_cpu_s()
        if cpu is None:
            cpu = usage.read_reaped_cpu_s() + usage.CpuSampler().add(os.getpid(), without_root=True)[1]
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
        """Reap the children that have ended."""
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self.has_no_children = True
                return
            self.has_no_children = False
            if pid == 0:
                return
            self.terminator.reaped(pid)
            if self.spare is not None and self.spare.started.pid == pid:
                self.drop_spare(reaped=True)
                self.can_use_spares = False  # spares cannot run here; programs will report why
            for group in (self.runs, self.shells):
                for channel, each in list(group.items()):
                    if each.started.pid == pid:
                        del group[channel]
                        self.terminator.clean_up(each.started)
                        each.ended(status, used)

    def watch(self, descriptors, owner, events=select.POLLIN):
        """Have `owner.read` called when one of the descriptors is readable (or writable, by `events`)."""
        for descriptor in descriptors:
            self.owners[descriptor] = owner
            self.poll.register(descriptor, events)

    def ignore(self, descriptors):
        """Stop watching the descriptors."""
        for descriptor in descriptors:
            if self.owners.pop(descriptor, None) is not None:
                self.poll.unregister(descriptor)

    def forget(self, descriptor):
        """Stop watching a descriptor, and close it."""
        self.ignore([descriptor])
        os.close(descriptor)

    def send(self, kind, channel, data):
        """Send one frame to the host."""
        frame = (len(data) + 5).to_bytes(4, "little") + kind.encode() + channel.to_bytes(4, "little") + data
        view = memoryview(frame)
        while view:
            view = view[os.write(self.outgoing, view) :]

    def send_end(self, channel, code, number, limits, wall_s, cpu_s, peak_bytes, closed=False, counted=()):
        """Send the end (x) of a program or a session's command. Its strings are constants: nothing to escape."""
        names, kernel = (",".join('"' + limit + '"' for limit in each) for each in (limits, counted))
        text = (
            f'{{"code":{code},"signal":{number},"limits":[{names}],"wall_s":{wall_s:.6f},"cpu_s":{cpu_s:.6f},'
            f'"peak":{peak_bytes},"counted":[{kernel}],"closed":{"true" if closed else "false"}}}'
        )
        self.send("x", channel, text.encode())

    def fail(self, channel, error):
        """Send an error of the agent, not of a program, as the end (x) of a channel."""
        text = "".join(letter if " " <= letter <= "~" and letter not in '"\\' else "?" for letter in str(error))
        self.send("x", channel, ('{"error":"' + text + '"}').encode())


def main():
    """Move the connection from file descriptors 0 and 1 elsewhere, and serve."""
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
        agent.fail(0, error)
        os._exit(1)
    agent.send("x", 0, b"{}")
    try:
        agent.serve()
    finally:
        if os.getpid() != 1 and not isinstance(__import__("sys").exc_info()[1], programs.RunAtTop):
            usage.kill_all(lambda: usage.list_descendants(os.getpid()), END_S)
    os._exit(0)
