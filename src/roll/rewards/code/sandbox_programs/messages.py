"""Message records between host, candidate's side and checker's side; each is sent as a JSON object."""

from __future__ import annotations

from typing import Any, NamedTuple


class Setup(NamedTuple):
    """The first message to the candidate's side: how to build and run its program."""

    source: str
    file: str
    argv: list
    compile: list
    compile_limits: dict
    output_bytes: int
    max_timeouts: int


class Case(NamedTuple):
    """A message to the candidate's side: a case of kind `stdin`, `call` or `serve`, or a compiler run (`argv`)."""

    kind: str
    cpu_s: float
    wall_s: float
    max_bytes: int = 0
    """Maximum number of bytes of output or of a value that are kept; 0 for the limit of the setup."""
    stdin: str = ""
    args: Any = ()
    kwargs: Any = None
    entry: str = ""
    as_online_judge: bool = False
    argv: Any = ()


class CheckerSetup(NamedTuple):
    """The first message to the checker's side."""

    cases: list
    entry: str | None
    source: str
    max_timeouts: int


class CheckerCase(NamedTuple):
    """A case for the checker's side: a test program of kind `assert`, `check` or `pytest`."""

    kind: str
    source: str
    modules: list
    cpu_s: float
    wall_s: float


class ProcessEnd(NamedTuple):
    """How a process ended: its exit status or signal, and the limit that it exceeded, if any."""

    status: int = 255
    signal: int = 0
    limit: str = ""
    cpu_s: float = 0.0
    stderr: str = ""

    @property
    def is_over_time(self):
        """True if the process was ended because it exceeded its time limit."""
        return self.limit in ("cpu_time", "wall_time")


class SetupResult(NamedTuple):
    """The candidate side's answer to the setup: ready, or the end of a failed compilation."""

    ready: bool = False
    failed: Any = None


class Answer(NamedTuple):
    """A message from the candidate's side to the checker's: an answer, or a `callback` that precedes the answer."""

    value: Any = None
    raised: Any = None
    not_plain: str = ""
    text: str = ""
    error: int = -1
    awaited: bool = False
    """True if the value is the result of an awaitable, which the candidate's side has awaited."""
    missing: bool = False
    args: Any = None
    kwargs: Any = None
    callback: Any = None
    loaded: list = []  # noqa: RUF012
    end: Any = None
    stdout: str = ""
    stderr: str = ""


class Comparison(NamedTuple):
    """Settings of a comparison: whether it compares text or values (`kind`), its `mode` and its tolerance.

    See `compare`.
    """

    kind: str
    mode: str
    tolerance: float


class Question(NamedTuple):
    """A message from the checker's side to the candidate's: an operation, or the answer to a callback."""

    op: str = ""
    name: str = ""
    args: Any = ("t",)
    kwargs: Any = ("d",)
    value: Any = None
    raised: Any = None
    text: str = ""


class Report(NamedTuple):
    """The checker's verdict on a case."""

    passed: bool = False
    verdict: str = "gone"
    text: str = ""
    num_tests: int = 0
    num_passed: int = 0
    end: Any = None


def parse_record(record, message):
    """Build a record from an untrusted message; a field of the wrong type keeps its default."""
    fields = message if isinstance(message, dict) else {}
    values = {}
    for name, default in record._field_defaults.items():
        kind = (int, float) if type(default) is float else object if default is None else type(default)
        if name in fields and isinstance(fields[name], kind):
            values[name] = fields[name]
    return record(**values)
