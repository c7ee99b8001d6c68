"""Doing with the candidate's objects what a checker asks, one message after the other.

    {"op": "call", "of": object, "args": tree, "kwargs": tree}      {"value": tree}           plain data
    {"op": "attr", "of": object or null, "name": text}          ──► {"remote": n, "kind": …}  an object that stays here
    {"op": "len" | "list" | "item" | "text", "of": object}          {"raised": […], "text"}   an exception
    {"op": "end"}

`of: null` means the code's own variables. A call's answer also brings `args` where the function changed lists, dicts or
sets that it was given, for a caller would see that too.
"""

from __future__ import annotations

import os

from . import interpreter, wire
from .exceptions import raised
from .outcomes import NotPlainErrors, finished

_MUTABLE = (list, dict, set)


class Service:
    """One loaded copy of the candidate's code."""

    def __init__(self, code, frames):
        self.code, self.frames = code, frames
        self.variables = interpreter.namespace("solution")
        self.objects = []
        self.numbers = {}

    def run(self):
        """Load, then answer until the end; never returns."""
        try:
            exec(self.code, self.variables)
        except Exception as error:
            self.frames.write(raised(error))
            os._exit(1)
        names = [name for name in list(self.variables) if isinstance(name, str) and not name.startswith("_")]
        self.frames.write({"loaded": names})
        while True:
            message = self.frames.read()
            if message is None or message["op"] == "end":
                os._exit(0)
            try:
                answer = self.answer(message)
            except Exception as error:
                answer = raised(error)
            self.frames.write(answer)

    def answer(self, message):
        """One operation."""
        op, of = message["op"], message["of"]
        if op == "attr" and of is None:
            if message["name"] not in self.variables:
                return {"missing": message["name"]}
            return self.result(self.variables[message["name"]])
        target = self.objects[of]
        if op == "call":
            return self.call(target, message)
        if op == "attr":
            return self.result(getattr(target, message["name"]))
        if op == "len":
            return self.result(len(target))
        if op == "list":
            return self.result(list(target))
        if op == "text":
            return self.result(str(target))
        return self.result(target[self.decode(message["key"])])

    def call(self, target, message):
        """A call, and what it did to its arguments."""
        args, kwargs = self.decode(message["args"]), self.decode(message["kwargs"])
        answer = self.result(finished(target(*args, **kwargs)))
        if any(isinstance(item, _MUTABLE) for item in args):
            try:
                changed = wire.encode(args, self.tree)
            except NotPlainErrors:
                return answer
            if changed != message["args"]:
                answer["args"] = changed
        return answer

    def decode(self, tree):
        """A value from the checker; it may name objects that are here."""
        return wire.decode(tree, lambda tree: self.objects[tree[1]])

    def tree(self, value, base):
        """Of an object that stays here; of what has a plain base, that will do."""
        return ["r", self.number(value)] if base is None else None

    def number(self, value):
        """Of an object that stays here."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def result(self, value):
        """An answer with a value. Inside plain data only plain data is given."""
        try:
            return {"value": wire.encode(value)}
        except NotPlainErrors:
            if isinstance(value, (list, tuple, set, frozenset, dict)):
                return {"value": wire.encode(value, self.tree)}
            return {"remote": self.number(value), "kind": type(value).__name__}
