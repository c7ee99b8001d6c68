"""Base class of games whose moves are up, down, left and right."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar

from roll.envs.games.game import Game

__all__ = ["DirectionGame"]


class DirectionGame(Game[str]):
    """A game whose moves are the directions up, down, left and right."""

    steps: ClassVar[Mapping[str, tuple[int, int]]] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
    """Change of row and column by each move."""

    def _describe_format(self) -> str:
        return "Write up, down, left or right, for example \\boxed{up}."

    def _render_view(self) -> str:
        return "\n".join([*(" ".join(row) for row in self._encode_state().split("/")), "Enter your move."])

    def _parse_move(self, answer: str) -> str | None:
        return answer.lower() if answer.lower() in self.steps else None

    def _sample_move(self, rng: Random) -> str:
        return rng.choice(list(self.steps))
