"""The checker's stand-ins for what the candidate has.

A stand-in passes calls, attributes, length and items on, as plain data. It never compares: `==`, `<` and the truth of
an object that stays with the candidate are errors, so that no `__eq__` of a candidate's decides a test.
"""

from __future__ import annotations

from . import exceptions, wire


class GoneError(BaseException):
    """The candidate's process has ended; no test may catch it and pass."""


class BrokenTestsError(BaseException):
    """The tests ask for what cannot be done, whatever the candidate: their author's mistake."""


class CandidateError(Exception):
    """An exception of the candidate's that has no built-in base other than `Exception`."""


class NotComparableError(TypeError):
    """A test compares an object that is no plain data."""


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
    """Asks the candidate's process; one question, one answer."""

    def __init__(self, frames, names):
        self.frames = frames
        self.names = names
        self.over = None
        """How the candidate's process ended, once it has."""
        self.mistake = None
        """Of the tests' author."""

    def broken(self, text):
        """The error to raise where the tests cannot be right."""
        self.mistake = self.mistake or text
        return BrokenTestsError(text)

    def ask(self, message):
        """Send, and wait for the answer.

        Raises:
            GoneError: the candidate's process has ended, now or before.
        """
        if self.over is not None:
            raise GoneError()
        self.frames.write(message, b"c")
        answer = self.frames.read()
        if not isinstance(answer, dict) or "over" in answer:
            self.over = ended(answer)
            raise GoneError()
        return answer

    def end(self):
        """End the candidate's process; how it ended."""
        if self.over is None:
            self.frames.write({"op": "end"}, b"c")
            self.over = ended(self.frames.read())
        return self.over

    def value(self, answer):
        """What an answer means.

        Raises:
            Exception: of the kind that the candidate raised.
            WireError: it is of no known form: the candidate made it up.
        """
        if "raised" in answer:
            raise _exception(answer)
        if "remote" in answer:
            return Remote(self, answer["remote"], str(answer.get("kind")))
        return wire.decode(answer.get("value"), lambda tree: Remote(self, tree[1], "object"))

    def name(self, name):
        """A variable of the candidate's code; KeyError where it has none."""
        answer = self.ask({"op": "attr", "of": None, "name": name})
        if "missing" in answer:
            raise KeyError(name)
        return self.value(answer)


def _exception(answer):
    found = exceptions.classes(answer["raised"])
    for _, kind in found:
        if kind is not None and issubclass(kind, Exception) and kind is not Exception:
            error = CandidateError(answer.get("text"))
            try:
                error = kind(answer.get("text"))
            except TypeError:
                continue  # a kind that takes more arguments (UnicodeDecodeError): its base will do
            return error
    return CandidateError(f"{found[0][0]}: {answer.get('text')}")


def _never(what):
    def refuse(self, *other):
        raise NotComparableError(
            f"{what} of an object of type {object.__getattribute__(self, '_kind')}: not plain data"
        )

    return refuse


class Remote:
    """An object that stays with the candidate."""

    __slots__ = ("_kind", "_line", "_number")
    __hash__ = object.__hash__

    def __init__(self, line, number, kind):
        self._line, self._number, self._kind = line, number, kind

    def _ask(self, op, **more):
        return self._line.value(self._line.ask({"op": op, "of": self._number, **more}))

    def __call__(self, *args, **kwargs):
        trees = _tree(self, args), _tree(self, kwargs)
        answer = self._line.ask({"op": "call", "of": self._number, "args": trees[0], "kwargs": trees[1]})
        if "args" in answer:
            _change(args, wire.decode(answer["args"], lambda number: Remote(self._line, number, "object")))
        return self._line.value(answer)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("attr", name=name)

    def __len__(self):
        return self._ask("len")

    def __iter__(self):
        return iter(self._ask("list"))

    def __getitem__(self, key):
        try:
            tree = wire.encode(key, _numbers(self))
        except (wire.NotPlainError, RecursionError):
            # `f(x)[:2]` of what would be a list, had the candidate given one: not the tests' mistake
            raise NotComparableError(f"{key!r:.80} of an object of type {self._kind}: not plain data") from None
        return self._ask("item", key=tree)

    def __str__(self):
        return str(self._ask("text"))

    __eq__ = _never("a comparison")
    __ne__ = _never("a comparison")
    __lt__ = _never("a comparison")
    __le__ = _never("a comparison")
    __gt__ = _never("a comparison")
    __ge__ = _never("a comparison")
    __bool__ = _never("the truth")


def _numbers(remote):
    """Gives the number of an object that is where `remote` is."""

    def tree(item, base):
        own = isinstance(item, Remote) and item._line is remote._line
        return ["r", item._number] if own else None

    return tree


def _tree(remote, value):
    try:
        return wire.encode(value, _numbers(remote))
    except (wire.NotPlainError, RecursionError) as error:
        text = f"a test hands the candidate {error}, which is not plain data"
        raise remote._line.broken(text) from None


def _change(args, after):
    """Give lists, dicts and sets the content that the candidate left in them."""
    if not isinstance(after, tuple) or len(after) != len(args):
        raise wire.WireError("arguments do not fit")
    for mine, theirs in zip(args, after, strict=True):
        if type(mine) is not type(theirs) or mine == theirs:
            continue
        if isinstance(mine, list):
            mine[:] = theirs
        elif isinstance(mine, (dict, set)):
            mine.clear()
            mine.update(theirs)
