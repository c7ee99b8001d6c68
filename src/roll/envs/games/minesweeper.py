"""Reveal every cell without a mine."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from roll.envs.games.answers import parse_numbers
from roll.envs.games.game import Game, Outcome, check_minimum

__all__ = ["Minesweeper"]

_Cell = tuple[int, int]


@dataclass(kw_only=True, eq=False)
class Minesweeper(Game[tuple[str, int, int]]):
    """A field with hidden mines; none is in or next to the first cell that is revealed.

    Every revealed cell without a mine gives the same reward. Revealing all of them wins; the rewards then sum to 1.
    Revealing a mine ends the game with reward 0. If an argument is None, the field is a square of 5 to 8 rows with a
    fifth of its cells mined.
    """

    rows: int | None = 8
    cols: int | None = 8
    num_mines: int | None = 10

    def _check_arguments(self) -> None:
        check_minimum(2, rows=self.rows, cols=self.cols)
        check_minimum(1, num_mines=self.num_mines)
        if self.rows and self.cols and self.num_mines and self.num_mines > self.rows * self.cols - 9:
            raise ValueError(
                f"num_mines must be at most {max(0, self.rows * self.cols - 9)} for {self.rows} x {self.cols} cells, "
                f"because the first cell and its neighbors have no mines, got {self.num_mines}"
            )

    def _begin_episode(self, rng: Random) -> int:
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

    def _describe_rules(self) -> str:
        return (
            f"You are playing Minesweeper. The field has {self._num_rows} rows and {self._num_cols} columns, numbered "
            f"from 0, and {self._num_hidden} mines. Reveal every cell without a mine within {self._limit} turns. In "
            "the field, '.' is a hidden cell, a digit counts the mines in the up to eight cells around, and 'F' is a "
            "cell that you flagged. No mine is in or next to the first cell that you reveal. " + self._describe_format()
        )

    def _describe_format(self) -> str:
        return (
            "Write \\boxed{reveal row column} to reveal a cell, or \\boxed{flag row column} to put or remove a flag, "
            "for example \\boxed{reveal 3 2}."
        )

    def _render_view(self) -> str:
        lines = ["   " + " ".join(f"{column:2}" for column in range(self._num_cols))]
        for row in range(self._num_rows):
            lines.append(f"{row:2} " + " ".join(f" {self._render_cell((row, col))}" for col in range(self._num_cols)))
        return "\n".join([*lines, "Enter your move."])

    def _render_cell(self, cell: _Cell) -> str:
        if cell in self._revealed:
            return str(self._count_adjacent_mines(cell))
        return "F" if cell in self._flags else "."

    def _encode_state(self) -> str:
        return "/".join(
            "".join(self._render_cell((row, col)) for col in range(self._num_cols)) for row in range(self._num_rows)
        )

    def _parse_move(self, answer: str) -> tuple[str, int, int] | None:
        verb, _, rest = answer.partition(" ")
        cell = parse_numbers(rest, 2)
        return (verb.lower(), cell[0], cell[1]) if cell and verb.isalpha() else None

    def _make_move(self, move: tuple[str, int, int]) -> Outcome:
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
        if cell in self._place_mines(cell):
            return Outcome(text=f"You hit a mine at ({row}, {col}). The game is lost.", over=True)
        safe = self._num_rows * self._num_cols - self._num_hidden
        before = len(self._revealed)
        self._reveal(cell)
        won = len(self._revealed) == safe
        text = "You revealed every cell without a mine!" if won else f"you revealed ({row}, {col})."
        return Outcome(text=text, reward=(len(self._revealed) - before) / safe, over=won)

    def _place_mines(self, first_cell: _Cell) -> set[_Cell]:
        """Return the cells with mines.

        The first call places the mines, none of them in or next to `first_cell`, with the episode's seed.
        """
        if self._mines is None:
            free = [
                (row, col)
                for row in range(self._num_rows)
                for col in range(self._num_cols)
                if abs(row - first_cell[0]) > 1 or abs(col - first_cell[1]) > 1
            ]
            self._mines = set(Random(self._layout_seed).sample(free, self._num_hidden))
        return self._mines

    def _reveal(self, cell: _Cell) -> None:
        """Reveal a cell. If it has no adjacent mine, also reveal its unflagged neighbors, recursively."""
        waiting = [cell]
        self._revealed.add(cell)
        while waiting:
            current = waiting.pop()
            if self._count_adjacent_mines(current) == 0:
                new = [near for near in self._list_adjacent(current) if near not in self._revealed | self._flags]
                self._revealed.update(new)
                waiting += new

    def _count_adjacent_mines(self, cell: _Cell) -> int:
        assert self._mines is not None, "cells are revealed when the mines are laid"
        return sum(near in self._mines for near in self._list_adjacent(cell))

    def _list_adjacent(self, cell: _Cell) -> list[_Cell]:
        return [
            (row, col)
            for row in range(max(0, cell[0] - 1), min(self._num_rows, cell[0] + 2))
            for col in range(max(0, cell[1] - 1), min(self._num_cols, cell[1] + 2))
            if (row, col) != cell
        ]

    def _sample_move(self, rng: Random) -> str:
        verb = rng.choice(["reveal"] * 9 + ["flag"])
        return f"{verb} {rng.randrange(self._num_rows)} {rng.randrange(self._num_cols)}"
