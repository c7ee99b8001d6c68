"""Slide tiles into order."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from roll.envs.games.directions import DirectionGame
from roll.envs.games.game import Outcome, check_minimum

__all__ = ["FifteenPuzzle"]

_SAMPLED_VARIANTS = [(2, 10), (3, 20), (4, 50)]
"""Possible numbers of rows and turns if `num_rows` is None."""

_OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


@dataclass(kw_only=True, eq=False)
class FifteenPuzzle(DirectionGame):
    """A sliding puzzle of `num_rows` by `num_rows` cells: numbered tiles and one gap.

    The tiles are scrambled by at most `max_turns` moves, so the puzzle can be solved.

    The reward of the last turn is the fraction of tiles in the correct position.
    """

    steps = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}  # noqa: RUF012  (see the base)
    """Position, relative to the gap, of the tile that a move slides into it."""

    num_rows: int | None = 2

    def _check_arguments(self) -> None:
        check_minimum(2, num_rows=self.num_rows)

    def _begin_episode(self, rng: Random) -> int:
        rows, turns = self.num_rows, self.max_turns
        if rows is None or turns is None:
            rows, turns = rng.choice(_SAMPLED_VARIANTS)
        self._size = rows
        self._goal = [*range(1, rows * rows), 0]
        self._tiles = list(self._goal)
        last = ""
        for _ in range(rng.randint(max(1, turns // 2), turns)):
            last = rng.choice(
                [
                    move
                    for move in self.steps
                    if move != _OPPOSITE.get(last) and self._find_tile_to_move(move) is not None
                ]
            )
            self._slide(last)
        if self._tiles == self._goal:  # the random moves have undone each other
            self._slide("down")
        return turns

    def _describe_rules(self) -> str:
        return (
            f"You are playing the {self._size**2 - 1}-puzzle. Slide tiles into the gap, shown as __, until they stand "
            f"in the order 1 to {self._size**2 - 1}, row by row, with the gap at the bottom right. You have "
            f"{self._limit} turns. A move names where a tile moves: 'up' slides the tile below the gap up, 'left' the "
            f"tile to the right of the gap left, and so on. {self._describe_format()}"
        )

    def _render_view(self) -> str:
        rows = [self._tiles[start : start + self._size] for start in range(0, self._size**2, self._size)]
        lines = [" ".join(f"{tile:2}" if tile else "__" for tile in row) for row in rows]
        return "\n".join([*lines, "Enter your move."])

    def _encode_state(self) -> str:
        return " ".join(map(str, self._tiles))

    def _make_move(self, move: str) -> Outcome:
        if self._find_tile_to_move(move) is None:
            return Outcome(text=f"no tile can move {move}: the gap is at that edge.", valid=False)
        self._slide(move)
        if self._tiles == self._goal:
            return Outcome(text="You solved the puzzle!", reward=1.0, over=True)
        return Outcome(text=f"you moved a tile {move}.")

    def _find_tile_to_move(self, move: str) -> int | None:
        """Return the position of the tile that `move` slides into the gap, or None if there is no tile on that side."""
        row, col = divmod(self._tiles.index(0), self._size)
        row, col = row + self.steps[move][0], col + self.steps[move][1]
        return row * self._size + col if 0 <= row < self._size and 0 <= col < self._size else None

    def _slide(self, move: str) -> None:
        gap, source = self._tiles.index(0), self._find_tile_to_move(move)
        assert source is not None
        self._tiles[gap], self._tiles[source] = self._tiles[source], 0

    def _compute_last_reward(self, outcome: Outcome, reward: float) -> float:
        return sum(a == b for a, b in zip(self._tiles, self._goal, strict=True)) / self._size**2
