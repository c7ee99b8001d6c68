"""Starts a program inside a sandbox.

    agent ── fork ──► init of the program ── fork ──► program
                      (own PID namespace and      (no capabilities, filter, limits)
                      /proc; a `fresh` program
                      also has its own files,
                      IPC and network namespaces)

The init exits right after the program. Then the kernel kills every process that the program has left, whatever its
parent, session or signal handlers are. The init can be reaped only after all processes of its namespace have ended, so
once it is reaped, nothing of the program is left. If the sandbox cannot create namespaces (`docker`, `subprocess`), the
agent itself is the program's parent. A spare child (`spare.py`) is forked before its program is known: it does all of
this, and then waits for its program.

Invariants:
    - between the fork and `_apply_restrictions`, only code of the agent runs;
    - an error before the program starts ends the child with exit code 125 and a message on standard error;
    - no program gets a file descriptor of the agent.
"""

from __future__ import annotations

import _signal  # pyrefly: ignore[missing-import]
import os
import resource

from roll_sandbox.agent import interpreter, kernel, layers, terminal

START_FAILED_CODE = 125
"""Exit code of a child that fails before its program starts."""
_REPORT_FD = 4
"""File descriptor on which the shell of a session reports the exit codes of its commands."""
SPARE_FD = 5
"""File descriptor on which a spare child receives its program."""
_STATUS_FD = 6
"""File descriptor on which an init reports the end of its program."""
_PROCESS_LIMIT_REPORT = b"processes"
"""Reported by an init that could not fork its program because too many processes run in the sandbox."""
_MAX_DESCRIPTORS = 1 << 16


class UnwindAndRun(BaseException):
    """Unwinds the agent's stack in a forked child, and holds the function to call at the top of the stack."""

    def __init__(self, function, *arguments):
        self.function = function
        self.arguments = arguments


class StartedProgram:
    """A started program: its first process, and the file descriptors of its output and status."""

    def __init__(self, pid, status, streams):
        self.pid = pid
        self.status = status
        """File descriptor on which the init reports the program's end; None if `pid` is the program itself."""
        self.streams = streams
        """The type of each output, by its file descriptor: `o` (stdout), `e` (stderr) or `r` (result)."""

    def read_end_report(self, status):
        """Read the init's report of the program's end from its pipe, and close the pipe.

        Args:
            status: the status of the process `pid`, as wait(2) returns it.

        Returns:
            the status of the program, which is None if the init ended without a report; whether the disk was full;
            whether the program could not start because too many processes run in the sandbox. Without an init, the
            status is the argument `status`.
        """
        if self.status is None:
            return status, False, False
        report = os.read(self.status, 64)
        os.close(self.status)
        if report == _PROCESS_LIMIT_REPORT:
            return START_FAILED_CODE << 8, False, True
        if not report:
            return None, False, False
        code, full = report.split()
        return int(code), full != b"0", False


def start(request, settings, namespace):
    """Fork a child that runs the program of `request`, and return its `StartedProgram`.

    Args:
        request: the request from the host (see `serve.py`), with `stdin` as a file descriptor.
        settings: the sandbox's settings: home, limits, filter, environment.
        namespace: file descriptor of the agent's PID namespace, if the sandbox can create other PID namespaces.
    """
    return fork(_run_program, request, settings, namespace)


def fork(function, request, settings, namespace):
    """Fork a child that is confined, has no privileges and calls `function(request, settings)`.

    Args:
        function: the function that the child calls.
        request: the request; only `fresh`, `result`, `stdin`, `terminal_fds`, `exit_code_fd` and `spare_fd` are used.
        settings: as for `start`.
        namespace: as for `start`.
    """
    own_namespace = settings.mount_space
    pair = request.terminal_fds
    outputs = [pair] if pair else [os.pipe() for _ in range(3 if request.result else 2)]
    status = os.pipe() if own_namespace else ()
    pid = -1
    try:
        if own_namespace:
            # Children forked from now on belong to the new namespace; the first is its init (pid_namespaces(7)).
            kernel.unshare(kernel.CLONE_NEWPID)
        pid = os.fork()
    except OSError:
        for descriptor in [each for pair in outputs for each in pair] + list(status):
            os.close(descriptor)
        raise
    finally:
        if own_namespace and pid != 0:  # later children of the agent must belong to the agent's namespace again
            kernel.setns(namespace, kernel.CLONE_NEWPID)
    if pid == 0:
        writes = [write for _, write in outputs]
        _run_or_exit(_run_child, function, request, settings, writes * 2 if pair else writes, status)
    if status:
        os.close(status[1])
    for read, write in outputs:
        os.close(write)
        os.set_blocking(read, False)
    streams = {read: kind for (read, _), kind in zip(outputs, "oer", strict=False)}
    return StartedProgram(pid, status[0] if status else None, streams)


def _run_or_exit(function, *arguments):
    """Run `function` in a child, and exit if it returns or fails; only `UnwindAndRun` propagates to the caller."""
    try:
        function(*arguments)
    except UnwindAndRun:
        raise
    except BaseException as error:
        os.write(2, ("sandbox: the program cannot be started: %s\n" % (error,)).encode())  # noqa: UP031
    os._exit(START_FAILED_CODE)


def _run_child(function, request, settings, outputs, status):
    # The pipe is shared with the agent: a signal to this process would wake the agent.
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    # This comes first, since `_set_up_descriptors` closes the descriptor of that namespace.
    if settings.image and request.fresh:
        layers.return_to_initial_mount_namespace(settings)
    _set_up_descriptors(request, outputs, status)
    if status:
        _make_namespaces(request, settings)
        try:
            pid = os.fork()
        except BlockingIOError:
            if not request.fresh:  # a fresh program is alone, so no other program can have used up the processes
                os.write(_STATUS_FD, _PROCESS_LIMIT_REPORT)
            raise
        if pid:
            _serve_as_init(pid, settings)
        os.close(_STATUS_FD)
    # Without a PID namespace, orphans of the program are found by this session.
    os.setsid()
    if request.terminal_fds:
        terminal.set_controlling_terminal(0)
    _signal.signal(_signal.SIGXFSZ, _signal.SIG_DFL)  # the filter prevents changing it
    _apply_restrictions(settings)
    function(request, settings)


def _set_up_descriptors(request, outputs, status):
    """Move the file descriptors of a program and its init to reserved numbers, and close all other file descriptors."""
    wanted = dict(enumerate((request.stdin, *outputs)))
    for number, descriptor in (
        (_REPORT_FD, request.exit_code_fd),
        (SPARE_FD, request.spare_fd),
        (_STATUS_FD, status[1] if status else None),
    ):
        if descriptor is not None:
            wanted[number] = descriptor
    # First move all above the reserved numbers, so that no dup2 overwrites a descriptor that is still needed.
    high = [(number, _duplicate_above_reserved(descriptor)) for number, descriptor in wanted.items()]
    os.closerange(0, _STATUS_FD + 1)
    for number, descriptor in high:
        os.dup2(descriptor, number)
    os.closerange(_STATUS_FD + 1, _MAX_DESCRIPTORS)


def _make_namespaces(request, settings):
    """Create all namespaces of a program except the PID namespace. The first process in the PID namespace calls this
    function.
    """
    if not request.fresh:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount_private_proc()
        return
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET)
    kernel.bring_up_loopback()  # in a new namespace: connections and counters would reveal this program to the next
    if settings.image:
        layers.mount_layers(settings)
    else:
        kernel.mount_private_proc()
        limits = settings.limits
        kernel.mount_writable_tmpfs(settings.home, limits.disk_bytes, limits.max_files)


def _duplicate_above_reserved(descriptor):
    """Duplicate a descriptor to a number above the reserved numbers of a program."""
    while descriptor <= _STATUS_FD:
        descriptor = os.dup(descriptor)
    return descriptor


def _serve_as_init(program, settings):
    """Reap children until the program (a pid) ends, report its status and whether the disk is full, and exit."""
    # The agent sees the end of an output only when no process has it open.
    os.closerange(0, _STATUS_FD)
    while True:
        pid, code = os.waitpid(-1, 0)
        if pid == program:
            break
    os.write(_STATUS_FD, b"%d %d" % (code, is_disk_full(settings)))
    os._exit(0)


def is_disk_full(settings):
    """Return whether a writable directory has less than one page of free space, or cannot contain another file.

    With `has_own_cgroup` (`docker`), home, /tmp and /dev/shm are separate file systems; otherwise they share one.
    """
    for place in (settings.home, "/tmp", "/dev/shm") if settings.has_own_cgroup else (settings.home,):
        try:
            space = os.statvfs(place)
        except OSError:
            continue
        if space.f_blocks > 0 and (space.f_bavail == 0 or (space.f_files > 0 and space.f_favail == 0)):
            return True
    return False


def _run_program(request, settings):
    """Set up files, directory and environment of the program, and execute it; raise `UnwindAndRun` for Python code."""
    if request.cpu_s is not None:
        _set_resource_limits({resource.RLIMIT_CPU: int(request.cpu_s) + 2})  # in case the agent's check fails
    os.umask(0o022)
    os.chdir(settings.home)
    for path, data in request.files.items():
        _write_file(path, data)
    if request.cwd:
        os.chdir(request.cwd)
    elif settings.image and request.source is None:
        _enter_image_directory(settings.image.cwd)
    environment = dict(settings.env)
    environment.update(request.env)
    # Ignored signals stay ignored after exec (signal(7)); the agent ignores SIGINT, and Python ignores SIGPIPE.
    for name in ("SIGINT", "SIGPIPE"):
        _signal.signal(getattr(_signal, name), _signal.SIG_DFL)
    if request.source is not None:
        _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        raise UnwindAndRun(interpreter.run_python, request.source, request.argv)
    try:
        try:
            os.execvpe(request.argv[0], request.argv, environment)
        except FileNotFoundError:
            if not (settings.image and request.exit_code_fd is not None):
                raise
            bash = settings.image.bash  # this machine's bash, for a session in an image without bash
            os.execve(bash[0], bash + request.argv[1:], environment)
    except OSError as error:
        os.write(2, ("sandbox: %s: %s\n" % (request.argv[0], error.strerror)).encode())  # noqa: UP031
        # As in a shell: 126 if the file is not executable (EACCES), 127 if it does not exist.
        os._exit(126 if error.errno == 13 else 127)


def _enter_image_directory(path):
    try:
        if path:
            os.chdir(path)
    except OSError:
        return  # stay at home


def _apply_restrictions(settings):
    """Drop the privileges that a program must not have, and apply its limits."""
    # While a process is not dumpable, its files in /proc belong to root (proc(5)), and it cannot write to them.
    kernel.set_memory_hidden(False)
    try:  # noqa: SIM105  (nothing more is imported here)
        kernel.write_proc_file("/proc/self/oom_score_adj", b"1000")  # on OOM the program is killed, not the agent
    except OSError:
        pass
    limits = settings.limits
    bounds = {
        resource.RLIMIT_CORE: 1,  # with 0, the host's handler of core files would run, as root: core(5)
        resource.RLIMIT_NOFILE: limits.max_open_files,
        resource.RLIMIT_FSIZE: limits.file_size_bytes,
        # Locked pages, message queues and queued signals take memory of the kernel, or cannot be swapped out.
        resource.RLIMIT_MEMLOCK: 1 << 16,
        resource.RLIMIT_MSGQUEUE: 1 << 16,
        resource.RLIMIT_SIGPENDING: 1 << 10,
    }
    if settings.has_own_cgroup:
        os.nice(10)  # so that the agent gets CPU time to end the program, however many processes it starts
    if settings.limit_processes:
        bounds[resource.RLIMIT_NPROC] = limits.max_processes + 8  # see `host/spawner.py`
    if settings.limit_address_space:
        # Memory is sampled; between two samples, each process may allocate at most 1 GiB more than the limit.
        bounds[resource.RLIMIT_AS] = limits.memory_bytes + (1 << 30)
    _set_resource_limits(bounds)
    kernel.drop_privileges(settings.filter)


def _set_resource_limits(limits):
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def exec_program(request, settings):
    """Turn this process, whose stack has been unwound, into the program.

    Returns:
        for Python source, the function to call next and its arguments.
    """
    try:
        _run_or_exit(_run_program, request, settings)
    except UnwindAndRun as next_step:
        return next_step.function, next_step.arguments


def _write_file(path, data):
    if "/" in path:
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
