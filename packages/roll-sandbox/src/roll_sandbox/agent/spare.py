"""A child forked before its program is known, so that the cost of a start is paid in advance.

    agent: Spare() ── fork ──► init ── fork ──► child: restricted, unwound, imports nothing more, waits
           launch(request) ── request in a file in memory, standard input's descriptor by socket ──► becomes the program

Invariants: a spare has a PID namespace of its own, so no other program can see it; it exists only while no program
runs; it holds only data that a fork at the same moment would; it serves one program; when the agent closes the socket,
it ends.
"""

from __future__ import annotations

import _socket  # pyrefly: ignore[missing-import]
import array
import marshal
import os

from roll_sandbox.agent import programs
from roll_sandbox.agent.requests import Request

_MAX_BYTES = 1 << 20
"""Most bytes of a request. For larger ones a new fork, which shares the agent's memory, is cheaper than a copy."""
_MIN_OPEN_FILES = 16
"""A child that may open fewer files could not receive its program."""


def can_have_spares(settings):
    """Return whether sandboxes with these settings can have spares."""
    return settings.mount_space and settings.limits.max_open_files >= _MIN_OPEN_FILES


class Spare:
    """One waiting child. Descriptors are plain numbers: a socket object would close its number in the child, too."""

    def __init__(self, fresh, settings, namespace):
        self.fresh = fresh
        self.request = os.memfd_create("request")
        self.line, theirs = [end.detach() for end in _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)]
        stdin = os.open("/dev/null", os.O_RDONLY)
        request = Request({"fresh": fresh, "result": True, "stdin": stdin, "line": theirs})
        try:
            self.started = programs.fork(_leave_the_loop, request, settings, namespace)
        except OSError:
            for descriptor in (self.request, self.line, theirs, stdin):
                os.close(descriptor)
            raise
        os.close(theirs)  # not in `finally`: the child leaves this frame too, with other descriptors
        os.close(stdin)

    def suits(self, request):
        """Return whether the child can become the program of this request."""
        if request.terminal:
            return False
        size = len(request.source or "") + sum(map(len, request.files.values()))
        return self.fresh == request.fresh and size + sum(map(len, request.argv)) < _MAX_BYTES

    def launch(self, request):
        """Turn the waiting child into this program.

        Raises:
            OSError: the child has ended; `discard` must still be called.
        """
        os.pwrite(self.request, marshal.dumps(vars(request)), 0)
        passed = array.array("i", [request.stdin, self.request])
        line = _socket.socket(fileno=self.line)
        try:
            line.sendmsg([b"go"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, passed)])
        finally:
            line.detach()
        os.close(self.line)
        os.close(self.request)
        if not request.result:
            self._forget("r")
        return self.started

    def _forget(self, kind):
        for descriptor in [each for each, name in self.started.streams.items() if name == kind]:
            del self.started.streams[descriptor]
            os.close(descriptor)

    def discard(self, *, reaped=False):
        """Close the descriptors, and kill the child unless it was reaped; the agent reaps it."""
        os.close(self.line)
        os.close(self.request)
        for kind in "oer":
            self._forget(kind)
        if self.started.status is not None:
            os.close(self.started.status)
        if not reaped:
            os.kill(self.started.pid, 9)


def _leave_the_loop(_, settings):
    """Unwind the child's stack first: the agent's frames refer to data that no program may see."""
    raise programs.RunAtTop(_wait, settings)


def _wait(settings):
    """Wait for a program at the top of the child's stack, and become it."""
    programs.prepare_interpreter()
    exec(compile("print(end='', flush=True)", "program.py", "exec"), {})  # touches the memory that every program needs
    try:
        return programs.become(_receive(), settings)
    except OSError as error:
        os.write(2, ("sandbox: " + str(error) + "\n").encode())
        os._exit(programs.FAILED_TO_START)


def _receive():
    """Receive the request, put its descriptors in place and close all others."""
    line = _socket.socket(fileno=programs.LINE)
    size = array.array("i").itemsize
    data, ancillary, _, _ = line.recvmsg(16, _socket.CMSG_SPACE(2 * size))
    if not data:
        os._exit(0)
    descriptors = array.array("i")
    for _, _, content in ancillary:
        descriptors.frombytes(content)
    stdin, body = descriptors
    request = Request(marshal.loads(os.pread(body, os.fstat(body).st_size, 0)))
    line.close()
    os.close(body)
    os.dup2(stdin, 0)
    os.close(stdin)
    if not request.result:
        os.close(3)
    return request
