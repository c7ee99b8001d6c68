"""Base class of this folder's environments, and extraction of the answer from a model's text."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Self

__all__ = ["FORMAT_ERROR", "World", "chosen", "final_answer", "same_text"]

FORMAT_ERROR = -0.1
"""Reward of an action that cannot be parsed, as in GEM's games; 1 is success, 0 anything else."""


@dataclass(eq=False)
class World:
    """A seeded environment: none here reads a clock, a file or the process-wide random numbers.

    Each field is an argument, as in the games.
    """

    random: Random = field(default_factory=lambda: Random(0), init=False, repr=False)
    chance: Random = field(default_factory=lambda: Random(0), init=False, repr=False)
    """Generator for random actions only, so that drawing one changes no episode."""

    def begin(self, seed: int | None) -> None:
        """Seed a new episode's generators; without a seed, derive one from the episodes before."""
        seed = self.random.getrandbits(64) if seed is None else seed
        self.random, self.chance = Random(seed), Random(f"actions {seed}")

    @property
    def unwrapped(self) -> Self:
        """The environment itself."""
        return self

    def spawn(self, same_state: bool = False, **options: Any) -> Self:
        """Return another world, with other options or in this one's state.

        Raises:
            ValueError: `same_state` and options are both given.
        """
        if not same_state:
            return replace(self, **options)
        if options:
            raise ValueError("a copy with the same state has the same options: leave them out")
        return copy.deepcopy(self)


def chosen(what: str, names: Collection[str] | None, known: Collection[str]) -> tuple[str, ...]:
    """Return the names in an argument, or all known names if it is `None`.

    Raises:
        ValueError: A name is unknown.
    """
    if unknown := set(names or ()) - set(known):
        raise ValueError(f"{what} {sorted(unknown)} are unknown: there are {list(known)}")
    return tuple(names or known)


def final_answer(text: str, longest: int = 1_000) -> str | None:
    r"""Return the content of the last `\boxed{…}` or `<answer>…</answer>`, stripped; `None` if the text has neither.

    The search is one pass over at most `longest` characters, whatever the text holds.
    """
    box, tag = text.rfind("\\boxed{"), text.rfind("<answer>")
    if max(box, tag) < 0:
        return None
    if tag > box:
        start = tag + len("<answer>")
        return text[start : start + longest].partition("</answer>")[0].strip()
    start, depth = box + len("\\boxed{"), 1
    for position in range(start, min(len(text), start + longest)):
        depth += (text[position] == "{") - (text[position] == "}")
        if not depth:
            return text[start:position].strip()
    return None


def same_text(one: str, other: str) -> bool:
    """Return whether texts are equal without case, articles, punctuation and whitespace, as in question answering."""
    return _plain(one) == _plain(other)


def _plain(text: str) -> list[str]:
    words = "".join(char if char.isalnum() else " " for char in text.casefold()).split()
    return [word for word in words if word not in ("a", "an", "the")]
