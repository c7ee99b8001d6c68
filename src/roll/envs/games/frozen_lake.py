"""Cross a frozen lake with holes."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from roll.envs.games.directions import DirectionGame
from roll.envs.games.game import Outcome, check_minimum

__all__ = ["FrozenLake"]

_Cell = tuple[int, int]

_SAMPLED_VARIANTS = [(4, 15), (6, 25), (8, 40)]
"""Possible sizes and turns if `size` is None."""


@dataclass(kw_only=True, eq=False)
class FrozenLake(DirectionGame):
    """A walk on `size` by `size` cells of ice, from the top left to the goal at the bottom right. Holes end the game.

    The goal can be reached within the maximum number of turns. The rules are those of `FrozenLake` in Gymnasium.

    Args:
        holes: Fraction of cells with a hole, below 1.
        slippery: Whether the ice is slippery: a move goes in its own direction, to the left or to the right of it,
            with probability 1/3 each.
    """

    steps = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}  # noqa: RUF012  (see the base)
    """Change of row and column by each move, in clockwise order, so that neighbors are the sideways moves."""

    size: int | None = 4
    holes: float = 0.25
    slippery: bool = False

    def _check_arguments(self) -> None:
        check_minimum(2, size=self.size)
        if not 0 <= self.holes < 1:
            raise ValueError(f"holes must be in [0, 1), got {self.holes}")
        if self.size and self.max_turns and self.max_turns < 2 * self.size - 2:
            raise ValueError(
                f"max_turns must be at least {2 * self.size - 2}, the length of the shortest path, got {self.max_turns}"
            )

    def _begin_episode(self, rng: Random) -> int:
        size, turns = self.size, self.max_turns
        if size is None or turns is None:
            size, turns = rng.choice(_SAMPLED_VARIANTS)
        self._size, self._goal = size, (size - 1, size - 1)
        way: list[_Cell] = [(0, 0)]
        steps = rng.sample([(1, 0), (0, 1)] * (size - 1), 2 * size - 2)
        for down, right in steps:  # keep one path without holes, so that the goal can be reached
            way.append((way[-1][0] + down, way[-1][1] + right))
        cells = [(row, col) for row in range(size) for col in range(size)]
        self._holes = {cell for cell in cells if rng.random() < self.holes} - set(way)
        self._player: _Cell = (0, 0)
        return turns

    def _describe_rules(self) -> str:
        ice = (
            "The ice is slippery: a move goes where you mean it a third of the time, and else to the left or right of "
            "it."
            if self.slippery
            else "A move goes where you mean it."
        )
        return (
            f"You are playing Frozen Lake. Reach the goal within {self._limit} turns and fall into no hole. 'P' is "
            f"you, 'G' the goal, 'O' a hole, and '_' ice. {ice} {self._describe_format()}"
        )

    def _encode_state(self) -> str:
        return "/".join(
            "".join(self._render_cell((row, col)) for col in range(self._size)) for row in range(self._size)
        )

    def _render_cell(self, cell: _Cell) -> str:
        if cell == self._player:
            return "P"
        return "O" if cell in self._holes else "G" if cell == self._goal else "_"

    def _make_move(self, move: str) -> Outcome:
        names = list(self.steps)
        turn = self._rng.choice((-1, 0, 1)) if self.slippery else 0
        gone = names[(names.index(move) + turn) % 4]
        row, col = self._player[0] + self.steps[gone][0], self._player[1] + self.steps[gone][1]
        if not (0 <= row < self._size and 0 <= col < self._size):
            return Outcome(text=f"you moved {gone} against the edge.", valid=turn != 0)
        self._player = row, col
        if self._player == self._goal:
            return Outcome(text="You reached the goal!", reward=1.0, over=True)
        if self._player in self._holes:
            return Outcome(text="You fell into a hole. The game is lost.", over=True)
        return Outcome(text=f"you moved {gone}.")
