"""What an environment said, as plain values: whatever it is made of, nothing of it can fail later, in an episode.

Text can be encoded, rewards are finite numbers, and what `info` says to an episode has the types that it must have.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from roll.envs.base import Started, Stepped, shown

__all__ = ["heard_reset", "heard_step", "plain"]

LONGEST_STATE = 4_096
"""Characters. What is longer is named by its beginning and a digest, since it is kept for every turn."""


def plain(text: str) -> str:
    """The text, with `?` for halves of surrogate pairs: no tokenizer, file or pipe takes these."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def heard_reset(found: Any) -> Started:
    """First observation and information.

    Raises:
        ValueError: the environment broke the protocol; the message may name what.
        Exception: whatever its values raise when they are looked at.
    """
    observation, info = _parts(found, 2)
    return plain(shown(observation, info)), _told(info)


def heard_step(found: Any) -> Stepped:
    """What became of an action.

    Raises:
        ValueError: see `heard_reset`.
        Exception: as well.
    """
    observation, given, ended, cut_off, info = _parts(found, 5)
    reward = float(given)
    if not math.isfinite(reward):
        raise ValueError(f"the reward {reward} is no finite number")
    return plain(shown(observation, info)), reward, bool(ended), bool(cut_off), _told(info)


def _parts(found: Any, count: int) -> tuple[Any, ...]:
    if not isinstance(found, tuple) or len(found) != count:
        raise ValueError
    if not isinstance(found[0], str) or not isinstance(found[-1], dict):
        raise ValueError
    return found


def _told(info: Mapping[str, Any]) -> dict[str, Any]:
    told = dict(info)
    if "state" in told:
        told["state"] = _named(str(told["state"]))
    if "use_tool" in told:
        told["use_tool"] = bool(told["use_tool"])
    for name in ("tools", "tool_calls", "tool_results"):
        entries = told.get(name) or ()
        if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"info['{name}'] is no list of objects")
        if name in told:
            told[name] = list(entries)
    if results := told.get("tool_results"):
        if not all("content" in result for result in results):
            raise ValueError("info['tool_results'] is no list of {'content': …, …}")
        told["tool_results"] = [{**result, "content": plain(str(result["content"]))} for result in results]
    return told


def _named(state: str) -> str:
    if len(state) > LONGEST_STATE:
        state = f"{state[:64]}… {hashlib.blake2b(state.encode(errors='replace'), digest_size=16).hexdigest()}"
    return plain(state)
