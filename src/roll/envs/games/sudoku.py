"""Fill a grid so that no row, column or box repeats a number."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from roll.envs.games.answers import numbers
from roll.envs.games.game import Game, Outcome, at_least

__all__ = ["Sudoku", "solutions"]

_DRAWN = [(4, 10, 15), (9, 50, 50)]
"""Scale, clues and turns of the variant that draws them."""


@dataclass(kw_only=True, eq=False)
class Sudoku(Game[tuple[int, int, int]]):
    """A grid of `scale` by `scale` (4 or 9) with `clues` given numbers and one solution.

    Every right number gives its share of the empty cells; together they give 1. More clues are given if fewer would
    leave several solutions.
    """

    scale: int | None = 9
    clues: int | None = 50
    max_turns: int | None = 50

    def _check(self) -> None:
        if self.scale not in (None, 4, 9):
            raise ValueError(f"scale is {self.scale}: give 4 or 9, or None to have it drawn at every reset")
        at_least(1, clues=self.clues)
        if self.scale and self.clues and self.clues >= self.scale**2:
            raise ValueError(f"clues is {self.clues}, which leaves none of {self.scale**2} cells empty")

    def _begin(self, rng: Random) -> int:
        scale, clues, turns = self.scale, self.clues, self.max_turns
        if scale is None or clues is None or turns is None:
            scale, clues, turns = rng.choice(_DRAWN)
        self._scale, self._box = scale, 2 if scale == 4 else 3
        self._solution = next(solutions([0] * scale**2, scale, rng))
        self._cells = list(self._solution)
        for cell in rng.sample(range(scale**2), scale**2):
            if sum(map(bool, self._cells)) == clues:
                break
            kept, self._cells[cell] = self._cells[cell], 0
            found = solutions(self._cells, scale)
            if (next(found), next(found, None))[1] is not None:
                self._cells[cell] = kept
        self._num_empty = self._cells.count(0)
        return turns

    def _rules(self) -> str:
        n = self._scale
        return (
            f"You are playing Sudoku. Fill the empty cells, shown as '.', with numbers from 1 to {n}, so that no row, "
            f"no column and no box of {self._box} by {self._box} cells repeats one. Rows and columns are numbered from "
            f"1 to {n}. You have {self._limit} turns, and fill one cell in each; what is filled stays. {self._form()}"
        )

    def _form(self) -> str:
        return "Write row, column and number, for example \\boxed{1 2 3} for a 3 in row 1, column 2."

    def _view(self) -> str:
        n, box = self._scale, self._box
        header = " | ".join(" ".join(f"C{col + 1}" for col in range(start, start + box)) for start in range(0, n, box))
        lines = [f"   {header}"]
        for row in range(n):
            if row and row % box == 0:
                lines.append("   " + "-" * len(header))
            cells = [f" {self._cells[row * n + col] or '.'}" for col in range(n)]
            groups = [" ".join(cells[start : start + box]) for start in range(0, n, box)]
            lines.append(f"R{row + 1} {' | '.join(groups)}")
        return "\n".join([*lines, "Enter your move."])

    def _state(self) -> str:
        return "".join(map(str, self._cells))

    def _read(self, answer: str) -> tuple[int, int, int] | None:
        found = numbers(answer, 3)
        return (found[0], found[1], found[2]) if found else None

    def _play(self, move: tuple[int, int, int]) -> Outcome:
        row, col, number = move
        tried = f"you put {number} in R{row} C{col}"
        if not all(1 <= value <= self._scale for value in move):
            return Outcome(text=f"{tried}, but rows, columns and numbers go from 1 to {self._scale}.", valid=False)
        cell = (row - 1) * self._scale + col - 1
        if self._cells[cell]:
            return Outcome(text=f"{tried}, which is filled already.", valid=False)
        if self._solution[cell] != number:
            return Outcome(text=f"{tried}, which is wrong.", valid=False)
        self._cells[cell] = number
        won = 0 not in self._cells
        return Outcome(
            text="You filled the whole grid!" if won else f"{tried}, which is right.",
            reward=1 / self._num_empty,
            over=won,
        )

    def _some_move(self, rng: Random) -> str:
        empty = [cell for cell, number in enumerate(self._cells) if not number] or [0]
        row, col = divmod(rng.choice(empty), self._scale)
        return f"{row + 1} {col + 1} {rng.randint(1, self._scale)}"


def solutions(cells: list[int], scale: int, rng: Random | None = None) -> Iterator[list[int]]:
    """Yield all ways to fill a grid's zeros.

    The cell with the fewest candidates is filled first, without recursion. With `rng`, numbers are tried in random
    order.
    """
    peers = _peers(scale)
    grid = list(cells)
    everything = (1 << (scale + 1)) - 2

    def next_choice() -> tuple[int, list[int]] | None:
        best, fewest = None, scale + 1
        for cell, number in enumerate(grid):
            if number == 0:
                taken = 0
                for peer in peers[cell]:
                    taken |= 1 << grid[peer]
                free = everything & ~taken
                if free.bit_count() < fewest:
                    best, fewest = (cell, free), free.bit_count()
                    if fewest <= 1:
                        break
        if best is None:
            return None
        numbers_ = [number for number in range(1, scale + 1) if best[1] >> number & 1]
        if rng is not None:
            rng.shuffle(numbers_)
        return best[0], numbers_

    stack: list[tuple[int, list[int]]] = []
    choice = next_choice()
    while True:
        if choice is None:
            yield list(grid)
        else:
            stack.append(choice)
        while stack and not stack[-1][1]:
            grid[stack.pop()[0]] = 0
        if not stack:
            return
        cell, free = stack[-1]
        grid[cell] = free.pop()
        choice = next_choice()


@functools.cache
def _peers(scale: int) -> list[list[int]]:
    """Return the cells that must differ from each cell."""
    box = 2 if scale == 4 else 3
    places = [divmod(cell, scale) for cell in range(scale**2)]
    return [
        [
            other
            for other, (r, c) in enumerate(places)
            if (r, c) != (row, col) and (r == row or c == col or (r // box == row // box and c // box == col // box))
        ]
        for row, col in places
    ]
