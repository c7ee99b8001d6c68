"""The checker's connection to the candidate's process: questions, answers, and callbacks."""

from __future__ import annotations

import builtins
import sys
import types

from . import exceptions, wire
from .messages import Answer, End, read
from .outcomes import BrokenTestsError, GoneError, NotComparableError
from .proxies import Remote, made_of, of_tree


class Line:
    """A connection with one question at a time; the candidate's callbacks come before the answer."""

    def __init__(self, frames):
        self.frames = frames
        self.names = []
        """The names that the candidate's code defines."""
        self.over = None
        """The end of the candidate's process, or None while it runs."""
        self.mistake = None
        """A mistake of the tests' author."""
        self.functions = [builtins_input, read_line, read_rest]
        self.classes = {}
        self.members = {}
        self.made = []
        """Objects that the tests made by calling classes, with the arguments."""

    def broken(self, text):
        """Return the error to raise if the tests themselves are wrong."""
        self.mistake = self.mistake or text
        return BrokenTestsError(text)

    def start(self, case):
        """Start the candidate's process for a case and return its first answer."""
        self.frames.write({"kind": "serve", "cpu_s": case.cpu_s, "wall_s": case.wall_s}, b"s")
        loaded = self._answer()
        self.names = [name for name in loaded.loaded if isinstance(name, str)]
        return loaded

    def ask(self, message):
        """Send a message and wait for its answer.

        Raises:
            GoneError: The candidate's process has ended, now or before.
        """
        if self.over is not None:
            raise GoneError()
        self.frames.write(message, b"c")
        while (answer := self._answer()).ask is not None:
            self.frames.write({"op": "answer", **self._called_back(answer)}, b"c")
        return answer

    def _answer(self):
        message = self.frames.read()
        answer = read(Answer, message)
        if not isinstance(message, dict) or answer.over is not None:
            self.over = read(End, answer.over)
            raise GoneError()
        for stream, text in ((sys.stdout, answer.printed), (sys.stderr, answer.complained)):
            if text:
                stream.write(text)
        return answer

    def do(self, op, *args, **kwargs):
        """Return the answer to an operation on values of the test.

        Raises:
            BrokenTestsError: A test passes a value that is not plain data to a function that it looked up by name.
            NotComparableError: A test passes such a value to an object that the candidate returned. If the candidate
                had returned plain data, the operation might have been valid: so it is the answer's failure.
        """
        try:
            message = {"op": op, "args": self.tree(args), "kwargs": self.tree(kwargs)}
        except (wire.NotPlainError, RecursionError) as error:
            if op == "call" and isinstance(args[0], Remote) and args[0]._name:
                raise self.broken(f"a test hands the candidate {error}, which is not plain data") from None
            raise NotComparableError(f"'{op}' with {error}: not plain data") from None
        return self.ask(message)

    def tree(self, value):
        """Encode a value for the candidate.

        Raises:
            NotPlainError: The value cannot be sent.
        """
        return wire.encode(value, self._ours)

    def _ours(self, value, base):
        if isinstance(value, Remote):
            return ["r", value._number] if value._line is self else None
        if (number := made_of(value)) is not None:
            return ["r", number]
        if base is not None:
            return None
        if isinstance(value, types.CoroutineType):
            raise NotComparableError("a coroutine does not cross")
        if hasattr(type(value), "__next__"):
            self.functions.append(value.__next__)
            return ["k", len(self.functions) - 1, "iterator"]
        if isinstance(value, type) and issubclass(value, Exception):
            raise wire.NotPlainError(f"the class {value.__name__}")
        if callable(value):
            self.functions.append(value)
            return ["k", len(self.functions) - 1]
        return None

    def _called_back(self, answer):
        """Call a function of the tests for the candidate."""
        try:
            args, kwargs = self.decode(answer.args), self.decode(answer.kwargs)
            return {"value": self.tree(self.functions[answer.ask](*args, **kwargs))}
        except Exception as error:
            return exceptions.raised(error, made_of)

    def decode(self, tree, is_subject=False):
        """Decode a value from the candidate."""
        return wire.decode(tree, lambda tree: of_tree(self, tree, is_subject))

    def value(self, answer, is_subject=False):
        """Return the value of an answer, or a coroutine of it if the candidate's process awaited it.

        Raises:
            Exception: An exception of the class that the candidate raised.
            WireError: The answer has no known form: the candidate forged it.
        """
        if answer.awaited:
            return self._later(answer._replace(awaited=False), is_subject)
        if answer.raised is not None:
            raise self.exception(answer)
        return self.decode(answer.value, is_subject)

    async def _later(self, answer, is_subject):
        return self.value(answer, is_subject)

    def name(self, name):
        """Return a variable of the candidate's code; raise KeyError if it does not exist."""
        answer = self.ask({"op": "name", "name": name})
        if answer.missing:
            raise KeyError(name)
        value = self.value(answer)
        if isinstance(value, Remote):
            value._name = name
        return value

    def exception(self, answer):
        """Return the candidate's exception as an instance of the local class for the candidate's class."""
        error = exceptions.instance(self.exception_class(answer.raised), answer.text)
        if answer.error >= 0 and hasattr(error, "__dict__"):
            error._roll_remote = of_tree(self, ["r", answer.error, type(error).__name__, [], {}])
        return error

    def exception_class(self, tree):
        """Return the local class for an exception class that is given as a tree."""
        exceptions.classes(tree)
        if tree[0] == "T":
            kind = getattr(builtins, tree[1])
            return kind if issubclass(kind, Exception) else Exception
        _, where, name, bases = tree
        known = getattr(sys.modules.get(where), name, None) if tree[0] == "X" and isinstance(where, str) else None
        if (
            isinstance(known, type)
            and issubclass(known, Exception)
            and where.partition(".")[0] in sys.stdlib_module_names
        ):
            return known
        key = where if tree[0] == "x" and isinstance(where, int) else (str(where), name)
        if key not in self.classes:
            kinds = [self.exception_class(base) for base in bases]
            try:
                self.classes[key] = type(name, tuple(kinds), {"__getattr__": _of_remote, "_roll_number": where})
            except TypeError:  # bases that cannot be combined
                self.classes[key] = type(name, (kinds[0],), {"__getattr__": _of_remote})
        return self.classes[key]

    def end(self):
        """End the candidate's process and return how it ended."""
        if self.over is None:
            self.frames.write({"op": "end"}, b"c")
            over = None
            while over is None and isinstance(message := self.frames.read(), dict):
                over = read(Answer, message).over
            self.over = read(End, over)
        return self.over


def _of_remote(error, name):
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(error._roll_remote, name)


def builtins_input(prompt=""):
    """Call `input` as the tests left it: the candidate's `input` prints its prompt by itself."""
    return builtins.input(prompt)


def read_line():
    """Read a line of standard input, as the tests left it."""
    return sys.stdin.readline()


def read_rest():
    """Read the rest of standard input, as the tests left it."""
    return sys.stdin.read()
