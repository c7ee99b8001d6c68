"""Start of a program.

    agent ── fork ──► init of the program ── fork ──► program
                      (own PID namespace and      (no capabilities, filter, limits)
                      /proc; where it is `fresh`
                      also own files, IPC and
                      network namespaces)

The init outlives the program by an instant: when it exits, the kernel kills every process that the program left behind,
whatever its parent, session or signal handlers are. The kernel lets the init be reaped only after all processes of its
namespace have ended, so a program whose init was reaped has left none. Where the sandbox cannot make namespaces
(`docker`, `subprocess`), the agent itself is the program's parent. A child that is forked before its program is known
(`spare.py`) does all of this and then waits for its program.

Invariants: between the fork and `_restrict` only the agent's code runs; an error before the program starts ends the
child with exit code 125 and a message on standard error; no program gets a file descriptor of the agent.
"""

from __future__ import annotations

import _signal  # pyrefly: ignore[missing-import]
import _sitebuiltins
import builtins
import os
import resource
import sys

from roll_sandbox.agent import kernel, layers, terminal

FAILED_TO_START = 125
_REPORT = 4
"""File descriptor on which the shell of a session reports the exit codes of its commands."""
LINE = 5
"""File descriptor on which a child that waits for its program receives it."""
_STATUS = 6
"""File descriptor on which an init reports the end of its program."""
_NO_PROCESS = b"processes"
"""Report of an init whose program could not be forked because too many processes run in the sandbox."""
_MAX_DESCRIPTORS = 1 << 16


class RunAtTop(BaseException):
    """Raised in a forked child to leave the agent's loop, with the function to call at the top of the stack."""

    def __init__(self, function, *arguments):
        self.function = function
        self.arguments = arguments


class StartedProgram:
    """A started program, seen from the agent."""

    def __init__(self, pid, status, streams):
        self.pid = pid
        self.status = status
        """File descriptor on which the init reports the program's end; None: `pid` is the program."""
        self.streams = streams
        """Kind of each output's file descriptor: `o` (stdout), `e` (stderr) or `r` (result)."""

    def read_end(self, status):
        """Read the init's report, and close its descriptor.

        Args:
            status: the status of the process `pid`, as wait(2) returns it.

        Returns:
            the status of the program (None: the init ended without a report), whether its disk was full, and whether
            it could not start because too many processes run in the sandbox. Without an init, `status` as it is.
        """
        if self.status is None:
            return status, False, False
        report = os.read(self.status, 64)
        os.close(self.status)
        if report == _NO_PROCESS:
            return FAILED_TO_START << 8, False, True
        if not report:
            return None, False, False
        code, full = report.split()
        return int(code), full != b"0", False


def start(request, settings, namespace):
    """Fork the program that `request` describes.

    Args:
        request: the request from the host (see `serve.py`), with `stdin` as a file descriptor.
        settings: the sandbox's settings: home, limits, filter, environment.
        namespace: file descriptor of the agent's PID namespace, where the sandbox can make others.
    """
    return fork(_run, request, settings, namespace)


def fork(function, request, settings, namespace):
    """Fork a child that ends in `function(request, settings)`, confined and without privileges.

    Args:
        function: the function that the child calls.
        request: the request; only `fresh`, `result`, `stdin`, `pair` (of a terminal), `report` and `line` are used.
        settings: as for `start`.
        namespace: as for `start`.
    """
    own_namespace = settings.mount_space
    pair = request.pair
    outputs = [pair] if pair else [os.pipe() for _ in range(3 if request.result else 2)]
    status = os.pipe() if own_namespace else ()
    pid = -1
    try:
        if own_namespace:
            kernel.unshare(kernel.CLONE_NEWPID)
        pid = os.fork()
    except OSError:
        for descriptor in [each for pair in outputs for each in pair] + list(status):
            os.close(descriptor)
        raise
    finally:
        if own_namespace and pid != 0:  # later children of the agent belong to its own namespace again
            kernel.setns(namespace, kernel.CLONE_NEWPID)
    if pid == 0:
        writes = [write for _, write in outputs]
        _guarded(_child, function, request, settings, writes * 2 if pair else writes, status)
    if status:
        os.close(status[1])
    for read, write in outputs:
        os.close(write)
        os.set_blocking(read, False)
    streams = {read: kind for (read, _), kind in zip(outputs, "oer", strict=False)}
    return StartedProgram(pid, status[0] if status else None, streams)


def _guarded(function, *arguments):
    """Run `function` in a child, and never return into the agent's loop."""
    try:
        function(*arguments)
    except RunAtTop:
        raise
    except BaseException as error:
        os.write(2, ("sandbox: the program cannot be started: %s\n" % (error,)).encode())  # noqa: UP031
    os._exit(FAILED_TO_START)


def _child(function, request, settings, outputs, status):
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    if settings.image and request.fresh:
        layers.return_to_first_namespace(settings)
    _place_descriptors(request, outputs, status)
    if status:
        _make_namespaces(request, settings)
        try:
            pid = os.fork()
        except BlockingIOError:
            if not request.fresh:  # a fresh program is alone, so no program has used up the processes
                os.write(_STATUS, _NO_PROCESS)
            raise
        if pid:
            _serve_as_init(pid, settings)
        os.close(_STATUS)
    os.setsid()
    if request.pair:
        terminal.control(0)
    _signal.signal(_signal.SIGXFSZ, _signal.SIG_DFL)  # the filter prevents changing it
    _restrict(settings)
    function(request, settings)


def _place_descriptors(request, outputs, status):
    """Move the descriptors of a program and of its init to their numbers, and close all others."""
    wanted = dict(enumerate((request.stdin, *outputs)))
    for number, descriptor in (
        (_REPORT, request.report),
        (LINE, request.line),
        (_STATUS, status[1] if status else None),
    ):
        if descriptor is not None:
            wanted[number] = descriptor
    high = [(number, _duplicate_above_reserved(descriptor)) for number, descriptor in wanted.items()]
    os.closerange(0, _STATUS + 1)
    for number, descriptor in high:
        os.dup2(descriptor, number)
    os.closerange(_STATUS + 1, _MAX_DESCRIPTORS)


def _make_namespaces(request, settings):
    """Make the other namespaces of a program, in the first process of its new PID namespace."""
    if not request.fresh:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount_private_proc()
        return
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET)
    kernel.bring_up_loopback()  # its own: closed connections and counters would reveal this program to the next
    if settings.image:
        layers.mount_layers(settings)
    else:
        kernel.mount_private_proc()
        limits = settings.limits
        kernel.mount_writable_space(settings.home, limits.disk_bytes, limits.max_files)


def _duplicate_above_reserved(descriptor):
    """Return a duplicate of a descriptor that is above the numbers of a program's descriptors."""
    while descriptor <= _STATUS:
        descriptor = os.dup(descriptor)
    return descriptor


def _serve_as_init(program, settings):
    """Reap children until the program ends, report its status and whether its disk was full, and exit."""
    os.closerange(0, _STATUS)
    while True:
        pid, code = os.waitpid(-1, 0)
        if pid == program:
            break
    os.write(_STATUS, b"%d %d" % (code, is_disk_full(settings)))
    os._exit(0)


def is_disk_full(settings):
    """Return whether a writable place has room for less than a page, or for no further file.

    With `has_own_cgroup` (`docker`) home, /tmp and /dev/shm are separate file systems; otherwise they share one.
    """
    for place in (settings.home, "/tmp", "/dev/shm") if settings.has_own_cgroup else (settings.home,):
        try:
            space = os.statvfs(place)
        except OSError:
            continue
        if space.f_blocks > 0 and (space.f_bavail == 0 or (space.f_files > 0 and space.f_favail == 0)):
            return True
    return False


def _run(request, settings):
    """Turn this process into the program."""
    if request.cpu_s is not None:
        _bound({resource.RLIMIT_CPU: int(request.cpu_s) + 2})  # in case counting the whole tree fails
    os.umask(0o022)
    os.chdir(settings.home)
    for path, data in request.files.items():
        _write(path, data)
    if request.cwd:
        os.chdir(request.cwd)
    elif settings.image and request.source is None:
        _enter_image_directory(settings.image.cwd)
    environment = dict(settings.env)
    environment.update(request.env)
    for name in ("SIGINT", "SIGPIPE"):
        _signal.signal(getattr(_signal, name), _signal.SIG_DFL)
    if request.source is not None:
        _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        raise RunAtTop(run_python, request.source, request.argv)
    try:
        try:
            os.execvpe(request.argv[0], request.argv, environment)
        except FileNotFoundError:
            if not (settings.image and request.report is not None):
                raise
            bash = settings.image.bash  # for a session whose image has no bash
            os.execve(bash[0], bash + request.argv[1:], environment)
    except OSError as error:
        os.write(2, ("sandbox: %s: %s\n" % (request.argv[0], error.strerror)).encode())  # noqa: UP031
        os._exit(126 if error.errno == 13 else 127)


def _enter_image_directory(path):
    try:
        if path:
            os.chdir(path)
    except OSError:
        return  # stay at home


def _restrict(settings):
    """Drop everything that a program must not have."""
    kernel.hide_memory(False)
    try:  # noqa: SIM105  (nothing more is imported here)
        kernel.write("/proc/self/oom_score_adj", b"1000")  # on OOM the program is killed, not the agent
    except OSError:
        pass
    limits = settings.limits
    bounds = {
        resource.RLIMIT_CORE: 1,  # with 0, a host's handler of core files would be run, as root: core(5)
        resource.RLIMIT_NOFILE: limits.max_open_files,
        resource.RLIMIT_FSIZE: limits.file_size_bytes,
        resource.RLIMIT_MEMLOCK: 1 << 16,
        resource.RLIMIT_MSGQUEUE: 1 << 16,
        resource.RLIMIT_SIGPENDING: 1 << 10,
    }
    if settings.has_own_cgroup:
        os.nice(10)  # so that the agent gets CPU time to end it, however many processes it starts
    if settings.limit_processes:
        bounds[resource.RLIMIT_NPROC] = limits.max_processes + 8  # see `host/spawner.py`
    if settings.limit_address_space:
        bounds[resource.RLIMIT_AS] = limits.memory_bytes + (1 << 30)
    _bound(bounds)
    kernel.drop_privileges(settings.filter)


def _bound(bounds):
    for kind, value in bounds.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def become(request, settings):
    """Turn this process into the program, at the top of the stack; return what to call next for Python source."""
    try:
        _guarded(_run, request, settings)
    except RunAtTop as found:
        return found.function, found.arguments


def _write(path, data):
    if "/" in path:
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def prepare_interpreter():
    """Turn the agent's interpreter into one that runs a program; a second call does nothing."""
    if _modules:
        return
    kernel.overwrite_freed_memory(False)  # not earlier: the agent's frames held data of the last program
    _modules.extend(sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "roll_sandbox")
    end = "Ctrl-D (i.e. EOF)"
    builtins.quit, builtins.exit = _sitebuiltins.Quitter("quit", end), _sitebuiltins.Quitter("exit", end)


compile("", "program.py", "exec")  # the first call makes the AST classes, 1 ms in every fork
_modules = []
"""The agent's modules in a program; freeing them would take time."""


def run_python(source, argv):
    """Run source as `__main__`, as `python file` would, and end the process.

    Called at the top of the stack. The interpreter is not torn down piece by piece, which takes longer than most
    programs. The steps that a program can notice are done: threads are joined, exit functions run, its variables
    are deleted (files close), output is flushed.
    """
    prepare_interpreter()
    main = type(sys)("__main__")
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    sys.argv = ["program.py", *argv]
    sys.path.insert(0, os.getcwd())
    sys.excepthook = _excepthook
    code = 0
    try:
        exec(compile(source, "program.py", "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    code = _shut_down(main) or code
    os._exit(code)


def _exit_code(value):
    """Return the exit code that `sys.exit(value)` stands for; print a message to stderr as Python does."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    sys.stderr.write(str(value) + "\n")
    return 1


def _shut_down(main):
    """Shut the interpreter down without freeing everything, and return an exit code: not 0 where output was lost."""
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()
    atexit = sys.modules.get("atexit")
    if atexit is not None:
        atexit._run_exitfuncs()
    main.__dict__.clear()
    lost = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError, AttributeError):
            lost = 120
    return lost


def _excepthook(kind, error, trace):
    """Print a traceback without the frames of the agent."""
    while trace is not None and trace.tb_frame.f_code.co_filename != "program.py":
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
