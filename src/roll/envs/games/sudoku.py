"""Fill a grid so that no row, column or box repeats a number."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from roll.envs.games.answers import parse_numbers
from roll.envs.games.game import Game, Outcome, check_minimum

__all__ = ["Sudoku", "iterate_solutions"]

_SAMPLED_VARIANTS = [(4, 10, 15), (9, 50, 50)]
"""Possible scales, clues and turns if an argument is None."""


@dataclass(kw_only=True, eq=False)
class Sudoku(Game[tuple[int, int, int]]):
    """A Sudoku of `scale` by `scale` cells (4 or 9) with `clues` given numbers and exactly one solution.

    Every correct number gives the same reward; the rewards of all numbers sum to 1. If `clues` given numbers would
    allow several solutions, more numbers are given.
    """

    scale: int | None = 9
    clues: int | None = 50
    max_turns: int | None = 50

    def _check_arguments(self) -> None:
        if self.scale not in (None, 4, 9):
            raise ValueError(f"scale must be 4 or 9, or None to sample it at every reset, got {self.scale}")
        check_minimum(1, clues=self.clues)
        if self.scale and self.clues and self.clues >= self.scale**2:
            raise ValueError(f"clues must be less than the {self.scale**2} cells, got {self.clues}")

    def _begin_episode(self, rng: Random) -> int:
        scale, clues, turns = self.scale, self.clues, self.max_turns
        if scale is None or clues is None or turns is None:
            scale, clues, turns = rng.choice(_SAMPLED_VARIANTS)
        self._scale, self._box = scale, 2 if scale == 4 else 3
        self._solution = next(iterate_solutions([0] * scale**2, scale, rng))
        self._cells = list(self._solution)
        for cell in rng.sample(range(scale**2), scale**2):
            if sum(map(bool, self._cells)) == clues:
                break
            kept, self._cells[cell] = self._cells[cell], 0
            solutions = iterate_solutions(self._cells, scale)
            # Without this clue, there would be a second solution.
            if (next(solutions), next(solutions, None))[1] is not None:
                self._cells[cell] = kept
        self._num_empty = self._cells.count(0)
        return turns

    def _describe_rules(self) -> str:
        n = self._scale
        return (
            f"You are playing Sudoku. Fill the empty cells, shown as '.', with numbers from 1 to {n}, so that no row, "
            f"no column and no box of {self._box} by {self._box} cells repeats one. Rows and columns are numbered from "
            f"1 to {n}. You have {self._limit} turns, and fill one cell in each; what is filled stays. "
            f"{self._describe_format()}"
        )

    def _describe_format(self) -> str:
        return "Write row, column and number, for example \\boxed{1 2 3} for a 3 in row 1, column 2."

    def _render_view(self) -> str:
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

    def _encode_state(self) -> str:
        return "".join(map(str, self._cells))

    def _parse_move(self, answer: str) -> tuple[int, int, int] | None:
        numbers = parse_numbers(answer, 3)
        return (numbers[0], numbers[1], numbers[2]) if numbers else None

    def _make_move(self, move: tuple[int, int, int]) -> Outcome:
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

    def _sample_move(self, rng: Random) -> str:
        empty = [cell for cell, number in enumerate(self._cells) if not number] or [0]
        row, col = divmod(rng.choice(empty), self._scale)
        return f"{row + 1} {col + 1} {rng.randint(1, self._scale)}"


def iterate_solutions(cells: list[int], scale: int, rng: Random | None = None) -> Iterator[list[int]]:
    """Yield all solutions of a grid in which 0 marks an empty cell.

    The cell with the fewest candidates is filled first, without recursion. With `rng`, numbers are tried in random
    order.
    """
    peers = _list_peers(scale)
    grid = list(cells)
    everything = (1 << (scale + 1)) - 2

    def find_next_choice() -> tuple[int, list[int]] | None:
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
    choice = find_next_choice()
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
        choice = find_next_choice()


@functools.cache
def _list_peers(scale: int) -> list[list[int]]:
    """Return, for each cell, the other cells in the same row, column or box."""
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
