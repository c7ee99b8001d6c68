"""The protocol's rules for the results of `reset` and `step`, the same for checks, play and training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from roll.envs.base import Started, Stepped
from roll.errors import InfraError
from roll.types import Content, content_of

__all__ = ["RESET_RULE", "STEP_RULE", "ProtocolError", "brief", "checked_start", "checked_step"]

RESET_RULE = "`reset(seed)` gives an observation and information: `(str, dict)`"
STEP_RULE = "`step(action)` gives `(observation, reward, terminated, truncated, info)`"


class ProtocolError(InfraError):
    """An environment's result breaks the protocol.

    Args:
        rule: The rule, which holds for every environment.
        found: What this environment did.
        remedy: How to fix it.
    """

    def __init__(self, rule: str, found: str, remedy: str) -> None:
        super().__init__(rule, found, remedy)
        self.rule, self.found, self.remedy = rule, found, remedy

    def __str__(self) -> str:
        return f"{self.rule}. Found: {self.found}. Fix: {self.remedy}"


def checked_start(found: Any) -> Started:
    """Return the result of `reset`, checked.

    Raises:
        ProtocolError: The result breaks a rule.
    """
    if not (isinstance(found, tuple) and len(found) == 2):
        raise ProtocolError(RESET_RULE, brief(found), "return `observation, info`")
    observation, info = found
    for problem in _problems(RESET_RULE, info):
        raise problem
    return _seen(RESET_RULE, observation), info


def checked_step(found: Any) -> Stepped:
    """Return the result of `step`, checked, with Python's own numbers; 0 and 1 are accepted as flags.

    Raises:
        ProtocolError: The result breaks a rule.
    """
    if not (isinstance(found, tuple) and len(found) == 5):
        remedy = "return five values: an old interface's `done` becomes `terminated`, and False for `truncated`"
        raise ProtocolError(STEP_RULE, brief(found), remedy)
    observation, reward, terminated, truncated, info = found
    observation = _seen(STEP_RULE, observation)
    for problem in _problems(STEP_RULE, info):
        raise problem
    if not _is_finite(reward):
        raise ProtocolError("a reward is a finite number", f"the reward {_typed(reward)}", "return a float")
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if type(value).__name__ not in ("bool", "bool_", "int") or value not in (0, 1):  # NumPy's types, too
            raise ProtocolError(f"`{name}` is True or False", _typed(value), f"return `bool({name})`")
    return observation, float(reward), bool(terminated), bool(truncated), info


def _seen(rule: str, observation: Any) -> Content:
    """Return an observation: a text, or parts, which other processes send as `to_dict` writes them."""
    try:
        return content_of(observation)
    except ValueError as error:
        remedy = "describe what is seen as text, or give a tuple of parts (`roll.types.TextPart`, `ImagePart`, …)"
        why = f" ({error})" if isinstance(observation, list | tuple) else ""
        raise ProtocolError(rule, f"the observation {_typed(observation)}{why}", remedy) from None


def _problems(rule: str, info: Any) -> Iterator[ProtocolError]:
    if not isinstance(info, dict):
        yield ProtocolError(rule, f"the information {_typed(info)}", "return `{}` if there is none")


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _typed(value: Any) -> str:
    return f"{brief(value)} of type {type(value).__name__}"


def brief(value: Any) -> str:
    """Return the start of a value's `repr`, for messages about environments."""
    try:
        text = repr(value)
    except Exception:  # a user's class may raise in `repr`, or the value is nested too deeply
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 160 else f"{text[:150]}… ({len(text)} characters)"
