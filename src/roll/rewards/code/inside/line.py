"""The checker's end of the line to the candidate's process: questions, answers, and functions that are called back."""

from __future__ import annotations

import builtins
import sys

from . import exceptions, wire
from .outcomes import BrokenTestsError, GoneError, NotComparableError
from .proxies import Remote, made_of, of_tree


def ended(answer):
    """How a process ended, by a message that may be made up: of it, what is looked at, and nothing that is nested."""
    over = answer.get("over") if isinstance(answer, dict) else None
    over = over if isinstance(over, dict) else {"status": 255}
    limit, cpu_s = over.get("limit"), over.get("cpu_s")
    return {
        "status": over.get("status") if isinstance(over.get("status"), int) else 255,
        "limit": limit if isinstance(limit, str) else None,
        "cpu_s": cpu_s if isinstance(cpu_s, (int, float)) else None,
    }


class Line:
    """One question at a time; before its answer come the calls that the candidate makes meanwhile."""

    def __init__(self, frames):
        self.frames = frames
        self.names = []
        """The candidate's own."""
        self.over = None
        """How the candidate's process ended, once it has."""
        self.mistake = None
        """Of the tests' author."""
        self.functions = [builtins_input, read_line, read_rest]
        self.classes = {}
        self.members = {}
        self.coroutines = {}
        """Those that stand for the candidate's, with its numbers, so that one can be handed back."""
        self.made = []
        """What the tests made by calling classes, with the arguments."""

    def broken(self, text):
        """The error to raise where the tests cannot be right."""
        self.mistake = self.mistake or text
        return BrokenTestsError(text)

    def start(self, case):
        """Start the candidate's process for a case; its first answer."""
        self.frames.write({"kind": "serve", "cpu_s": case["cpu_s"], "wall_s": case["wall_s"]}, b"s")
        loaded = self._answer()
        if "loaded" in loaded:
            self.names = [name for name in loaded["loaded"] if isinstance(name, str)]
        return loaded

    def ask(self, message):
        """Send, and wait for the answer.

        Raises:
            GoneError: the candidate's process has ended, now or before.
        """
        if self.over is not None:
            raise GoneError()
        self.frames.write(message, b"c")
        while "ask" in (answer := self._answer()):
            self.frames.write({"answer": self._called_back(answer)}, b"c")
        return answer

    def _answer(self):
        answer = self.frames.read()
        if not isinstance(answer, dict) or "over" in answer:
            self.over = ended(answer)
            raise GoneError()
        for stream, key in ((sys.stdout, "printed"), (sys.stderr, "complained")):
            if isinstance(answer.get(key), str):
                stream.write(answer[key])
        return answer

    def do(self, op, *args, **kwargs):
        """The answer to an operation on values of the test's.

        Raises:
            BrokenTestsError: a test calls what it found by name with a value that cannot go there.
            NotComparableError: the same with an object of an answer. Had that been plain data, it might have been in
                order: so it is the answer's failure.
        """
        try:
            message = {"op": op, "args": self.tree(args), "kwargs": self.tree(kwargs)}
        except (wire.NotPlainError, RecursionError) as error:
            if op == "call" and isinstance(args[0], Remote) and args[0]._name:
                raise self.broken(f"a test hands the candidate {error}, which is not plain data") from None
            raise NotComparableError(f"'{op}' with {error}: not plain data") from None
        return self.ask(message)

    def tree(self, value):
        """A value for the candidate.

        Raises:
            NotPlainError: it cannot go there.
        """
        return wire.encode(value, self._ours)

    def _ours(self, value, base):
        if isinstance(value, Remote):
            return ["r", value._number] if value._line is self else None
        if (number := made_of(value)) is not None:
            return ["r", number]
        if base is not None:
            return None
        if id(value) in self.coroutines:
            return ["r", self.coroutines[id(value)][1]]
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
        """Call a function of the tests' for the candidate."""
        try:
            number = {"input": 0, "readline": 1, "read": 2}.get(answer["ask"], answer["ask"])
            args, kwargs = self.decode(answer["args"]), self.decode(answer["kwargs"])
            return {"value": self.tree(self.functions[number](*args, **kwargs))}
        except Exception as error:
            return exceptions.raised(error, made_of)

    def decode(self, tree, state="answer"):
        """A value from the candidate."""
        return wire.decode(tree, lambda tree: of_tree(self, tree, state))

    def value(self, answer, state="answer"):
        """What an answer means.

        Raises:
            Exception: of the kind that the candidate raised.
            WireError: it is of no known form: the candidate made it up.
        """
        if "raised" in answer:
            raise self.exception(answer)
        return self.decode(answer.get("value"), state)

    def name(self, name):
        """A variable of the candidate's code; KeyError where it has none."""
        answer = self.ask({"op": "name", "name": name})
        if "missing" in answer:
            raise KeyError(name)
        value = self.value(answer)
        if isinstance(value, Remote):
            value._name = name
        return value

    def exception(self, answer):
        """What the candidate raised: an instance of a class that stands for the candidate's."""
        exceptions.classes(answer["raised"])
        kind = self.exception_class(answer["raised"])
        error = exceptions.instance(kind, answer.get("text"))
        if isinstance(answer.get("error"), int) and hasattr(error, "__dict__"):
            error._roll_remote = of_tree(self, ["r", answer["error"], kind.__name__, [], {}], "answer")
        return error

    def exception_class(self, tree):
        """A class for a tree that `exceptions.classes` has accepted."""
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
            except TypeError:  # bases that do not go together
                self.classes[key] = type(name, (kinds[0],), {"__getattr__": _of_remote})
        return self.classes[key]

    def end(self):
        """End the candidate's process; how it ended."""
        if self.over is None:
            self.frames.write({"op": "end"}, b"c")
            while isinstance(answer := self.frames.read(), dict) and "over" not in answer:
                pass
            self.over = ended(answer)
        return self.over


def _of_remote(error, name):
    if name.startswith("_") or "_roll_remote" not in error.__dict__:
        raise AttributeError(name)
    return getattr(error.__dict__["_roll_remote"], name)


def builtins_input(prompt=""):
    """As the tests left it: the candidate's `input` prints its prompt by itself."""
    return builtins.input(prompt)


def read_line():
    """Of standard input, as the tests left it."""
    return sys.stdin.readline()


def read_rest():
    """Of standard input, as the tests left it."""
    return sys.stdin.read()
