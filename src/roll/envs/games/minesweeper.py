"""Reveal every cell without a mine."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from roll.envs.games.answers import numbers
from roll.envs.games.game import Game, Outcome, at_least

__all__ = ["Minesweeper"]

_Cell = tuple[int, int]


@dataclass(kw_only=True, eq=False)
class Minesweeper(Game[tuple[str, int, int]]):
    """A field with hidden mines; none is in or next to the first cell that is revealed.

    Every revealed cell gives its share of the cells without a mine; together they give 1, which wins the game. A mine
    ends it, with reward 0. If an argument is None, a square of 5 to 8 rows is drawn, a fifth of it mines.
    """

    rows: int | None = 8
    cols: int | None = 8
    num_mines: int | None = 10

    def _check(self) -> None:
        at_least(2, rows=self.rows, cols=self.cols)
        at_least(1, num_mines=self.num_mines)
        if self.rows and self.cols and self.num_mines and self.num_mines > self.rows * self.cols - 9:
            raise ValueError(
                f"num_mines is {self.num_mines}, but a field of {self.rows} by {self.cols} has room for "
                f"{max(0, self.rows * self.cols - 9)}: none is next to the first cell"
            )

    def _begin(self, rng: Random) -> int:
        rows, cols, mines, turns = self.rows, self.cols, self.num_mines, self.max_turns
        if rows is None or cols is None or mines is None or turns is None:
            rows = cols = rng.randint(5, 8)
            mines, turns = rows * rows // 5, rows * rows
        self._num_rows, self._num_cols, self._num_hidden = rows, cols, mines
        self._mines: set[_Cell] | None = None
        self._layout_seed = rng.getrandbits(32)
        self._revealed: set[_Cell] = set()
        self._flags: set[_Cell] = set()
        return turns

    def _rules(self) -> str:
        return (
            f"You are playing Minesweeper. The field has {self._num_rows} rows and {self._num_cols} columns, numbered "
            f"from 0, and {self._num_hidden} mines. Reveal every cell without a mine within {self._limit} turns. In "
            "the field, '.' is a hidden cell, a digit counts the mines in the up to eight cells around, and 'F' is a "
            "cell that you flagged. No mine is in or next to the first cell that you reveal. " + self._form()
        )

    def _form(self) -> str:
        return (
            "Write \\boxed{reveal row column} to reveal a cell, or \\boxed{flag row column} to put or remove a flag, "
            "for example \\boxed{reveal 3 2}."
        )

    def _view(self) -> str:
        lines = ["   " + " ".join(f"{column:2}" for column in range(self._num_cols))]
        for row in range(self._num_rows):
            lines.append(f"{row:2} " + " ".join(f" {self._sign((row, col))}" for col in range(self._num_cols)))
        return "\n".join([*lines, "Enter your move."])

    def _sign(self, cell: _Cell) -> str:
        if cell in self._revealed:
            return str(self._adjacent_mines(cell))
        return "F" if cell in self._flags else "."

    def _state(self) -> str:
        return "/".join(
            "".join(self._sign((row, col)) for col in range(self._num_cols)) for row in range(self._num_rows)
        )

    def _read(self, answer: str) -> tuple[str, int, int] | None:
        verb, _, rest = answer.partition(" ")
        cell = numbers(rest, 2)
        return (verb.lower(), cell[0], cell[1]) if cell and verb.isalpha() else None

    def _play(self, move: tuple[str, int, int]) -> Outcome:
        verb, row, col = move
        cell = row, col
        if verb not in ("reveal", "flag"):
            return Outcome(text=f"you wrote '{verb}', but a move is 'reveal' or 'flag'.", valid=False)
        if not (0 <= row < self._num_rows and 0 <= col < self._num_cols):
            return Outcome(text=f"you chose ({row}, {col}), which is outside the field.", valid=False)
        if cell in self._revealed:
            return Outcome(text=f"you chose ({row}, {col}), which is revealed already.", valid=False)
        if verb == "flag":
            self._flags ^= {cell}
            return Outcome(text=f"you {'flagged' if cell in self._flags else 'removed the flag from'} ({row}, {col}).")
        if cell in self._flags:
            return Outcome(text=f"you chose to reveal ({row}, {col}), which has a flag: remove it first.", valid=False)
        if cell in self._laid(cell):
            return Outcome(text=f"You hit a mine at ({row}, {col}). The game is lost.", over=True)
        safe = self._num_rows * self._num_cols - self._num_hidden
        before = len(self._revealed)
        self._reveal(cell)
        won = len(self._revealed) == safe
        told = "You revealed every cell without a mine!" if won else f"you revealed ({row}, {col})."
        return Outcome(text=told, reward=(len(self._revealed) - before) / safe, over=won)

    def _laid(self, first: _Cell) -> set[_Cell]:
        """Return the mines, placed on the first reveal; they depend only on the episode's seed and the first cell."""
        if self._mines is None:
            free = [
                (row, col)
                for row in range(self._num_rows)
                for col in range(self._num_cols)
                if abs(row - first[0]) > 1 or abs(col - first[1]) > 1
            ]
            self._mines = set(Random(self._layout_seed).sample(free, self._num_hidden))
        return self._mines

    def _reveal(self, cell: _Cell) -> None:
        """Reveal a cell and, if it has no adjacent mine, its neighbors, and so on."""
        waiting = [cell]
        self._revealed.add(cell)
        while waiting:
            current = waiting.pop()
            if self._adjacent_mines(current) == 0:
                new = [near for near in self._around(current) if near not in self._revealed | self._flags]
                self._revealed.update(new)
                waiting += new

    def _adjacent_mines(self, cell: _Cell) -> int:
        assert self._mines is not None, "cells are revealed when the mines are laid"
        return sum(near in self._mines for near in self._around(cell))

    def _around(self, cell: _Cell) -> list[_Cell]:
        return [
            (row, col)
            for row in range(max(0, cell[0] - 1), min(self._num_rows, cell[0] + 2))
            for col in range(max(0, cell[1] - 1), min(self._num_cols, cell[1] + 2))
            if (row, col) != cell
        ]

    def _some_move(self, rng: Random) -> str:
        verb = rng.choice(["reveal"] * 9 + ["flag"])
        return f"{verb} {rng.randrange(self._num_rows)} {rng.randrange(self._num_cols)}"
