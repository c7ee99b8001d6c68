"""Base class of the environments in this folder, and functions that extract an answer from a model's text."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Self

__all__ = ["FORMAT_ERROR_REWARD", "World", "check_names", "extract_answer", "is_same_text"]

FORMAT_ERROR_REWARD = -0.1
"""Reward of an action that cannot be parsed, as in GEM's games; 1 is success, 0 anything else."""


@dataclass(eq=False)
class World:
    """An environment whose episodes depend only on the seed, not on a clock, files or the process-wide random state.

    Each field of a subclass is a constructor argument.
    """

    random: Random = field(default_factory=lambda: Random(0), init=False, repr=False)
    action_random: Random = field(default_factory=lambda: Random(0), init=False, repr=False)
    """Separate generator for random actions, so that sampling an action does not change an episode."""

    def begin(self, seed: int | None) -> None:
        """Seed a new episode's generators; without a seed, derive one from the previous episodes."""
        seed = self.random.getrandbits(64) if seed is None else seed
        self.random, self.action_random = Random(seed), Random(f"actions {seed}")

    @property
    def unwrapped(self) -> Self:
        """The environment itself."""
        return self

    def spawn(self, same_state: bool = False, **options: Any) -> Self:
        """Return a new environment with the same options, overridden by `options`; with `same_state`, copy the current
        episode too.

        Raises:
            ValueError: `same_state` and options are both given.
        """
        if not same_state:
            return replace(self, **options)
        if options:
            raise ValueError("same_state and options cannot be combined: remove one of them")
        return copy.deepcopy(self)


def check_names(kind: str, names: Collection[str] | None, known: Collection[str]) -> tuple[str, ...]:
    """Return `names`, or all known names if `names` is `None` or empty.

    Raises:
        ValueError: A name is unknown.
    """
    if unknown := set(names or ()) - set(known):
        raise ValueError(f"unknown {kind}: {sorted(unknown)}. Known: {list(known)}")
    return tuple(names or known)


def extract_answer(text: str, max_length: int = 1_000) -> str | None:
    r"""Return the content of the last `\boxed{…}` or `<answer>…</answer>`, stripped.

    Return `None` if the text has neither, or if the box is not closed within `max_length` characters. The content of
    `<answer>` is truncated after `max_length` characters.
    """
    box, tag = text.rfind("\\boxed{"), text.rfind("<answer>")
    if max(box, tag) < 0:
        return None
    if tag > box:
        start = tag + len("<answer>")
        return text[start : start + max_length].partition("</answer>")[0].strip()
    start, depth = box + len("\\boxed{"), 1
    for position in range(start, min(len(text), start + max_length)):
        depth += (text[position] == "{") - (text[position] == "}")
        if not depth:
            return text[start:position].strip()
    return None


def is_same_text(first: str, second: str) -> bool:
    """Return whether strings are equal, ignoring case, articles, punctuation and whitespace, as usual for QA."""
    return _split_words(first) == _split_words(second)


def _split_words(text: str) -> list[str]:
    words = "".join(char if char.isalnum() else " " for char in text.casefold()).split()
    return [word for word in words if word not in ("a", "an", "the")]
