"""Check a candidate's claims about two of its objects: a claim counts only if the candidate also tells objects apart.

A class may claim that its objects are equal to everything. So for each yes, the candidate is also asked about objects
of the same class that are made from slightly different arguments, in random order. At least half of them must be
unequal, and the answers must be consistent. If nothing can be varied, no claim counts. Members of enumerations are
compared by the names of class and member, which are plain data.
"""

from __future__ import annotations

import random

from . import wire
from .outcomes import Kept

_VARIANTS = 4
_ASKED = 3
"""Number of times that each question is asked: random answers are consistent for fewer than one in a thousand
candidates."""
_order = random.SystemRandom()


def _is_remote(value):
    return isinstance(value, Kept)


def equal(one, other):
    """Compute `==` where at least one operand is an object of the candidate."""
    if other is None:
        return False
    if one._holds and (not _is_remote(other) or other._holds):
        values = [_content(item) for item in (one, other)]
        if not any(map(_is_remote, values)):
            return bool(values[0] == values[1])
    if not _is_remote(other):
        raise one._refused("a comparison")
    if one._member is not None and other._member is not None:
        return one._member == other._member
    return _believed(one, other)


def _content(value):
    """Return the plain data that an object holds whose class derives from a class of plain data."""
    return value._line.value(value._line.do("content", value)) if _is_remote(value) else value


def _claims(op, one, other):
    answer = one._line.value(one._line.do(op, one, other))
    if type(answer) is not bool:
        raise one._refused(f"'{op}'")
    return answer


def _believed(one, other):
    """Return whether two objects are equal; a yes counts only if the candidate also tells other objects apart."""
    if not _claims("eq", one, other):
        return False
    swap = one._made is not None and other._made is None
    made, fixed = (one, other) if swap else (other, one)
    if made._made is None:
        made = next((each for each in reversed(one._line.made) if each._kind == one._kind), None)
    variants = [] if made is None else _variants(made)
    questions = [(one, other, None)] * _ASKED
    for index, variant in enumerate(variants):
        questions += [(variant, fixed, index) if swap else (fixed, variant, index)] * _ASKED
    _order.shuffle(questions)
    answers = {}
    for left, right, index in questions:
        answers.setdefault(index, set()).add(_claims("eq", left, right))
    told_apart = sum(found == {False} for found in answers.values())
    if any(len(found) > 1 for found in answers.values()) or not variants or 2 * told_apart < len(variants):
        raise one._refused("a comparison", " that is not told from others")
    return True


def _variants(made):
    """Return objects that are made as this one was, but from other arguments."""
    kind, args, kwargs = made._made
    found = []
    places = [*range(len(args)), *kwargs]
    for turn in range(2 * _VARIANTS * len(places)):
        place = places[turn % len(places)]
        old = kwargs[place] if isinstance(place, str) else args[place]
        new = varied(old, 1 + turn // len(places))
        if new is None or len(found) == _VARIANTS:
            continue
        changed = [new if place == index else item for index, item in enumerate(args)]
        answer = kind._line.do("call", kind, *changed, **(kwargs | {place: new} if isinstance(place, str) else kwargs))
        if answer.raised is None and _is_remote(variant := kind._line.value(answer)):
            found.append(variant)
    return found


def varied(value, turn):
    """Return a slightly different value of the same type, or None if none is known."""
    if isinstance(value, bool):
        return not value if turn == 1 else None
    if isinstance(value, str):
        return (value + "abcd"[turn % 4], value[1:] + "q", "z" + value, value * 2 + "x")[turn % 4]
    if isinstance(value, (list, tuple)) and value:
        place = turn % len(value)
        new = varied(value[place], turn)
        changed = [new if place == index else item for index, item in enumerate(value)]
        return None if new is None else type(value)(changed) if type(value) in (list, tuple) else None
    if isinstance(value, list):
        return [turn]
    if isinstance(value, dict) and value:
        key = list(value)[turn % len(value)]
        new = varied(value[key], turn)
        return None if new is None else {**value, key: new}
    if _is_remote(value) and value._made is not None:
        return next(iter(_variants(value)[turn % _VARIANTS :][:1]), None)
    try:
        return value + (1, 7, -1, 10)[turn % 4]
    except Exception:
        return None


def contains(container, value):
    """Compute `value in container`.

    The items of a container that no test made are compared here, since its `in` would receive the expected value.
    """
    if container._holds or not container._is_subject:
        return value in (_content(container) if container._holds else list(container))
    return _claims("contains", container, value)


def ordered(op, one, other):
    """Compute `<`, `>`, `<=` or `>=` of two objects.

    A yes counts only if the reversed comparison gives a no, or the objects are equal.
    """
    if not _is_remote(other):
        raise one._refused("an order")
    if not _claims(op, one, other):
        return False
    if _claims(op, other, one) and (op in ("lt", "gt") or not equal(one, other)):
        raise one._refused("an order", " that is not told from others")
    return True


def reckon(op, operands):
    """Compute arithmetic on objects that a test made; if an operand is a plain value, the result must be an object."""
    remotes = [item for item in operands if _is_remote(item)]
    are_subjects = all(item._is_subject for item in remotes)
    if len(operands) > 1 and not are_subjects:
        raise remotes[0]._refused(f"'{op}'", ", which no test made")
    line = remotes[0]._line
    value = line.value(line.do(op, *operands), are_subjects)
    if len(remotes) < len(operands) and not _is_remote(value):
        raise remotes[0]._refused(f"'{op}'", " and a value of the test's")
    return value


def member(found):
    """Return a member of an enumeration: always the same object for one member, so that `is` holds."""
    names = found._member
    if not isinstance(names, list) or len(names) != 2 or not all(isinstance(name, str) for name in names):
        raise wire.WireError("no member of an enumeration")
    return found._line.members.setdefault(tuple(names), found)


def named_member(owner, name, found):
    """Return a member that a test reads by its name; reject an alias, as its name would not be plain data."""
    if owner._is_class and isinstance(name, str) and found._member[1] != name:
        raise found._refused(f"the name {name!r}", f", which is also {found._member[1]!r}")
    return found


def made_member(kind, args, found):
    """Check a member that a test made from its value: another value must give another member, or none."""
    for turn in range(1, _VARIANTS + 1):
        answer = kind._line.do("call", kind, *(varied(item, turn) for item in args))
        if answer.raised is not None or getattr(kind._line.value(answer), "_member", None) != found._member:
            return
    raise found._refused("a member", " that is not told from others")
