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

from .connection import Connection
from .frames import FrameChannel
from .messages import CheckerCase, CheckerSetup, ProcessEnd, Report, SetupResult, parse_record
from .outcomes import BrokenTestsError, CandidateEndedError, NotComparableError

_TESTS_FILE = "tests.py"
_KNOWN_NAMES = frozenset(vars(builtins)) | sys.stdlib_module_names | {"pytest"}


class TestNamespace(dict):
    """The `__builtins__` of a test, in which Python looks up every name that the test does not define.

    A name that is not built in refers to a module of the standard library, so that a candidate cannot replace `math`,
    and otherwise to a name in the candidate's code. If the task names the function under test, other unknown names are
    an error in the tests.
    """

    def __init__(self, connection, entry):
        super().__init__(vars(builtins))
        self.connection, self.entry = connection, entry

    def __missing__(self, name):
        if name != self.entry and name in sys.stdlib_module_names:
            return __import__(name)
        if self.entry is not None and name != self.entry:
            raise self.connection.record_mistake(
                f"the tests use '{name}', which is not defined in the tests or the setup"
            )
        return self.connection.fetch_variable(name)


def check_case(case, setup, frames):
    """Run one case and return its report."""
    connection = Connection(frames)
    try:
        loaded = connection.start(case)
    except CandidateEndedError:
        return Report(end=connection.process_end)
    if loaded.raised is not None:
        return Report(verdict="raised", text=str((loaded.raised, loaded.text))[:500], end=connection.end())
    report = _judge(case, setup, connection)
    gone = connection.process_end is not None
    end = connection.end()
    if connection.mistake is not None:  # pytest counts such an error as a failed test
        report = Report(verdict="broken", text=connection.mistake)
    elif gone and report.passed:  # a test caught the error that was raised when the candidate's process ended
        report = Report()
    return report._replace(end=end)


def _judge(case, setup, connection):
    run = _run_pytest if case.kind == "pytest" else _run_tests
    try:
        return run(case, setup, connection)
    except CandidateEndedError:
        return Report()
    except BrokenTestsError as error:
        return Report(verdict="broken", text=str(error))
    except NotComparableError as error:
        return Report(verdict="not_plain", text=str(error))
    except AssertionError as error:
        return Report(verdict="wrong", text=str(error)[:500])
    except BaseException as error:
        return Report(verdict="raised", text=f"{type(error).__name__}: {error}"[:500])


def _run_tests(case, setup, connection):
    entry = setup.entry
    variables: dict = {"__name__": "tests"}
    function = None
    try:
        # The setup runs with Python's own built-in names, so that an answer cannot change its effect.
        exec(compile(setup.source, "setup.py", "exec", dont_inherit=True), variables)
    except Exception as error:
        raise BrokenTestsError(f"the setup failed: {type(error).__name__}: {error}") from None
    variables.update(__builtins__=TestNamespace(connection, entry))
    if entry is not None:  # a stub in the setup must not replace the candidate's function
        function = _find_candidate(connection, entry)
        if entry.isidentifier():
            variables[entry] = function
    exec(compile(case.source, _TESTS_FILE, "exec", dont_inherit=True), variables)
    if case.kind == "check":
        eval("check", variables)(function)
    return Report(passed=True, verdict="passed")


def _find_candidate(connection, entry):
    """Return the function under test; raise a `NameError`, which is the candidate's failure, if it is missing."""
    head, *rest = entry.split(".")
    try:
        target = connection.fetch_variable(head.removesuffix("()"))
    except KeyError:
        raise NameError(f"the answer does not define '{entry}'") from None
    target = target() if head.endswith("()") else target
    for part in rest:
        target = getattr(target, part.removesuffix("()"))
        target = target() if part.endswith("()") else target
    return target


class _Module(ModuleType):
    """The candidate's code, as a module that tests can import."""

    def __init__(self, name, connection, entry):
        super().__init__(name)
        self._connection, self._entry = connection, entry

    @property
    def __all__(self):
        """The names for `import *`, which must not replace the tests' own `len`, `math` or `np`."""
        # The calling frame is the module that runs `import *`.
        taken = _KNOWN_NAMES | sys._getframe(1).f_globals.keys()
        return [name for name in self._connection.names if name not in taken or name == self._entry]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._connection.fetch_variable(name)
        except KeyError:
            raise AttributeError(name) from None


class _TestCounter:
    """A pytest plug-in that counts tests."""

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


def _run_pytest(case, setup, connection):
    import pytest

    for name in case.modules:
        sys.modules[name] = _Module(name, connection, setup.entry)
    with open("test_case.py", "w", encoding="utf-8") as file:
        file.write(setup.source + "\n" + case.source)
    tally = _TestCounter()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--rootdir=.", "-c", os.devnull, "test_case.py"]
    code = pytest.main(options, plugins=[tally])
    # pytest ends with 0, too, if tests were skipped, or failed as expected.
    passed = code == 0 and tally.num_passed == tally.num_tests > 0
    verdict = "passed" if passed else "wrong"
    return Report(passed, verdict, tally.text, num_tests=tally.num_tests, num_passed=max(0, tally.num_passed))


def main():
    """Run the cases that the host sends, and report their verdicts."""
    incoming, outgoing = os.dup(0), os.dup(3)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 3):
        os.dup2(null, descriptor)
    sys.path.insert(0, os.getcwd())
    frames = FrameChannel(incoming, outgoing)
    setup = CheckerSetup(**(frames.read() or os._exit(0)))
    built = parse_record(SetupResult, frames.read())
    if not built.ready:
        frames.write({"failed": parse_record(ProcessEnd, built.failed)._asdict()}, b"h")
        os._exit(0)
    timeouts = 0
    for case in setup.cases:
        try:
            report = check_case(CheckerCase(**case), setup, frames)
        except Exception as error:  # the candidate's process sent a malformed message
            report = Report(text=repr(error)[:500])
        end = report.end or ProcessEnd()
        timeouts += end.is_over_time
        frames.write(report._replace(end=end._asdict())._asdict(), b"h")
        if timeouts >= setup.max_timeouts:
            break
    os._exit(0)
