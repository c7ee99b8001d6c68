"""Convert an environment's output to plain values, so that nothing in it can fail later in an episode.

Text can be encoded, rewards are finite numbers, and the entries of `info` that an episode reads have their types.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from roll.envs.base import Started, Stepped, shown
from roll.envs.protocol import ProtocolError, brief, checked_start, checked_step
from roll.errors import DataError
from roll.types import Content, content_of, media_in, with_texts

__all__ = ["check_consumed", "plain", "sanitize_reset", "sanitize_step"]

LONGEST_STATE = 4_096
"""Most characters of a state's name. A longer one is replaced by its start and a digest, since every turn stores it."""


def plain(text: str) -> str:
    """Return the text with `?` for unpaired surrogates, which tokenizers, files and pipes reject."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def check_consumed(content: Content, environment: str, pipeline: str = "") -> None:
    """Check that an observation is text, the only kind that pipelines support.

    Args:
        content: The observation, or a tool's result.
        environment: The environment's name.
        pipeline: The pipeline that uses the environment, if known.

    Raises:
        DataError: The observation has an image, audio or video.
    """
    for part in media_in(content):
        by = f"pipeline '{pipeline}'" if pipeline else "episodes"
        raise DataError(
            f"environment '{environment}' shows a part of kind '{part.kind}': pictures, sound and films are not "
            f"consumed by {by} yet. Describe what is seen as text."
        )


def sanitize_reset(found: Any) -> Started:
    """Return the first observation and information as plain values.

    Raises:
        ProtocolError: The environment broke a rule.
        Exception: Any exception that the environment's values raise when they are read.
    """
    observation, info = checked_start(found)
    return with_texts(shown(observation, info), plain), _told(info)


def sanitize_step(found: Any) -> Stepped:
    """Return the result of a step as plain values.

    Raises:
        ProtocolError: See `sanitize_reset`.
        Exception: See `sanitize_reset`.
    """
    observation, reward, ended, cut_off, info = checked_step(found)
    return with_texts(shown(observation, info), plain), reward, ended, cut_off, _told(info)


def _told(info: Mapping[str, Any]) -> dict[str, Any]:
    told = dict(info)
    if "state" in told:
        told["state"] = _named(str(told["state"]))
    if "use_tool" in told:
        told["use_tool"] = bool(told["use_tool"])
    for name in ("tools", "tool_calls", "tool_results"):
        entries = told.get(name) or ()
        if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, dict) for entry in entries):
            raise ProtocolError(f"`info['{name}']` is a list of objects", brief(entries), "return a list of `{…}`")
        if name in told:
            told[name] = list(entries)
    if results := told.get("tool_results"):
        names = ("tool_call_id", "name")
        said = all("content" in one and all(isinstance(one.get(name), str | None) for name in names) for one in results)
        if not said:
            rule = "each of `info['tool_results']` has a content, and texts as `tool_call_id` and `name`, if any"
            raise ProtocolError(rule, brief(results), "return a list of `{'content': …}`")
        told["tool_results"] = [
            {"content": _content(one["content"]), **{name: plain(one[name]) for name in names if one.get(name)}}
            for one in results
        ]
    return told


def _content(value: Any) -> Content:
    """Return a tool's result; a value that is neither text nor parts is converted to text."""
    try:
        return with_texts(content_of(value), plain)
    except ValueError:
        return plain(str(value))


def _named(state: str) -> str:
    if len(state) > LONGEST_STATE:
        state = f"{state[:64]}… {hashlib.blake2b(state.encode(errors='replace'), digest_size=16).hexdigest()}"
    return plain(state)
