"""Converts an environment's output to plain values, which cannot fail later in an episode.

In the result, text can be encoded, rewards are finite numbers, and the entries of `info` that an episode reads have the
right types.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from roll.envs.base import ResetResult, StepResult, format_observation
from roll.envs.images import encode_images
from roll.envs.protocol import ProtocolError, check_reset_result, check_step_result, shorten_repr
from roll.errors import DataError
from roll.types import Content, list_media, map_text, parse_content

__all__ = ["check_media_kinds", "replace_surrogates", "sanitize_reset", "sanitize_step"]

MAX_STATE_LENGTH = 4_096
"""Maximum length of `info["state"]`. A longer one is replaced by its start and a digest, since every turn stores it."""


def replace_surrogates(text: str) -> str:
    """Return the text with `?` for unpaired surrogates, which tokenizers, files and pipes reject."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def check_media_kinds(content: Content, environment: str, *, reads_images: bool) -> None:
    """Check that the model can read an observation.

    Args:
        content: The observation, or a tool's result.
        environment: The environment's name.
        reads_images: Whether the model reads images.

    Raises:
        DataError: The observation has audio or video, or an image that the model cannot read.
    """
    for part in list_media(content):
        if part.kind != "image" or not reads_images:
            readable = "text and images" if reads_images else "text"
            raise DataError(
                f"environment '{environment}' returned a part of type '{part.kind}', but this model supports only "
                f"{readable}: describe the observation as text, or choose another model."
            )


def sanitize_reset(result: Any) -> ResetResult:
    """Return the first observation and `info` as plain values.

    Raises:
        ProtocolError: The environment broke a rule.
        Exception: Any exception that the environment's values raise when they are read.
    """
    observation, info = check_reset_result(result)
    return map_text(format_observation(observation, info), replace_surrogates), _sanitize_info(info)


def sanitize_step(result: Any) -> StepResult:
    """Return the result of a step as plain values.

    Raises:
        ProtocolError: See `sanitize_reset`.
        Exception: See `sanitize_reset`.
    """
    observation, reward, ended, cut_off, info = check_step_result(result)
    return (
        map_text(format_observation(observation, info), replace_surrogates),
        reward,
        ended,
        cut_off,
        _sanitize_info(info),
    )


def _sanitize_info(info: Mapping[str, Any]) -> dict[str, Any]:
    sanitized = dict(info)
    if "state" in sanitized:
        sanitized["state"] = _shorten_state(str(sanitized["state"]))
    if "use_tool" in sanitized:
        sanitized["use_tool"] = bool(sanitized["use_tool"])
    for name in ("tools", "tool_calls", "tool_results"):
        entries = sanitized.get(name) or ()
        if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, dict) for entry in entries):
            raise ProtocolError(
                f"`info['{name}']` is a list of objects", shorten_repr(entries), "return a list of `{…}`"
            )
        if name in sanitized:
            sanitized[name] = list(entries)
    if results := sanitized.get("tool_results"):
        names = ("tool_call_id", "name")
        are_valid = all(
            "content" in one and all(isinstance(one.get(name), str | None) for name in names) for one in results
        )
        if not are_valid:
            rule = "each of `info['tool_results']` has `content`; `tool_call_id` and `name`, if given, are strings"
            raise ProtocolError(rule, shorten_repr(results), "return a list of `{'content': …}`")
        sanitized["tool_results"] = [
            {
                "content": _sanitize_content(one["content"]),
                **{name: replace_surrogates(one[name]) for name in names if one.get(name)},
            }
            for one in results
        ]
    return sanitized


def _sanitize_content(value: Any) -> Content:
    """Return a tool's result as content; a value that is neither a string nor parts is converted to a string."""
    try:
        return map_text(parse_content(encode_images(value)), replace_surrogates)
    except ValueError:
        return replace_surrogates(str(value))


def _shorten_state(state: str) -> str:
    if len(state) > MAX_STATE_LENGTH:
        state = f"{state[:64]}… {hashlib.blake2b(state.encode(errors='replace'), digest_size=16).hexdigest()}"
    return replace_surrogates(state)
