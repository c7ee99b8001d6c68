"""Compares values that are too long to be compared in ROLL's process; runs in a checker's sandbox.

host ──► fd 0: the comparison, the expected value, the candidate's (three frames)      host ◄── fd 3: {"same": …}
"""

from __future__ import annotations

import os

from . import compare, wire
from .frames import pack, split_frames, unpack
from .messages import Answer, Comparison, parse_record


def is_same(comparison, expected, actual):
    """Return whether two texts, or two values encoded as JSON, are equal."""
    if comparison.kind == "text":
        printed, wanted = (body.decode("utf-8", "surrogateescape") for body in (actual, expected))
        return compare.is_same_output(printed, wanted, comparison.mode, comparison.tolerance)
    answer = unpack(actual)
    if not isinstance(answer, dict) or "value" not in answer:
        return False
    value = wire.decode(unpack(expected))
    return compare.is_same_value(
        parse_record(Answer, answer).value, value, tolerance=comparison.tolerance, match=comparison.mode
    )


def main():
    """Run one comparison for the host."""
    data = bytearray()
    while more := os.read(0, 1 << 20):
        data += more
    how, expected, actual = split_frames(data)
    try:
        result = is_same(Comparison(**unpack(how)), expected, actual)
    except (wire.WireError, MemoryError):  # not a value that `encode` writes
        result = False
    os.write(3, pack({"same": result}))
    os._exit(0)
