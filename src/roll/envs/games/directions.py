"""Base class of games whose moves are up, down, left and right."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar

from roll.envs.games.game import Game

__all__ = ["DirectionGame"]


class DirectionGame(Game[str]):
    """A game whose moves are four directions."""

    steps: ClassVar[Mapping[str, tuple[int, int]]] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
    """Change of row and column by each move."""

    def _form(self) -> str:
        return "Write up, down, left or right, for example \\boxed{up}."

    def _view(self) -> str:
        return "\n".join([*(" ".join(row) for row in self._state().split("/")), "Enter your move."])

    def _read(self, answer: str) -> str | None:
        return answer.lower() if answer.lower() in self.steps else None

    def _some_move(self, rng: Random) -> str:
        return rng.choice(list(self.steps))
