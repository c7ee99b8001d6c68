"""The candidate's side: runs an answer's code on the inputs of its cases, each case in a separate process.

    host ──► fd 0: setup, then one message per case ──► fork ──► the candidate's code, bounded in CPU and wall time
    host ◄── fd 3: "ready" or "failed", then per case: the end of the case, and a frame with its output or return value

A case of kind `stdin` runs the program; `call` calls a function once; `serve` loads the code and then carries out the
operations in messages (call, read an attribute, …), answering each, until an `end` message or the end of the process.

This code runs under the candidate's UID, so the candidate may change it: everything written to fd 3 is untrusted. This
process never contains an expected result.

The code is compiled once and forked for each case. The agent enforces the limits of a case from outside, so the forked
process is not trusted.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time

from . import interpreter, wire
from .exceptions import encode_exception
from .frames import FrameChannel, pack
from .messages import Case, ProcessEnd, Setup
from .outcomes import ENCODING_ERRORS, await_result
from .service import Service

_READ_BYTES = 1 << 16
_STDERR_BYTES = 2000
_GRACE_CPU_S = 2
_START_FAILURE_STATUS = 125


class Program:
    """The candidate's program, which `prepare` compiles."""

    def __init__(self, setup):
        self.setup, self.argv = setup, setup.argv
        self.code = compile("", interpreter.SOURCE_FILE, "exec")

    def prepare(self):
        """Write the source to its file and compile it, as the language requires.

        Return the `ProcessEnd` of a failed compilation, or None if the program is ready.
        """
        setup = self.setup
        if not self.argv:
            try:
                self.code = compile(setup.source, interpreter.SOURCE_FILE, "exec", dont_inherit=True)
            except BaseException as error:
                return ProcessEnd(status=1, stderr=str(error)[-_STDERR_BYTES:])
            return None
        with open(setup.file, "w", encoding="utf-8", errors="replace") as file:
            file.write(setup.source)
        if not setup.compile:
            return None
        end, *_ = run_case(Case(kind="argv", argv=setup.compile, **setup.compile_limits), self)
        return end if end.status or end.limit else None


def run_case(case, program, frames=None):
    """Run one case in a forked process; return its `ProcessEnd`, its output, and the call's encoded return value."""
    # A pipe would block this process if a program does not read a large input.
    stdin = os.memfd_create("stdin")
    data = memoryview(case.stdin.encode("utf-8", "surrogateescape"))
    while data:
        data = data[os.write(stdin, data) :]
    os.lseek(stdin, 0, 0)
    pipes = [os.pipe() for _ in range(3)]
    deadline = time.monotonic() + case.wall_s
    # Measured: 206 cases per second with a fork per case, 107 with a program of the sandbox's agent per case.
    pid = os.fork()
    if pid == 0:
        _run_in_child(case, program, frames, stdin, [write for _, write in pipes])
    os.close(stdin)
    for _, write in pipes:
        os.close(write)
    most = case.max_bytes or program.setup.output_bytes
    bounds = [most, max(most, program.setup.output_bytes), most]
    end, out, value = _collect_output(pid, [read for read, _ in pipes], deadline, bounds)
    if end.signal == signal.SIGKILL and end.cpu_s >= case.cpu_s:  # the candidate had removed its timer
        end = end._replace(limit=end.limit or "cpu_time")
    return end, out, value


def _collect_output(pid, pipes, deadline, bounds):
    """Collect output until the process ends; end the process if it exceeds its limits on time or output."""
    # The end of the process ends the case, not the end of its pipes: a background process may keep them open.
    gone = os.pidfd_open(pid)
    poll = select.poll()
    taken, bound = {}, dict(zip(pipes, bounds, strict=True))
    for descriptor in pipes:
        os.set_blocking(descriptor, False)
        taken[descriptor] = bytearray()
        poll.register(descriptor, select.POLLIN)
    poll.register(gone, select.POLLIN)
    limit, ended = "", False
    while not ended and not limit:
        left = deadline - time.monotonic()
        events = poll.poll(max(0, int(left * 1000) + 1))
        for descriptor, _ in events:
            if descriptor == gone:
                ended = True
            elif not _read_once(descriptor, taken[descriptor]):
                poll.unregister(descriptor)
        if any(len(data) > bound[descriptor] for descriptor, data in taken.items()):
            limit = "output"
        elif not events and left <= 0:
            limit = "wall_time"
    _kill_group(pid)
    # The group is killed before the process is reaped: afterwards its number could belong to another process.
    _, status, used = os.wait4(pid, 0)
    os.close(gone)
    for descriptor, data in taken.items():
        # Output that was written just before the end is still in the pipe.
        while len(data) <= bound[descriptor] and _read_once(descriptor, data):
            pass
        os.close(descriptor)
    out, error, value = (taken[descriptor] for descriptor in pipes)
    if not limit and (len(out) > bounds[0] or len(value) > bounds[2]):
        limit = "output"
    number = status & 0x7F
    if number in (signal.SIGPROF, signal.SIGXCPU):
        limit = limit or "cpu_time"
    end = ProcessEnd(
        status=128 + number if number else status >> 8,
        signal=number,
        limit=limit,
        cpu_s=used.ru_utime + used.ru_stime,
        stderr=bytes(error[-_STDERR_BYTES:]).decode("utf-8", "replace"),
    )
    return end, bytes(out[: bounds[0]]), b"" if limit else bytes(value)


def _read_once(descriptor, data):
    """Read once from the descriptor, and append the bytes to `data`; return False if none were available."""
    try:
        more = os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return False
    data += more
    return bool(more)


def _kill_group(pid):
    for kill in (os.killpg, os.kill):  # a process that was just forked has no process group yet
        try:
            kill(pid, signal.SIGKILL)
        except OSError:
            continue  # the process has ended


def _run_in_child(case, program, frames, stdin, outputs):
    """Run one case in this forked process; never returns."""
    try:
        # With a process group of its own, the case can be killed together with its child processes.
        os.setsid()
        if frames is None:
            os.dup2(stdin, 0)
        os.dup2(outputs[0], 1)
        os.dup2(outputs[1], 2)
        # The kernel's limit is a second bound, as the candidate's code may remove the timer.
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        most = int(case.cpu_s) + _GRACE_CPU_S
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        # The candidate's code must not reach the host's pipes, or descriptors of other cases.
        keep = {0, 1, 2, outputs[2]} | ({frames.incoming, frames.outgoing} if frames else set())
        last = 2
        for descriptor in [*sorted(keep - {0, 1, 2}), 1 << 16]:
            os.closerange(last + 1, descriptor)
            last = descriptor
        signal.setitimer(signal.ITIMER_PROF, case.cpu_s)
        _exec_case(case, program, frames, outputs[2])
    except BaseException as error:
        os.write(2, repr(error).encode("utf-8", "replace")[:_STDERR_BYTES])
    os._exit(_START_FAILURE_STATUS)


def _exec_case(case, program, frames, values):
    argv = case.argv or program.argv
    if argv:
        # An ignored signal stays ignored after `exec`, and Python ignores SIGPIPE.
        for number in (signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(argv[0], [*argv, *case.args])
    if case.kind == "stdin":
        interpreter.run_main(program.code)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    if case.kind == "serve":
        Service(program.code, frames).run()
    message = _call(case, program.code)
    view = memoryview(pack(message)[4:])
    while view:
        view = view[os.write(values, view) :]
    os._exit(0)


def _call(case, code):
    """Load the code, call its function once, and return the message with its value or exception."""
    try:
        variables = interpreter.make_namespace("solution")
        if case.as_online_judge:
            exec(interpreter.JUDGE_IMPORTS, variables)
        exec(code, variables)
        function = interpreter.find_entry(case.entry, variables, case.as_online_judge)
        args, kwargs = wire.decode(case.args), wire.decode(case.kwargs)
        value = await_result(function(*args, **kwargs))
    except Exception as error:
        return encode_exception(error)
    try:
        return {"value": wire.encode(value)}
    except ENCODING_ERRORS as error:
        return {"not_plain": str(error)}


def main():
    """Run the cases that the host sends, and report their results."""
    incoming, outgoing = os.dup(0), os.dup(3)
    null = os.open(os.devnull, os.O_RDWR)
    # The candidate's code must not find the host's pipes under their usual numbers.
    for descriptor in (0, 3):
        os.dup2(null, descriptor)
    frames = FrameChannel(incoming, outgoing)
    program = Program(Setup(**(frames.read() or os._exit(0))))
    failure = program.prepare()
    frames.write({"failed": failure._asdict()} if failure else {"ready": True})
    timeouts = 0
    while failure is None and timeouts < program.setup.max_timeouts:
        message = frames.read()
        if message is None:
            break
        case = Case(**message)
        if case.kind == "serve":
            frames.write({"end": run_case(case, program, frames)[0]._asdict()})
            continue
        end, out, value = run_case(case, program)
        timeouts += end.is_over_time
        frames.write(end._asdict())
        frames.write_bytes(value if case.kind == "call" else out)
    os._exit(0)
