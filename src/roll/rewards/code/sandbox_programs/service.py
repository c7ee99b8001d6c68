"""Carry out a checker's operations on the candidate's objects, one message after the other.

    {"op": name, "args": tree, "kwargs": tree}      {"value": tree}            the result
    {"op": "name", "name": text}                ──► {"raised": …, "text"}      an exception
    {"op": "end"}                                   {"missing": name}          no such variable
    {"op": "answer", "value" | "raised": …}     ◄── {"callback": number, "args": …} a callback to a function of the
    checker

`operations` lists the operations. An object that stays here is sent as ["r", number, class, methods, more]. The answer
to a call also has `args` if the function changed lists, dicts or sets in its arguments, because a caller would see
these changes. Every message includes the text that was printed since the last message. Awaitables are awaited here
immediately.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import enum
import io
import os
import sys
import time

from . import exceptions, interpreter, operations, wire
from .messages import Question
from .outcomes import ENCODING_ERRORS

_MUTABLE_TYPES = (list, dict, set, bytearray, collections.deque, collections.OrderedDict, collections.Counter)
_MUTABLE_TYPES += (collections.defaultdict,)
_IMMUTABLE_TYPES = (int, float, complex, str, bytes, tuple, frozenset)
_FETCH_TIME_S = 0.001
_PRINTED_BYTES = 1 << 20
_INPUT, _LINE, _REST = range(3)
"""Numbers of the checker's functions that read standard input."""


class Service:
    """Loads the candidate's code, and runs the checker's operations on its objects."""

    def __init__(self, code, frames):
        self.code, self.frames = code, frames
        self.variables = interpreter.make_namespace("solution")
        self.objects, self.numbers, self.waiting = [], {}, {}
        self.loop = None
        self.printed = os.memfd_create("stdout")
        self.position = 0
        self.operations = {
            **operations.FUNCTIONS,
            "some": self.fetch_items,
            "content": self.get_content,
            "leave": exit_block,
        }

    def run(self):
        """Load the code, then answer the checker's messages until the last one. This call never returns."""
        os.dup2(self.printed, 1)
        sys.stdin, sys.stderr = CheckerInput(self), io.StringIO()
        vars(builtins).update(input=lambda prompt="": self.run_checker(_INPUT, (prompt,), {}))
        try:
            exec(self.code, self.variables)
        except Exception as error:
            self.send(exceptions.encode_exception(error))
            os._exit(1)
        names = [name for name in list(self.variables) if isinstance(name, str) and not name.startswith("_")]
        self.send({"loaded": names})
        while True:
            self.serve(self.read_question())

    def read_question(self):
        """Return the checker's next message; exit the process after the last one."""
        message = self.frames.read()
        if message is None:
            os._exit(0)
        return Question(**message)

    def serve(self, question):
        """Answer one message."""
        if question.op == "end":
            os._exit(0)
        try:
            answer = self.run_operation(question)
        except Exception as error:
            answer = self.encode_exception(error)
        self.send(answer)

    def send(self, message):
        """Send a message to the checker, with the text that was printed since the last message."""
        with contextlib.suppress(Exception):  # the candidate may have closed the stream
            sys.stdout.flush()
        size = os.fstat(self.printed).st_size
        if size > self.position:
            text = os.pread(self.printed, min(size - self.position, _PRINTED_BYTES), self.position)
            self.position = size
            message = {**message, "stdout": text.decode("utf-8", "replace")}
        if isinstance(sys.stderr, io.StringIO) and sys.stderr.tell():
            message = {**message, "stderr": sys.stderr.getvalue()[:_PRINTED_BYTES]}
            sys.stderr.seek(0)
            sys.stderr.truncate()
        self.frames.write(message)

    def encode_exception(self, error):
        """Encode an exception as a message; the exception itself stays in this process."""
        return {**exceptions.encode_exception(error, self.register_object), "error": self.register_object(error)}

    def run_operation(self, question):
        """Run one operation and return its answer."""
        if question.op == "name":
            if question.name not in self.variables:
                return {"missing": True}
            return {"value": self.encode(self.variables.get(question.name))}
        args, kwargs = self.decode(question.args), self.decode(question.kwargs)
        value = self.operations[question.op](*args, **kwargs)
        if hasattr(type(value), "__await__"):
            return {**self.await_value(value), "awaited": True}
        answer = {"value": self.encode(value, made=question.op == "call" and isinstance(args[0], type))}
        if question.op == "call" and any(isinstance(item, _MUTABLE_TYPES) for item in args):
            with contextlib.suppress(*ENCODING_ERRORS):
                changed = wire.encode(args[1:], self.encode_special)
                if changed[1:] != question.args[2:]:
                    return {**answer, "args": changed}
        return answer

    def await_value(self, value):
        """Await an object; return the message with its result or its exception."""
        import asyncio  # importing it takes as long as a short case

        async def wait():
            return await value

        self.loop = self.loop or asyncio.new_event_loop()
        try:
            return {"value": self.encode(self.loop.run_until_complete(wait()))}
        except Exception as error:
            return self.encode_exception(error)

    def run_checker(self, number, args, kwargs):
        """Call a function of the checker and return its result."""
        self.send({"callback": number, "args": self.encode(tuple(args)), "kwargs": self.encode(dict(kwargs))})
        while (question := self.read_question()).op != "answer":
            self.serve(question)
        if question.raised is not None:
            raise exceptions.rebuild_exception(question.raised, question.text, self.objects)
        return self.decode(question.value)

    def decode(self, tree):
        """Decode a value from the checker; it may refer to objects in this process, or to functions in the checker."""
        return wire.decode(tree, self.decode_reference)

    def decode_reference(self, tree):
        """Decode a reference to an object in this process or to a function of the checker."""
        if tree[0] == "r":
            return self.objects[tree[1]]
        return iterate_remote(self, tree[1]) if len(tree) > 2 else make_callback(self, tree[1])

    def encode(self, value, made=False):
        """Encode a value for the checker.

        `made` is true for a value that was created by calling a class. If the candidate defines that class, the value
        is sent as an object, even if its base class is plain data.
        """
        kind = type(value)
        if made and kind.__module__ == "solution" and wire.find_plain_base(kind) is not None:
            return self.encode_object(value, wire.find_plain_base(kind), whole=False)
        return wire.encode(value, self.encode_special)

    def encode_special(self, value, base):
        """Encode a value that cannot be sent as it is; return None if the encoding of its base class suffices."""
        if isinstance(value, type) and issubclass(value, Exception):
            return exceptions.encode_class(value, self.register_object)
        if base is None or (base in (*_MUTABLE_TYPES, *_IMMUTABLE_TYPES) and has_own_names(value, base)):
            return self.encode_object(value, base, whole=base in _IMMUTABLE_TYPES)
        return None

    def encode_object(self, value, base, whole=False):
        """Encode a reference to an object that stays in this process.

        If `whole` is true, the reference includes the object's content, which is then assumed not to change.
        """
        kind = type(value)
        holds = base is not None and (not whole or wire.ENCODERS[base](value, self.encode_special, 0))
        member = [kind.__name__, value.name] if isinstance(value, enum.Enum) else None
        more = {"holds": holds, "is_class": isinstance(value, type), "member": member}
        return ["r", self.register_object(value), kind.__name__, operations.list_methods(kind), more]

    def register_object(self, value):
        """Keep an object in this process, and return its number."""
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return number

    def get_content(self, value):
        """Return the content of an object that derives from a list, a dict or a similar type, without calling its
        methods.
        """
        base = wire.find_plain_base(type(value))
        return self.decode(wire.ENCODERS[base](value, self.encode_special, 0))

    def fetch_items(self, iterator, max_items):
        """Return up to `max_items` items of an iterator, and whether there may be more.

        A slow iterator yields fewer items per call. An error after the first item is raised in the next call.
        """
        if id(iterator) in self.waiting:
            raise self.waiting.pop(id(iterator))
        items, until = [], time.monotonic() + _FETCH_TIME_S
        while len(items) < max_items and (not items or time.monotonic() < until):
            try:
                items.append(next(iterator))
            except StopIteration:
                return (items, False)
            except Exception as error:
                if not items:
                    raise
                self.waiting[id(iterator)] = error
                break
        return (items, True)


def exit_block(target, own, name, text):
    """Call `target.__exit__` for a `with` block that raised an exception, and return the result.

    `own` is the candidate's exception; if it is None, a test raised an exception of the built-in class `name` with this
    text.
    """
    error = own if own is not None else getattr(builtins, name)(text)
    return type(target).__exit__(target, type(error), error, error.__traceback__)


def has_own_names(value, base):
    """Return whether an object has fields, or public names of its class, that the base class `base` lacks."""
    kind = type(value)
    own = kind.__mro__[: kind.__mro__.index(base)]
    return bool(getattr(value, "__dict__", None)) or any(
        not name.startswith("_") for each in own for name in vars(each)
    )


def make_callback(service, number):
    """Return a function that calls the checker's function with this number."""

    def call(*args, **kwargs):
        return service.run_checker(number, args, kwargs)

    return call


def iterate_remote(service, number):
    """Yield the items of the checker's iterator with this number."""
    while True:
        try:
            item = service.run_checker(number, (), {})
        except StopIteration:
            return
        yield item


class CheckerInput(io.TextIOBase):
    """Standard input, which a test may have replaced in the checker's process."""

    def __init__(self, service):
        self.service = service

    def readable(self):
        """Return True."""
        return True

    def readline(self, size=-1):
        """Read a line from the checker's standard input."""
        return self.service.run_checker(_LINE, (), {})

    def read(self, size=-1):
        """Read the rest of the checker's standard input; `size` is ignored."""
        return self.service.run_checker(_REST, (), {})
