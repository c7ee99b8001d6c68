"""Check a candidate's claims about two of its objects: a claim is accepted only if other objects differ.

A class may claim that its objects are equal to everything. Therefore, for each claim of equality, the candidate is also
asked to compare objects of the same class that are constructed with slightly different arguments, in random order. At
least half of them must be unequal, and the answers must be consistent. If no argument can be varied, no claim is
accepted. Members of enumerations are compared by the names of class and member, which are plain data.
"""

from __future__ import annotations

import random

from . import wire
from .outcomes import RemoteObjectBase

_NUM_VARIANTS = 4
_NUM_REPEATS = 3
"""Number of times that each comparison is repeated: with random answers, fewer than one in a thousand candidates are
consistent."""
_random = random.SystemRandom()


def _is_remote(value):
    return isinstance(value, RemoteObjectBase)


def is_equal(one, other):
    """Compute `==` where at least one operand is an object of the candidate."""
    if other is None:
        return False
    if one._holds and (not _is_remote(other) or other._holds):
        values = [_get_content(item) for item in (one, other)]
        if not any(map(_is_remote, values)):
            return bool(values[0] == values[1])
    if not _is_remote(other):
        raise one._make_unsupported_error("a comparison")
    if one._member is not None and other._member is not None:
        return one._member == other._member
    return _verify_equality(one, other)


def _get_content(value):
    """Return the plain data in a candidate's object whose class derives from list, dict, str or a similar type.

    Any other value is returned unchanged.
    """
    return (
        value._roll_connection.decode_answer(value._roll_connection.run_operation("content", value))
        if _is_remote(value)
        else value
    )


def _run_comparison(op, one, other):
    answer = one._roll_connection.decode_answer(one._roll_connection.run_operation(op, one, other))
    if type(answer) is not bool:
        raise one._make_unsupported_error(f"'{op}'")
    return answer


def _verify_equality(one, other):
    """Return whether two of the candidate's objects are equal.

    If the candidate claims that the objects are equal, slightly changed copies of one object are compared as well. The
    claim is accepted only if at least half of the copies are unequal to the other object; otherwise the test is
    refused.
    """
    if not _run_comparison("eq", one, other):
        return False
    swap = one._made is not None and other._made is None
    made, fixed = (one, other) if swap else (other, one)
    if made._made is None:
        made = next((each for each in reversed(one._roll_connection.made) if each._kind == one._kind), None)
    variants = [] if made is None else _make_variants(made)
    questions = [(one, other, None)] * _NUM_REPEATS
    for index, variant in enumerate(variants):
        questions += [(variant, fixed, index) if swap else (fixed, variant, index)] * _NUM_REPEATS
    # In a fixed order, a class could answer by counting the comparisons.
    _random.shuffle(questions)
    answers = {}
    for left, right, index in questions:
        answers.setdefault(index, set()).add(_run_comparison("eq", left, right))
    num_unequal = sum(found == {False} for found in answers.values())
    if any(len(found) > 1 for found in answers.values()) or not variants or 2 * num_unequal < len(variants):
        raise one._make_unsupported_error("a comparison", " that is not distinguished from others")
    return True


def _make_variants(made):
    """Repeat the call that made the object `made`, each time with one argument slightly changed; return the results."""
    kind, args, kwargs = made._made
    variants = []
    places = [*range(len(args)), *kwargs]
    for turn in range(2 * _NUM_VARIANTS * len(places)):
        place = places[turn % len(places)]
        old = kwargs[place] if isinstance(place, str) else args[place]
        new = vary_value(old, 1 + turn // len(places))
        if new is None or len(variants) == _NUM_VARIANTS:
            continue
        changed = [new if place == index else item for index, item in enumerate(args)]
        answer = kind._roll_connection.run_operation(
            "call", kind, *changed, **(kwargs | {place: new} if isinstance(place, str) else kwargs)
        )
        if answer.raised is None and _is_remote(variant := kind._roll_connection.decode_answer(answer)):
            variants.append(variant)
    return variants


def vary_value(value, turn):
    """Return a slightly different value of the same type; None if the value cannot be varied.

    Different turns give different variants.
    """
    if isinstance(value, bool):
        return not value if turn == 1 else None
    if isinstance(value, str):
        return (value + "abcd"[turn % 4], value[1:] + "q", "z" + value, value * 2 + "x")[turn % 4]
    if isinstance(value, (list, tuple)) and value:
        place = turn % len(value)
        new = vary_value(value[place], turn)
        changed = [new if place == index else item for index, item in enumerate(value)]
        return None if new is None else type(value)(changed) if type(value) in (list, tuple) else None
    if isinstance(value, list):
        return [turn]
    if isinstance(value, dict) and value:
        key = list(value)[turn % len(value)]
        new = vary_value(value[key], turn)
        return None if new is None else {**value, key: new}
    if _is_remote(value) and value._made is not None:
        return next(iter(_make_variants(value)[turn % _NUM_VARIANTS :][:1]), None)
    try:
        return value + (1, 7, -1, 10)[turn % 4]
    except Exception:
        return None


def is_contained(container, value):
    """Compute `value in container` for a container of the candidate.

    If the container was not created by a test, its items are fetched and compared in this process, because the
    container's own `in` would receive the expected value.
    """
    if container._holds or not container._is_subject:
        return value in (_get_content(container) if container._holds else list(container))
    return _run_comparison("contains", container, value)


def compare_order(op, one, other):
    """Compute `<`, `>`, `<=` or `>=` of two of the candidate's objects.

    The candidate's result "true" is accepted only if the comparison with swapped operands is false or, for `<=` and
    `>=`, the objects are equal; otherwise the test is refused.
    """
    if not _is_remote(other):
        raise one._make_unsupported_error("an order")
    if not _run_comparison(op, one, other):
        return False
    if _run_comparison(op, other, one) and (op in ("lt", "gt") or not is_equal(one, other)):
        raise one._make_unsupported_error("an order", " that is not distinguished from others")
    return True


def compute_arithmetic(op, operands):
    """Compute an arithmetic operation with an object of the candidate among its operands.

    The test is refused if one of two operands is an object that was not created by a test, or if the result for an
    object and a plain value is a plain value.
    """
    remotes = [item for item in operands if _is_remote(item)]
    are_subjects = all(item._is_subject for item in remotes)
    if len(operands) > 1 and not are_subjects:
        raise remotes[0]._make_unsupported_error(f"'{op}'", ", which no test made")
    connection = remotes[0]._roll_connection
    value = connection.decode_answer(connection.run_operation(op, *operands), are_subjects)
    if len(remotes) < len(operands) and not _is_remote(value):
        raise remotes[0]._make_unsupported_error(f"'{op}'", " and a value of the test's")
    return value


def intern_member(member):
    """Return the existing proxy of an enumeration member, so that `is` holds; without one, return `member`."""
    names = member._member
    if not isinstance(names, list) or len(names) != 2 or not all(isinstance(name, str) for name in names):
        raise wire.WireError("the message does not describe a member of an enumeration")
    return member._roll_connection.members.setdefault(tuple(names), member)


def check_named_member(owner, name, member):
    """Return the enumeration member that a test reads as `owner.name`; refuse an alias of another member."""
    if owner._is_class and isinstance(name, str) and member._member[1] != name:
        raise member._make_unsupported_error(f"the name {name!r}", f", which is also {member._member[1]!r}")
    return member


def check_made_member(kind, args, member):
    """Check the enumeration member that calling `kind` with `args` returned.

    Slightly different arguments must return a different member or raise an exception; otherwise the test is refused.
    """
    for turn in range(1, _NUM_VARIANTS + 1):
        answer = kind._roll_connection.run_operation("call", kind, *(vary_value(item, turn) for item in args))
        if (
            answer.raised is not None
            or getattr(kind._roll_connection.decode_answer(answer), "_member", None) != member._member
        ):
            return
    raise member._make_unsupported_error("a member", " that is not distinguished from others")
