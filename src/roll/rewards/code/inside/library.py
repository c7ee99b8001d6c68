"""Standard library values that are sent by value: a closed list, each as a tag and a few texts and integers.

    Decimal, Fraction           ["D", text]  ["F", hex, hex]
    date, time, datetime        ["date", …]  ["time", …, fold, offset]  ["datetime", …, fold, offset]
    timedelta, timezone         ["delta", days, seconds, microseconds]  ["zone", delta]
    range, bytearray, UUID      ["R", hex, hex, hex]  ["B", hex]  ["U", hex]
    a built-in type             ["T", name]

Decoding builds instances of exactly these classes and calls nothing else. A time zone is sent as its offset from UTC at
that moment. Decoding that takes more than linear time (the greatest common divisor of a fraction) is bounded.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import fractions
import uuid

MAX_FRACTION_DIGITS = 1 << 14
"""Most hexadecimal digits of a numerator or a denominator."""
TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}


def _fraction(value):
    return ["F", hex(value.numerator), hex(value.denominator)]


def _offset(value):
    distance = value.utcoffset()
    return None if distance is None else _delta(distance)


def _delta(value):
    return ["delta", value.days, value.seconds, value.microseconds]


def _date(value):
    return ["date", value.year, value.month, value.day]


def _time(value):
    return ["time", value.hour, value.minute, value.second, value.microsecond, value.fold, _offset(value)]


def _datetime(value):
    clock = _time(value)[1:]
    if value.tzinfo is not None and clock[-1] is None:
        raise ValueError("a time zone without an offset")
    return ["datetime", value.year, value.month, value.day, *clock]


ENCODERS = {
    decimal.Decimal: lambda value: ["D", decimal.Decimal.__str__(value)],
    fractions.Fraction: _fraction,
    datetime.datetime: _datetime,
    datetime.date: _date,
    datetime.time: _time,
    datetime.timedelta: _delta,
    datetime.timezone: lambda value: ["zone", _delta(value.utcoffset(None))],
    range: lambda value: ["R", hex(value.start), hex(value.stop), hex(value.step)],
    bytearray: lambda value: ["B", bytes(value).hex()],
    uuid.UUID: lambda value: ["U", "%032x" % value.int],  # noqa: UP031
}


def integer(text):
    """Parse an integer from hexadecimal digits."""
    return int(text, 16)


def _of_fraction(above, below):
    if max(len(above), len(below)) > MAX_FRACTION_DIGITS:
        raise ValueError("a fraction of too many digits")
    return fractions.Fraction(integer(above), integer(below))


def _of_delta(days, seconds, microseconds):
    return datetime.timedelta(days, seconds, microseconds)


def _zone(tree):
    return None if tree is None else datetime.timezone(_of_delta(*tree[1:]))


def _of_time(hour, minute, second, microsecond, fold, zone):
    return datetime.time(hour, minute, second, microsecond, _zone(zone), fold=fold)


def _of_datetime(year, month, day, hour, minute, second, microsecond, fold, zone):
    return datetime.datetime(year, month, day, hour, minute, second, microsecond, _zone(zone), fold=fold)


def _text(value):
    if type(value) is not str:
        raise ValueError("not a text")
    return value


DECODERS = {
    "D": lambda text: decimal.Decimal(_text(text)),
    "F": _of_fraction,
    "date": lambda year, month, day: datetime.date(year, month, day),
    "time": _of_time,
    "datetime": _of_datetime,
    "delta": _of_delta,
    "zone": _zone,
    "R": lambda *parts: range(*map(integer, parts)),
    "B": lambda text: bytearray.fromhex(_text(text)),
    "U": lambda text: uuid.UUID(int=integer(text)),
    "T": lambda name: TYPES[name],
}
