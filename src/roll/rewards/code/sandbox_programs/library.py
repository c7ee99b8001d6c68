"""Standard library values that are sent by value: an allow-list; each is encoded as a tag with a few strings and
integers.

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
"""Maximum number of hexadecimal digits of a numerator or a denominator."""
TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}


def _encode_fraction(value):
    return ["F", hex(value.numerator), hex(value.denominator)]


def _encode_offset(value):
    distance = value.utcoffset()
    return None if distance is None else _encode_delta(distance)


def _encode_delta(value):
    return ["delta", value.days, value.seconds, value.microseconds]


def _encode_date(value):
    return ["date", value.year, value.month, value.day]


def _encode_time(value):
    return ["time", value.hour, value.minute, value.second, value.microsecond, value.fold, _encode_offset(value)]


def _encode_datetime(value):
    clock = _encode_time(value)[1:]
    if value.tzinfo is not None and clock[-1] is None:
        raise ValueError("the time zone has no offset")
    return ["datetime", value.year, value.month, value.day, *clock]


ENCODERS = {
    decimal.Decimal: lambda value: ["D", decimal.Decimal.__str__(value)],
    fractions.Fraction: _encode_fraction,
    datetime.datetime: _encode_datetime,
    datetime.date: _encode_date,
    datetime.time: _encode_time,
    datetime.timedelta: _encode_delta,
    datetime.timezone: lambda value: ["zone", _encode_delta(value.utcoffset(None))],
    range: lambda value: ["R", hex(value.start), hex(value.stop), hex(value.step)],
    bytearray: lambda value: ["B", bytes(value).hex()],
    uuid.UUID: lambda value: ["U", "%032x" % value.int],  # noqa: UP031
}


def parse_integer(text):
    """Parse an integer from hexadecimal digits."""
    return int(text, 16)


def _decode_fraction(numerator, denominator):
    if max(len(numerator), len(denominator)) > MAX_FRACTION_DIGITS:
        raise ValueError("the fraction has too many digits")
    return fractions.Fraction(parse_integer(numerator), parse_integer(denominator))


def _decode_delta(days, seconds, microseconds):
    return datetime.timedelta(days, seconds, microseconds)


def _decode_zone(tree):
    return None if tree is None else datetime.timezone(_decode_delta(*tree[1:]))


def _decode_time(hour, minute, second, microsecond, fold, zone):
    return datetime.time(hour, minute, second, microsecond, _decode_zone(zone), fold=fold)


def _decode_datetime(year, month, day, hour, minute, second, microsecond, fold, zone):
    return datetime.datetime(year, month, day, hour, minute, second, microsecond, _decode_zone(zone), fold=fold)


def _check_text(value):
    if type(value) is not str:
        raise ValueError("the value is not a string")
    return value


DECODERS = {
    "D": lambda text: decimal.Decimal(_check_text(text)),
    "F": _decode_fraction,
    "date": lambda year, month, day: datetime.date(year, month, day),
    "time": _decode_time,
    "datetime": _decode_datetime,
    "delta": _decode_delta,
    "zone": _decode_zone,
    "R": lambda *parts: range(*map(parse_integer, parts)),
    "B": lambda text: bytearray.fromhex(_check_text(text)),
    "U": lambda text: uuid.UUID(int=parse_integer(text)),
    "T": lambda name: TYPES[name],
}
