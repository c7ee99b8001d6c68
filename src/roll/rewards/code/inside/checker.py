"""The checker's side: runs a task's own tests against a candidate in another sandbox.

    host ──► fd 0: setup; then the output of the candidate's process, byte for byte
    host ◄── fd 3: frames marked `s` (the first of a case) or `c`, which go to the candidate's process; one marked `h`
                   per case, its verdict

The task's author wrote the tests; the candidate's objects never enter this process, only plain data (`proxies`).
"""

from __future__ import annotations

import builtins
import os
import sys
from types import ModuleType

from .frames import Frames
from .line import Line
from .messages import Built, Check, CheckerSetup, End, Report, read
from .outcomes import BrokenTestsError, GoneError, NotComparableError

_TESTS = "tests.py"
_KNOWN = frozenset(vars(builtins)) | sys.stdlib_module_names | {"pytest"}


class Names(dict):
    """The built-in names of a test, with the candidate's names as a fallback.

    Python looks up a name here that is neither defined in the test nor built in. The name of a standard library module
    is always that module, so that a candidate cannot replace `math`.
    """

    def __init__(self, line, entry):
        super().__init__(vars(builtins))
        self.line, self.entry = line, entry

    def __missing__(self, name):
        if name != self.entry and name in sys.stdlib_module_names:
            return __import__(name)
        if self.entry is not None and name != self.entry:
            raise self.line.broken(f"the tests use '{name}', which neither they nor the setup define")
        return self.line.name(name)


def check_case(case, setup, frames):
    """Run one case and return its report."""
    line = Line(frames)
    try:
        loaded = line.start(case)
    except GoneError:
        return Report(over=line.over)
    if loaded.raised is not None:
        return Report(verdict="raised", text=str((loaded.raised, loaded.text))[:500], over=line.end())
    report = _judge(case, setup, line)
    gone = line.over is not None
    over = line.end()
    if line.mistake is not None:  # pytest counts such an error as a failed test
        report = Report(verdict="broken", text=line.mistake)
    elif gone and report.passed:  # a test caught the error that the end of the candidate's process raised
        report = Report()
    return report._replace(over=over)


def _judge(case, setup, line):
    run = _run_pytest if case.kind == "pytest" else _run_tests
    try:
        return run(case, setup, line)
    except GoneError:
        return Report()
    except BrokenTestsError as error:
        return Report(verdict="broken", text=str(error))
    except NotComparableError as error:
        return Report(verdict="not_plain", text=str(error))
    except AssertionError as error:
        return Report(verdict="wrong", text=str(error)[:500])
    except BaseException as error:
        return Report(verdict="raised", text=f"{type(error).__name__}: {error}"[:500])


def _run_tests(case, setup, line):
    entry = setup.entry
    variables: dict = {"__name__": "tests"}
    function = None
    try:
        exec(compile(setup.source, "setup.py", "exec", dont_inherit=True), variables)
    except Exception as error:
        raise BrokenTestsError(f"the setup failed: {type(error).__name__}: {error}") from None
    variables.update(__builtins__=Names(line, entry))
    if entry is not None:  # a stub in the setup must not replace the candidate's function
        function = _candidate(line, entry)
        if entry.isidentifier():
            variables[entry] = function
    exec(compile(case.source, _TESTS, "exec", dont_inherit=True), variables)
    if case.kind == "check":
        eval("check", variables)(function)
    return Report(passed=True, verdict="passed")


def _candidate(line, entry):
    """Return the function under test. If it is missing, that is the candidate's failure."""
    head, *rest = entry.split(".")
    try:
        found = line.name(head.removesuffix("()"))
    except KeyError:
        raise NameError(f"the answer defines no '{entry}'") from None
    found = found() if head.endswith("()") else found
    for part in rest:
        found = getattr(found, part.removesuffix("()"))
        found = found() if part.endswith("()") else found
    return found


class _Module(ModuleType):
    """The candidate's code as a module that tests import."""

    def __init__(self, name, line, entry):
        super().__init__(name)
        self._line, self._entry = line, entry

    @property
    def __all__(self):
        """The names for `import *`, which must not replace the tests' own `len`, `math` or `np`."""
        taken = _KNOWN | sys._getframe(1).f_globals.keys()
        return [name for name in self._line.names if name not in taken or name == self._entry]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._line.name(name)
        except KeyError:
            raise AttributeError(name) from None


class _Tally:
    """Counts tests, as a pytest plug-in."""

    def __init__(self):
        self.num_tests, self.num_passed, self.text = 0, 0, ""

    def pytest_runtest_logreport(self, report):
        """Count a test's report (a pytest hook)."""
        if report.when == "call" or report.outcome == "failed":
            self.num_tests += report.when == "call" or report.when == "setup"
            self.num_passed += report.when == "call" and report.outcome == "passed"
            self.num_passed -= report.when == "teardown"
        if report.outcome == "failed":
            self.text = self.text or report.longreprtext[-500:]

    def pytest_collectreport(self, report):
        """Record a failed collection (a pytest hook)."""
        if report.outcome == "failed":
            self.text = self.text or str(report.longrepr)[-500:]


def _run_pytest(case, setup, line):
    import pytest

    for name in case.modules:
        sys.modules[name] = _Module(name, line, setup.entry)
    with open("test_case.py", "w", encoding="utf-8") as file:
        file.write(setup.source + "\n" + case.source)
    tally = _Tally()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--rootdir=.", "-c", os.devnull, "test_case.py"]
    code = pytest.main(options, plugins=[tally])
    passed = code == 0 and tally.num_passed == tally.num_tests > 0
    verdict = "passed" if passed else "wrong"
    return Report(passed, verdict, tally.text, num_tests=tally.num_tests, num_passed=max(0, tally.num_passed))


def main():
    """Serve the host."""
    incoming, outgoing = os.dup(0), os.dup(3)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 3):
        os.dup2(null, descriptor)
    sys.path.insert(0, os.getcwd())
    frames = Frames(incoming, outgoing)
    setup = CheckerSetup(**(frames.read() or os._exit(0)))
    built = read(Built, frames.read())
    if not built.ready:
        frames.write({"failed": read(End, built.failed)._asdict()}, b"h")
        os._exit(0)
    timeouts = 0
    for case in setup.cases:
        try:
            report = check_case(Check(**case), setup, frames)
        except Exception as error:  # the candidate's process sent a malformed message
            report = Report(text=repr(error)[:500])
        over = report.over or End()
        timeouts += over.is_over_time
        frames.write(report._replace(over=over._asdict())._asdict(), b"h")
        if timeouts >= setup.max_timeouts:
            break
    os._exit(0)
