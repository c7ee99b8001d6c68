"""The checker's connection to the candidate's process: operations, answers, and callbacks."""

from __future__ import annotations

import builtins
import sys
import types

from . import exceptions, wire
from .messages import Answer, ProcessEnd, parse_record
from .outcomes import BrokenTestsError, CandidateEndedError, NotComparableError
from .proxies import RemoteObject, decode_remote, get_number


class Connection:
    """Runs operations in the candidate's process, one at a time.

    While an operation runs, the candidate may call functions of the tests before it answers.
    """

    def __init__(self, frames):
        self.frames = frames
        self.names = []
        """The names that the candidate's code defines."""
        self.process_end = None
        """The end of the candidate's process, or None while it runs."""
        self.mistake = None
        """The error that reports a mistake in the tests; None if there is none."""
        self.functions = [call_input, read_line, read_rest]
        self.classes = {}
        self.members = {}
        self.made = []
        """Objects that the tests made by calling the candidate's classes, with the arguments of these calls."""

    def record_mistake(self, text):
        """Record a mistake in the tests, and return the error to raise."""
        self.mistake = self.mistake or text
        return BrokenTestsError(text)

    def start(self, case):
        """Start the candidate's process for a case and return its first answer."""
        self.frames.write({"kind": "serve", "cpu_s": case.cpu_s, "wall_s": case.wall_s}, b"s")
        loaded = self._read_answer()
        self.names = [name for name in loaded.loaded if isinstance(name, str)]
        return loaded

    def request(self, message):
        """Send a message and return its answer; callbacks that come before the answer are run.

        Raises:
            CandidateEndedError: The candidate's process has ended.
        """
        if self.process_end is not None:
            raise CandidateEndedError()
        self.frames.write(message, b"c")
        while (answer := self._read_answer()).callback is not None:
            self.frames.write({"op": "answer", **self._answer_callback(answer)}, b"c")
        return answer

    def _read_answer(self):
        message = self.frames.read()
        answer = parse_record(Answer, message)
        if not isinstance(message, dict) or answer.end is not None:
            self.process_end = parse_record(ProcessEnd, answer.end)
            raise CandidateEndedError()
        for stream, text in ((sys.stdout, answer.stdout), (sys.stderr, answer.stderr)):
            if text:
                stream.write(text)
        return answer

    def run_operation(self, op, *args, **kwargs):
        """Return the answer to an operation on values of the test.

        Raises:
            BrokenTestsError: A test passes a value that is not plain data to a function that it looked up by name.
            NotComparableError: A test passes a value that is not plain data to an object that the candidate returned.
                If the candidate had returned plain data, the operation might have been valid, so this is the answer's
                failure.
        """
        try:
            message = {"op": op, "args": self.encode(args), "kwargs": self.encode(kwargs)}
        except (wire.NotSerializableError, RecursionError) as error:
            if op == "call" and isinstance(args[0], RemoteObject) and args[0]._name:
                raise self.record_mistake(f"a test passes the candidate {error}, which is not plain data") from None
            raise NotComparableError(f"'{op}' received {error}, which is not plain data") from None
        return self.request(message)

    def encode(self, value):
        """Encode a value for the candidate.

        Raises:
            NotSerializableError: The value cannot be sent.
        """
        return wire.encode(value, self._encode_special)

    def _encode_special(self, value, base):
        if isinstance(value, RemoteObject):
            return ["r", value._number] if value._roll_connection is self else None
        if (number := get_number(value)) is not None:
            return ["r", number]
        if base is not None:
            return None
        if isinstance(value, types.CoroutineType):
            raise NotComparableError("a coroutine cannot be sent to the candidate's process")
        if hasattr(type(value), "__next__"):
            self.functions.append(value.__next__)
            return ["k", len(self.functions) - 1, "iterator"]
        if isinstance(value, type) and issubclass(value, Exception):
            raise wire.NotSerializableError(f"the class {value.__name__}")
        if callable(value):
            self.functions.append(value)
            return ["k", len(self.functions) - 1]
        return None

    def _answer_callback(self, answer):
        """Call a function of the tests for the candidate."""
        try:
            args, kwargs = self.decode(answer.args), self.decode(answer.kwargs)
            return {"value": self.encode(self.functions[answer.callback](*args, **kwargs))}
        except Exception as error:
            return exceptions.encode_exception(error, get_number)

    def decode(self, tree, is_subject=False):
        """Decode a value from the candidate; `is_subject` is true if a test created the object by calling a class."""
        return wire.decode(tree, lambda tree: decode_remote(self, tree, is_subject))

    def decode_answer(self, answer, is_subject=False):
        """Return the value of an answer, or a coroutine that returns the value if the candidate's process awaited it.

        See `decode` for `is_subject`.

        Raises:
            Exception: An exception of the class that the candidate raised.
            WireError: The answer is malformed: the candidate forged it.
        """
        if answer.awaited:
            return self._make_coroutine(answer._replace(awaited=False), is_subject)
        if answer.raised is not None:
            raise self.build_exception(answer)
        return self.decode(answer.value, is_subject)

    async def _make_coroutine(self, answer, is_subject):
        return self.decode_answer(answer, is_subject)

    def fetch_variable(self, name):
        """Return a variable of the candidate's code; raise KeyError if it does not exist."""
        answer = self.request({"op": "name", "name": name})
        if answer.missing:
            raise KeyError(name)
        value = self.decode_answer(answer)
        if isinstance(value, RemoteObject):
            value._name = name
        return value

    def build_exception(self, answer):
        """Return the candidate's exception as an instance of the local class for the candidate's class."""
        error = exceptions.instantiate(self.build_exception_class(answer.raised), answer.text)
        if answer.error >= 0 and hasattr(error, "__dict__"):
            error._roll_remote = decode_remote(self, ["r", answer.error, type(error).__name__, [], {}])
        return error

    def build_exception_class(self, tree):
        """Return the local class that stands for an encoded exception class."""
        exceptions.list_classes(tree)
        if tree[0] == "T":
            kind = getattr(builtins, tree[1])
            return kind if issubclass(kind, Exception) else Exception
        _, origin, name, bases = tree
        known = getattr(sys.modules.get(origin), name, None) if tree[0] == "X" and isinstance(origin, str) else None
        if (
            isinstance(known, type)
            and issubclass(known, Exception)
            and origin.partition(".")[0] in sys.stdlib_module_names
        ):
            return known
        key = origin if tree[0] == "x" and isinstance(origin, int) else (str(origin), name)
        if key not in self.classes:
            kinds = [self.build_exception_class(base) for base in bases]
            try:
                self.classes[key] = type(
                    name, tuple(kinds), {"__getattr__": _get_remote_attribute, "_roll_number": origin}
                )
            except TypeError:  # bases that cannot be combined
                self.classes[key] = type(name, (kinds[0],), {"__getattr__": _get_remote_attribute})
        return self.classes[key]

    def end(self):
        """End the candidate's process, and return how it ended: its exit status, signal or exceeded limit."""
        if self.process_end is None:
            self.frames.write({"op": "end"}, b"c")
            end = None
            while end is None and isinstance(message := self.frames.read(), dict):
                end = parse_record(Answer, message).end
            self.process_end = parse_record(ProcessEnd, end)
        return self.process_end


def _get_remote_attribute(error, name):
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(error._roll_remote, name)


def call_input(prompt=""):
    """Call `input`, which the tests may have replaced; the candidate's side has already printed the prompt."""
    return builtins.input(prompt)


def read_line():
    """Read a line of standard input, which the tests may have replaced."""
    return sys.stdin.readline()


def read_rest():
    """Read the rest of standard input, which the tests may have replaced."""
    return sys.stdin.read()
