"""Find words in a grid of letters."""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random

from roll.envs.games.answers import parse_numbers
from roll.envs.games.game import Game, Outcome, check_minimum
from roll.envs.games.letters import place_words
from roll.envs.games.words import list_words

__all__ = ["WordSearch"]

_Span = tuple[int, int, int, int]

_MIN_LENGTH = 4
"""Minimum length of a hidden word: shorter words occur in any grid by chance."""


@dataclass(kw_only=True, eq=False)
class WordSearch(Game[_Span]):
    """A grid that hides `num_words` words, across or down; the words are not listed.

    Every found word gives the same reward; the rewards of all words sum to 1.

    Args:
        hardcore: Whether to hide less common words.
    """

    num_words: int | None = 5
    hardcore: bool | None = False

    def _check_arguments(self) -> None:
        check_minimum(1, num_words=self.num_words)
        if self.num_words is not None and self.num_words > 50:
            raise ValueError(f"num_words must be at most 50, got {self.num_words}")

    def _begin_episode(self, rng: Random) -> int:
        count, hardcore, turns = self.num_words, self.hardcore, self.max_turns
        if count is None or hardcore is None or turns is None:
            count, hardcore, turns = 5, rng.random() < 0.5, 20
        source = [word for word in list_words(rare=hardcore) if len(word) >= _MIN_LENGTH]
        self._size, placed = place_words(rng.sample(source, count), rng, is_separated=False)
        self._words = {(*each.cells[0], *each.cells[-1]): each for each in placed}
        self._letters: list[list[str]] = [
            [rng.choice(string.ascii_uppercase) for _ in range(self._size)] for _ in range(self._size)
        ]
        for each in placed:
            for (row, col), letter in zip(each.cells, each.word, strict=True):
                self._letters[row][col] = letter
        self._found: set[_Span] = set()
        self._tried: set[_Span] = set()
        return turns

    def _describe_rules(self) -> str:
        return (
            f"You are playing Word Search. The grid hides {len(self._words)} English words of at least {_MIN_LENGTH} "
            "letters, each from left to right or from top to bottom. Rows and columns are numbered from 0. Find all "
            f"words within {self._limit} turns; letters of words that you found are shown in brackets. "
            f"{self._describe_format()}"
        )

    def _describe_format(self) -> str:
        return (
            "Write row and column of a word's first letter and of its last, for example \\boxed{1 2 1 6} for five "
            "letters in row 1."
        )

    def _render_view(self) -> str:
        marked = {cell for span in self._found for cell in self._words[span].cells}
        lines = ["    " + " ".join(f"C{col:02}" for col in range(self._size))]
        for row, letters in enumerate(self._letters):
            shown = (f"[{letter}]" if (row, col) in marked else f" {letter} " for col, letter in enumerate(letters))
            lines.append(f"R{row:02} {' '.join(shown)}")
        return "\n".join([*lines, f"Words found: {len(self._found)} of {len(self._words)}.", "Enter your guess."])

    def _encode_state(self) -> str:
        tried = " ".join(".".join(map(str, span)) for span in sorted(self._tried))
        return f"{'/'.join(map(''.join, self._letters))} {tried}"

    def _parse_move(self, answer: str) -> _Span | None:
        numbers = parse_numbers(answer, 4)
        return (numbers[0], numbers[1], numbers[2], numbers[3]) if numbers else None

    def _make_move(self, move: _Span) -> Outcome:
        tried = "you chose ({}, {}) to ({}, {})".format(*move)
        if not all(0 <= value < self._size for value in move):
            return Outcome(text=f"{tried}, which is outside the grid.", valid=False)
        if move[0] != move[2] and move[1] != move[3]:
            return Outcome(text=f"{tried}, which is neither across nor down.", valid=False)
        move = min(move, (*move[2:], *move[:2]))
        if move in self._tried:
            return Outcome(text=f"{tried}, as you did before.", valid=False)
        self._tried.add(move)
        if move not in self._words:
            return Outcome(text=f"{tried}, where none of the hidden words is.")
        self._found.add(move)
        won = len(self._found) == len(self._words)
        return Outcome(
            text="You found all words!" if won else f"{tried} and found {self._words[move].word}.",
            reward=1 / len(self._words),
            over=won,
        )

    def _sample_move(self, rng: Random) -> str:
        row, col = rng.randrange(self._size), rng.randrange(self._size)
        length = rng.randint(_MIN_LENGTH, 7) - 1
        return f"{row} {col} {row} {col + length}" if rng.random() < 0.5 else f"{row} {col} {row + length} {col}"
