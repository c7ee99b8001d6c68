"""Lay out words on a grid of letters, for the games that use one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

__all__ = ["PlacedWord", "place_words"]

_Cell = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PlacedWord:
    """A word on the grid: it begins at `row` and `col`, and runs across or down."""

    word: str
    row: int
    col: int
    across: bool

    @property
    def cells(self) -> list[_Cell]:
        steps = range(len(self.word))
        return [(self.row, self.col + step) if self.across else (self.row + step, self.col) for step in steps]


def place_words(words: Sequence[str], rng: Random, is_separated: bool) -> tuple[int, list[PlacedWord]]:
    """Place words on a square grid; each word crosses earlier ones if possible.

    Args:
        words: Distinct words.
        rng: Samples the positions.
        is_separated: Whether words may touch only where they cross, as in a crossword.

    Returns:
        The number of rows of the grid, and the placed words in the order of `words`.
    """
    longest = max(map(len, words))
    size = max(round(1.5 * longest), longest + 1)
    while True:
        letters: dict[_Cell, str] = {}
        placed: list[PlacedWord] = []
        for word in sorted(words, key=len, reverse=True):
            place = _place_word(word, letters, size, rng, is_separated)
            if place is None:
                break
            placed.append(place)
            letters.update(zip(place.cells, place.word, strict=True))
        if len(placed) == len(words):
            return size, sorted(placed, key=lambda each: words.index(each.word))
        # The words fit once the square is large enough.
        size += 1


def _place_word(word: str, letters: dict[_Cell, str], size: int, rng: Random, is_separated: bool) -> PlacedWord | None:
    crossing: list[PlacedWord] = []
    free: list[PlacedWord] = []
    for across in (True, False):
        last_row, last_col = (size, size - len(word) + 1) if across else (size - len(word) + 1, size)
        for row in range(last_row):
            for col in range(last_col):
                candidate = PlacedWord(word=word, row=row, col=col, across=across)
                crossings = _count_crossings(candidate, letters, is_separated)
                if crossings is not None and crossings < len(word):
                    (crossing if crossings else free).append(candidate)
    chosen = crossing or free
    return rng.choice(chosen) if chosen else None


def _count_crossings(candidate: PlacedWord, letters: dict[_Cell, str], is_separated: bool) -> int | None:
    """Return the number of letters that a candidate shares with other words, or None if it does not fit.

    With `is_separated`, a candidate that touches another word without crossing it does not fit.
    """
    shared = 0
    cells = candidate.cells
    for cell, letter in zip(cells, candidate.word, strict=True):
        if cell in letters:
            if letters[cell] != letter:
                return None
            shared += 1
        elif is_separated and any(near in letters for near in _list_adjacent(cell, candidate.across)):
            return None
    if is_separated:
        (row, col), (last_row, last_col) = cells[0], cells[-1]
        ends = [(row, col - 1), (row, last_col + 1)] if candidate.across else [(row - 1, col), (last_row + 1, col)]
        if any(end in letters for end in ends):
            return None
    return shared


def _list_adjacent(cell: _Cell, across: bool) -> list[_Cell]:
    row, col = cell
    return [(row - 1, col), (row + 1, col)] if across else [(row, col - 1), (row, col + 1)]
