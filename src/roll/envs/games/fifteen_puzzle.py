"""Slide tiles into order."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from roll.envs.games.directions import DirectionGame
from roll.envs.games.game import Outcome, at_least

__all__ = ["FifteenPuzzle"]

_DRAWN = [(2, 10), (3, 20), (4, 50)]
"""Rows and turns of the variant that draws them."""

_OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


@dataclass(kw_only=True, eq=False)
class FifteenPuzzle(DirectionGame):
    """Numbered tiles with a gap, `num_rows` by `num_rows`, scrambled by at most `max_turns` moves, so that it can be
    solved.

    The last turn gives the share of tiles that are in place.
    """

    steps = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}  # noqa: RUF012  (see the base)
    """Position, relative to the gap, of the tile that a move slides into it."""

    num_rows: int | None = 2

    def _check(self) -> None:
        at_least(2, num_rows=self.num_rows)

    def _begin(self, rng: Random) -> int:
        rows, turns = self.num_rows, self.max_turns
        if rows is None or turns is None:
            rows, turns = rng.choice(_DRAWN)
        self._size = rows
        self._goal = [*range(1, rows * rows), 0]
        self._tiles = list(self._goal)
        last = ""
        for _ in range(rng.randint(max(1, turns // 2), turns)):
            last = rng.choice(
                [move for move in self.steps if move != _OPPOSITE.get(last) and self._source(move) is not None]
            )
            self._slide(last)
        if self._tiles == self._goal:
            self._slide("down")
        return turns

    def _rules(self) -> str:
        return (
            f"You are playing the {self._size**2 - 1}-puzzle. Slide tiles into the gap, shown as __, until they stand "
            f"in the order 1 to {self._size**2 - 1}, row by row, with the gap at the bottom right. You have "
            f"{self._limit} turns. A move names where a tile moves: 'up' slides the tile below the gap up, 'left' the "
            f"tile to the right of the gap left, and so on. {self._form()}"
        )

    def _view(self) -> str:
        rows = [self._tiles[start : start + self._size] for start in range(0, self._size**2, self._size)]
        lines = [" ".join(f"{tile:2}" if tile else "__" for tile in row) for row in rows]
        return "\n".join([*lines, "Enter your move."])

    def _state(self) -> str:
        return " ".join(map(str, self._tiles))

    def _play(self, move: str) -> Outcome:
        if self._source(move) is None:
            return Outcome(text=f"no tile can move {move}: the gap is at that edge.", valid=False)
        self._slide(move)
        if self._tiles == self._goal:
            return Outcome(text="You solved the puzzle!", reward=1.0, over=True)
        return Outcome(text=f"you moved a tile {move}.")

    def _source(self, move: str) -> int | None:
        """Return the position of the tile that a move slides into the gap."""
        row, col = divmod(self._tiles.index(0), self._size)
        row, col = row + self.steps[move][0], col + self.steps[move][1]
        return row * self._size + col if 0 <= row < self._size and 0 <= col < self._size else None

    def _slide(self, move: str) -> None:
        gap, source = self._tiles.index(0), self._source(move)
        assert source is not None
        self._tiles[gap], self._tiles[source] = self._tiles[source], 0

    def _at_the_end(self, outcome: Outcome, reward: float) -> float:
        return sum(a == b for a, b in zip(self._tiles, self._goal, strict=True)) / self._size**2
