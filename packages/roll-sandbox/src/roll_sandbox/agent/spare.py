"""A spare child: forked before its program is known, so that the next program starts faster.

    agent: SpareChild() ── fork ──► init ── fork ──► child: restricted, with an empty stack, waits
           launch(request) ── request in a file in memory, descriptors by socket ──► the child becomes the program

Invariants:
    - a spare has its own PID namespace, so no other program can see it;
    - it exists only while no program runs;
    - it has no data that a fork at the time of the request would not have;
    - it runs one program;
    - it ends when the agent closes the socket.
"""

from __future__ import annotations

import _socket  # pyrefly: ignore[missing-import]
import array
import marshal
import os

from roll_sandbox.agent import interpreter, programs
from roll_sandbox.agent.requests import Request

_MAX_BYTES = 1 << 20
"""Maximum bytes of a request. For a larger one, a new fork, which shares the agent's memory, is cheaper than a copy."""
_MIN_OPEN_FILES = 16
"""Minimum number of open files that a child needs to receive its program."""


def can_have_spares(settings):
    """Return whether a sandbox with these settings can have spare child processes."""
    return settings.mount_space and settings.limits.max_open_files >= _MIN_OPEN_FILES


class SpareChild:
    """A child process that waits for a program to run.

    File descriptors are kept as numbers, since a socket object would also close its descriptor in the child.
    """

    def __init__(self, fresh, settings, namespace):
        self.fresh = fresh
        # A message to the socket must fit into the send buffer (EMSGSIZE); a file in memory has no such limit.
        self.request = os.memfd_create("request")
        self.socket_fd, theirs = [end.detach() for end in _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)]
        stdin = os.open("/dev/null", os.O_RDONLY)
        request = Request({"fresh": fresh, "result": True, "stdin": stdin, "spare_fd": theirs})
        try:
            self.started = programs.fork(_unwind_stack, request, settings, namespace)
        except OSError:
            for descriptor in (self.request, self.socket_fd, theirs, stdin):
                os.close(descriptor)
            raise
        os.close(theirs)  # not in `finally`, which would also run in the child, with other descriptors
        os.close(stdin)

    def can_run(self, request):
        """Return whether the child can run the program of this request."""
        if request.terminal:  # the child's outputs are pipes, created before the fork
            return False
        size = len(request.source or "") + sum(map(len, request.files.values()))
        return self.fresh == request.fresh and size + sum(map(len, request.argv)) < _MAX_BYTES

    def launch(self, request):
        """Send the request to the waiting child, which becomes the program; return its `StartedProgram`.

        Raises:
            OSError: the child has ended; `discard` must still be called.
        """
        os.pwrite(self.request, marshal.dumps(vars(request)), 0)
        passed = array.array("i", [request.stdin, self.request])
        connection = _socket.socket(fileno=self.socket_fd)
        try:
            # An empty message would look like the end of the connection.
            connection.sendmsg([b"go"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, passed)])
        finally:
            connection.detach()
        os.close(self.socket_fd)
        os.close(self.request)
        if not request.result:
            self._close_streams("r")
        return self.started

    def _close_streams(self, kind):
        for descriptor in [each for each, name in self.started.streams.items() if name == kind]:
            del self.started.streams[descriptor]
            os.close(descriptor)

    def discard(self, *, reaped=False):
        """Close the descriptors, and kill the child unless the agent has already reaped it (`reaped`)."""
        os.close(self.socket_fd)
        os.close(self.request)
        for kind in "oer":
            self._close_streams(kind)
        if self.started.status is not None:
            os.close(self.started.status)
        if not reaped:
            os.kill(self.started.pid, 9)


def _unwind_stack(_, settings):
    """Unwind the child's stack before the child waits, because the agent's frames refer to data that programs must not
    read.
    """
    raise programs.UnwindAndRun(_wait_for_program, settings)


def _wait_for_program(settings):
    """Wait for a program, and run it in this child, whose stack has been unwound."""
    interpreter.prepare_interpreter()
    exec(compile("print(end='', flush=True)", "program.py", "exec"), {})  # touches the memory that every program needs
    try:
        return programs.exec_program(_receive_request(), settings)
    except OSError as error:
        os.write(2, ("sandbox: " + str(error) + "\n").encode())
        os._exit(programs.START_FAILED_CODE)


def _receive_request():
    """Receive and return the request, with its standard input as descriptor 0; close the other descriptors."""
    connection = _socket.socket(fileno=programs.SPARE_FD)
    size = array.array("i").itemsize
    data, ancillary, _, _ = connection.recvmsg(16, _socket.CMSG_SPACE(2 * size))
    if not data:
        os._exit(0)
    descriptors = array.array("i")
    for _, _, content in ancillary:
        descriptors.frombytes(content)
    stdin, body = descriptors
    request = Request(marshal.loads(os.pread(body, os.fstat(body).st_size, 0)))
    connection.close()
    os.close(body)
    os.dup2(stdin, 0)
    os.close(stdin)
    if not request.result:
        os.close(3)
    return request
