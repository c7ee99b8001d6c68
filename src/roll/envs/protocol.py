"""Checks of the results of `reset` and `step`, the same for `roll env check`, playing and training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from roll.envs.base import ResetResult, StepResult
from roll.envs.images import encode_images
from roll.errors import DataError, InfraError
from roll.media import decode_image
from roll.types import Content, ImageData, parse_content

__all__ = [
    "RESET_RULE",
    "STEP_CONTRACT",
    "ProtocolError",
    "check_images",
    "check_reset_result",
    "check_step_result",
    "shorten_repr",
]

RESET_RULE = "`reset(seed)` returns an observation and information: `(observation, dict)`"
STEP_CONTRACT = "`step(action)` returns `(observation, reward, terminated, truncated, info)`"


class ProtocolError(InfraError):
    """An environment's result violates the protocol.

    Args:
        rule: The rule, which holds for every environment.
        behavior: The behavior of this environment that breaks the rule.
        remedy: How to fix the environment.
    """

    def __init__(self, rule: str, behavior: str, remedy: str) -> None:
        super().__init__(rule, behavior, remedy)
        self.rule, self.behavior, self.remedy = rule, behavior, remedy

    def __str__(self) -> str:
        return f"{self.rule}. Found: {self.behavior}. Fix: {self.remedy}"


def check_reset_result(result: Any) -> ResetResult:
    """Check the result of `reset`, and return it.

    Raises:
        ProtocolError: The result breaks a rule.
    """
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ProtocolError(RESET_RULE, shorten_repr(result), "return `observation, info`")
    observation, info = result
    for problem in _find_problems(RESET_RULE, info):
        raise problem
    return _check_observation(RESET_RULE, observation), info


def check_step_result(result: Any) -> StepResult:
    """Check the result of `step`, and convert it to Python's `float` and `bool`; flags may also be 0 or 1.

    Raises:
        ProtocolError: The result breaks a rule.
    """
    if not (isinstance(result, tuple) and len(result) == 5):
        remedy = "return five values: with an old interface, `done` as `terminated`, and False as `truncated`"
        raise ProtocolError(STEP_CONTRACT, shorten_repr(result), remedy)
    observation, reward, terminated, truncated, info = result
    observation = _check_observation(STEP_CONTRACT, observation)
    for problem in _find_problems(STEP_CONTRACT, info):
        raise problem
    if not _is_finite(reward):
        raise ProtocolError(
            "a reward must be a finite number", f"the reward {_describe_value(reward)}", "return a float"
        )
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if type(value).__name__ not in ("bool", "bool_", "int") or value not in (0, 1):  # NumPy's types, too
            raise ProtocolError(f"`{name}` must be True or False", _describe_value(value), f"return `bool({name})`")
    return observation, float(reward), bool(terminated), bool(truncated), info


def _check_observation(rule: str, observation: Any) -> Content:
    """Convert an observation to content: a string or parts, which may be in the form of `to_dict`.

    Raises:
        ProtocolError: The observation is not valid content; the error contains `rule`.
    """
    try:
        return parse_content(encode_images(observation))
    except (ValueError, DataError) as error:
        remedy = "return a string, an image (Pillow or a uint8 array), or a tuple of strings and images"
        if isinstance(error, DataError):  # the pixels of an image would say less than the error
            behavior = f"an observation with an image that cannot be encoded: {str(error).removesuffix('.')}"
        else:
            why = f" ({error})" if isinstance(observation, list | tuple) else ""
            behavior = f"the observation {_describe_value(observation)}{why}"
        raise ProtocolError(rule, behavior, remedy) from None


def check_images(rule: str, observation: Content) -> None:
    """Check that the images of an observation can be decoded, as they are in a run.

    Raises:
        ProtocolError: An image cannot be decoded; the error contains `rule`.
    """
    for part in () if isinstance(observation, str) else observation:
        if isinstance(part, ImageData):
            try:
                decode_image(part.data, "the image")
            except DataError as error:
                behavior = f"an observation with an image that cannot be decoded: {str(error).removesuffix('.')}"
                raise ProtocolError(rule, behavior, "return a Pillow image or a uint8 array, not bytes") from None


def _find_problems(rule: str, info: Any) -> Iterator[ProtocolError]:
    if not isinstance(info, dict):
        yield ProtocolError(rule, f"the information {_describe_value(info)}", "return `{}` if there is none")


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _describe_value(value: Any) -> str:
    return f"{shorten_repr(value)} of type {type(value).__name__}"


def shorten_repr(value: Any) -> str:
    """Return the start of a value's `repr`, for messages about environments."""
    try:
        text = repr(value)
    except Exception:  # a user's class may raise in `repr`, or the value is nested too deeply
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 160 else f"{text[:150]}… ({len(text)} characters)"
