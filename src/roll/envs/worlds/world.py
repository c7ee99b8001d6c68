"""What the environments of this folder share: another one of the same kind, and an answer in what a model wrote."""

from __future__ import annotations

import copy
from random import Random
from typing import Any, Self, TypeAlias

__all__ = ["FORMAT_ERROR", "Begun", "Stepped", "World", "final_answer", "same_text"]

Begun: TypeAlias = tuple[str, dict[str, Any]]
Stepped: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]

FORMAT_ERROR = -0.1
"""Reward of an action that cannot be read, as in GEM's games; 1 is success, 0 anything else."""
_LONGEST_ANSWER = 1_000


class World:
    """Seeded and alone: no environment here reads a clock, a file or the process's random numbers.

    Args:
        options: what it was made with, for `spawn`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.random = Random(0)

    def begin(self, seed: int | None) -> None:
        """A new episode's random numbers; without a seed, some that follow from the episodes before."""
        self.random = Random(self.random.getrandbits(64) if seed is None else seed)

    @property
    def unwrapped(self) -> Self:
        """Itself."""
        return self

    def spawn(self, same_state: bool = False, **options: Any) -> Self:
        """Another one, where wanted with other options, or in this one's state."""
        if same_state and not options:
            return copy.deepcopy(self)
        return type(self)(**{**self.options, **options})


def final_answer(text: str) -> str | None:
    r"""What the last `\boxed{…}` or `<answer>…</answer>` holds, without surrounding white space; `None` without one.

    One pass over at most a thousand characters, whatever is in them.
    """
    box, tag = text.rfind("\\boxed{"), text.rfind("<answer>")
    if max(box, tag) < 0:
        return None
    if tag > box:
        start = tag + len("<answer>")
        return text[start : start + _LONGEST_ANSWER].partition("</answer>")[0].strip()
    start, depth = box + len("\\boxed{"), 1
    for position in range(start, min(len(text), start + _LONGEST_ANSWER)):
        depth += (text[position] == "{") - (text[position] == "}")
        if not depth:
            return text[start:position].strip()
    return None


def same_text(one: str, other: str) -> bool:
    """Equal but for case, articles, punctuation and white space, as question answering is scored."""
    return _plain(one) == _plain(other)


def _plain(text: str) -> list[str]:
    words = "".join(char if char.isalnum() else " " for char in text.casefold()).split()
    return [word for word in words if word not in ("a", "an", "the")]
