"""Merge tiles up to a target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from roll.envs.games.directions import DirectionGame
from roll.envs.games.game import Outcome, check_minimum

__all__ = ["Game2048", "slide"]

_SAMPLED_VARIANTS = [(16, 20), (32, 30), (64, 50)]
"""Possible targets and turns if `target_tile` is None."""

Board = tuple[tuple[int, ...], ...]


@dataclass(kw_only=True, eq=False)
class Game2048(DirectionGame):
    """The game 2048 on `board_size` by `board_size` cells: equal tiles merge until one of them is `target_tile`.

    Every doubling of the largest tile gives the same reward; the rewards of all doublings up to the target sum to 1.
    The game is lost when no move is left. As in GEM, the targets of `hard` and `extreme-hard` cannot be reached within
    their turns, because each turn adds a tile of at most 4; only a part of the total reward can be obtained.
    """

    target_tile: int | None = 2048
    board_size: int = 4

    def _check_arguments(self) -> None:
        check_minimum(2, board_size=self.board_size)
        target = self.target_tile
        if target is not None and (target < 8 or target & (target - 1)):
            raise ValueError(f"target_tile must be a power of two, at least 8, got {target}")

    def _begin_episode(self, rng: Random) -> int:
        target, turns = self.target_tile, self.max_turns
        if target is None or turns is None:
            target, turns = rng.choice(_SAMPLED_VARIANTS)
        self._target = target
        self._board: Board = ((0,) * self.board_size,) * self.board_size
        self._add_tile()
        self._add_tile()
        self._first = self._most = max(map(max, self._board))
        return turns

    def _add_tile(self) -> None:
        empty = [(row, col) for row, line in enumerate(self._board) for col, tile in enumerate(line) if not tile]
        row, col = self._rng.choice(empty)
        rows = [list(line) for line in self._board]
        rows[row][col] = 2 if self._rng.random() < 0.9 else 4
        self._board = tuple(map(tuple, rows))

    def _describe_rules(self) -> str:
        return (
            "You are playing 2048. Slide all tiles in one direction; two equal tiles that meet merge into one of "
            f"twice the value, and after each move a new 2 or 4 appears. Reach the tile {self._target} within "
            f"{self._limit} turns. {self._describe_format()}"
        )

    def _render_view(self) -> str:
        lines = [" ".join(f"{tile or '.':>4}" for tile in line) for line in self._board]
        return "\n".join([*lines, "Enter your move."])

    def _encode_state(self) -> str:
        return "/".join(" ".join(map(str, line)) for line in self._board)

    def _make_move(self, move: str) -> Outcome:
        board = slide(self._board, move)
        if board == self._board:
            return Outcome(text=f"moving {move} changes nothing.", valid=False)
        self._board = board
        most = min(self._target, max(map(max, board)))
        reward = max(0.0, math.log2(most) - math.log2(self._most)) / (math.log2(self._target) - math.log2(self._first))
        self._most = max(most, self._most)
        self._add_tile()
        if self._most >= self._target:
            return Outcome(text=f"You reached the tile {self._target}!", reward=reward, over=True)
        if all(slide(self._board, each) == self._board for each in self.steps):
            return Outcome(text="No move is left. The game is lost.", reward=reward, over=True)
        return Outcome(text=f"you moved {move}.", reward=reward)


def slide(board: Board, move: str) -> Board:
    """Return the board after all tiles have slid in the direction `move` and merged, before a new tile appears."""
    if move in ("up", "down"):
        turned = slide(tuple(zip(*board, strict=True)), "left" if move == "up" else "right")
        return tuple(zip(*turned, strict=True))
    if move == "right":
        return tuple(_merge(line[::-1])[::-1] for line in board)
    return tuple(_merge(line) for line in board)


def _merge(line: tuple[int, ...]) -> tuple[int, ...]:
    tiles = [tile for tile in line if tile]
    merged = []
    position = 0
    while position < len(tiles):
        twice = position + 1 < len(tiles) and tiles[position] == tiles[position + 1]
        merged.append(tiles[position] * (2 if twice else 1))
        position += 2 if twice else 1
    return (*merged, *[0] * (len(line) - len(merged)))
