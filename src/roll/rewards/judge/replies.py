"""Parse a judge's reply, including invalid JSON with common mistakes of models."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roll.data.reasoning import extract_answer

__all__ = ["Preference", "ReplyError", "parse_preference", "parse_score", "parse_winner"]

MAX_REPLY_LENGTH = 50_000
"""Maximum number of characters of a reply that are parsed, from its end, because the controller's process parses it."""
MAX_OBJECTS = 20
"""Maximum number of objects of a reply that are tried, from the last one."""
_TRAILING_COMMA_PATTERN = re.compile(r",\s*([}\]])")
_OBJECT_START_PATTERN = re.compile(r"""\{\s{0,64}["']""")
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """A judge's verdict on two answers."""

    winner: str
    """`A`, `B` or `tie`."""
    points: float
    """Points of answer A: 1 for a win, 0.5 for a tie, 0 for a loss; the expected value if the judge returns
    probabilities.
    """


class ReplyError(ValueError):
    """A reply cannot be parsed. The message is sent to the judge."""


def _find_objects(text: str) -> Iterator[str]:
    """Yield every `{…}` with balanced braces outside of strings, from the last to the first.

    Raises:
        ReplyError: The text ends inside an object, because the reply was truncated.
    """
    objects: list[str] = []
    depth, begin, in_string, escaped = 0, 0, False, False
    for position, character in enumerate(text):
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"' and depth:
            in_string = True
        elif character == "{":
            begin = position if depth == 0 else begin
            depth += 1
        elif character == "}" and depth:
            depth -= 1
            if depth == 0:
                objects.append(text[begin : position + 1])
    if depth and _OBJECT_START_PATTERN.match(text, begin):
        raise ReplyError("Your reply ends inside its JSON object.")
    yield from reversed(objects)


def _iter_repaired(text: str) -> Iterator[str]:
    yield text
    text = _TRAILING_COMMA_PATTERN.sub(r"\1", text)
    yield text
    for name, literal in _PYTHON_LITERALS.items():
        text = re.sub(rf"(?<=[:,\s]){name}(?=[,\s}}])", literal, text)
    yield text
    yield re.sub(r"(?<=[{,:\s])'|'(?=[},:\s])", '"', text)


def _parse_complete_reply(reply: str) -> dict[str, Any] | None:
    """Parse the reply as a single JSON object, with or without a code fence; return `None` if it is anything else."""
    text = reply[: MAX_REPLY_LENGTH + 1].strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _parse(reply: str) -> dict[str, Any]:
    if (whole := _parse_complete_reply(reply)) is not None:
        return whole
    answer = extract_answer(reply)
    if answer is None:
        raise ReplyError("Your reply ends inside its reasoning.")
    text = answer[-MAX_REPLY_LENGTH:]
    for candidate in itertools.islice(_find_objects(text), MAX_OBJECTS):
        for form in _iter_repaired(candidate):
            try:
                value = json.loads(form, strict=False)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                return value
    raise ReplyError("Your reply contains no JSON object.")


def parse_score(reply: str, lowest: int, highest: int) -> float:
    """Return the score, scaled to the range from 0 to 1.

    Raises:
        ReplyError: The reply has no score, or the score is not on the scale.
    """
    value = _parse(reply).get("score")
    if isinstance(value, str):
        number = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*(?:/\s*(\d+)\s*)?", value)
        if number and number[2] and number[2] != str(highest):
            raise ReplyError(f"Your score {value} is not on the scale from {lowest} to {highest}.")
        value = float(number[1]) if number else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ReplyError("Your reply has no number in the field `score`.")
    if not lowest <= value <= highest:
        raise ReplyError(f"Your score {value} is not between {lowest} and {highest}.")
    return (value - lowest) / (highest - lowest)


def parse_winner(reply: str) -> str:
    """Return the winner that the reply names: `A`, `B` or `tie`.

    Raises:
        ReplyError: The reply names no valid winner.
    """
    value = str(_parse(reply).get("winner", "")).strip().strip('."').casefold().removeprefix("answer ")
    named = {"a": "A", "b": "B", "tie": "tie", "equal": "tie", "both": "tie", "draw": "tie", "neither": "tie"}
    if value not in named:
        raise ReplyError('The field `winner` of your reply must be "A", "B" or "tie".')
    return named[value]


def parse_preference(reply: str) -> Preference:
    """Return the winner that the reply names, and the points of answer A: 1 for a win, 0.5 for a tie, 0 for a loss.

    If the reply has probabilities, the points are the expected value.

    Raises:
        ReplyError: The reply names no winner.
    """
    winner = parse_winner(reply)
    weights = _parse(reply).get("probabilities")
    named = [weights.get(name) for name in ("A", "tie", "B")] if isinstance(weights, dict) else []
    shares = [float(weight) for weight in named if isinstance(weight, int | float) and 0 <= weight <= 1]
    if len(shares) == 3 and abs(sum(shares) - 1) < 1e-3:
        return Preference(winner=winner, points=shares[0] + shares[1] / 2)
    return Preference(winner=winner, points={"A": 1.0, "tie": 0.5, "B": 0.0}[winner])
