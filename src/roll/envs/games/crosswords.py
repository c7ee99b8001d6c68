"""Fill a crossword, letter by letter."""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random

from roll.envs.games.answers import parse_numbers
from roll.envs.games.clues import list_clues
from roll.envs.games.game import Game, Outcome, check_minimum
from roll.envs.games.letters import place_words

__all__ = ["Crosswords"]


@dataclass(kw_only=True, eq=False)
class Crosswords(Game[tuple[int, int, str]]):
    """A crossword of `num_words` words with at most `max_turns` letters, so that it can be filled within the turns.

    Every correct letter gives the same reward; the rewards of all letters sum to 1. An incorrect letter only uses up
    the turn.

    Args:
        hardcore: Whether to use harder words and clues.
    """

    max_turns: int | None = 30
    num_words: int | None = 3
    hardcore: bool | None = False

    def _check_arguments(self) -> None:
        check_minimum(1, num_words=self.num_words)
        if self.num_words is not None and self.max_turns is not None and self.max_turns // self.num_words < 3:
            raise ValueError(f"max_turns must be at least 3 per word, got {self.max_turns} for {self.num_words} words")
        if self.num_words is not None and self.num_words > 20:
            raise ValueError(f"num_words must be at most 20, got {self.num_words}")

    def _begin_episode(self, rng: Random) -> int:
        count, hard, turns = self.num_words, self.hardcore, self.max_turns
        if count is None or hard is None or turns is None:
            count, hard, turns = 3, rng.random() < 0.5, 20
        short_enough = [word for word in list_clues(hard) if len(word) <= turns // count]
        chosen = rng.sample(short_enough, count)
        self._size, self._words = place_words(chosen, rng, is_separated=True)
        self._clues = [list_clues(hard)[each.word] for each in self._words]
        self._solution = {
            cell: letter for each in self._words for cell, letter in zip(each.cells, each.word, strict=True)
        }
        self._filled: set[tuple[int, int]] = set()
        return turns

    def _describe_rules(self) -> str:
        return (
            f"You are playing Crosswords. Fill the grid within {self._limit} turns, one letter in each. '_' is an "
            f"empty cell and '.' no cell; rows and columns are numbered from 0. {self._describe_format()}"
        )

    def _describe_format(self) -> str:
        return "Write row, column and letter, for example \\boxed{0 3 E}."

    def _render_view(self) -> str:
        lines = ["    " + " ".join(f"C{col:02}" for col in range(self._size))]
        for row in range(self._size):
            lines.append(f"R{row:02} " + " ".join(f" {self._render_cell((row, col))} " for col in range(self._size)))
        lines.append("Clues:")
        for position, (each, clue) in enumerate(zip(self._words, self._clues, strict=True), 1):
            way = "across" if each.across else "down"
            lines.append(f"{position}. {clue} ({way} from row {each.row} column {each.col}, {len(each.word)} letters)")
        return "\n".join([*lines, "Enter your guess."])

    def _render_cell(self, cell: tuple[int, int]) -> str:
        return self._solution[cell] if cell in self._filled else "_" if cell in self._solution else "."

    def _encode_state(self) -> str:
        grid = "/".join(
            "".join(self._render_cell((row, col)) for col in range(self._size)) for row in range(self._size)
        )
        return f"{grid} {'; '.join(self._clues)}"

    def _parse_move(self, answer: str) -> tuple[int, int, str] | None:
        cell, _, letter = answer.rpartition(" ")
        numbers = parse_numbers(cell, 2)
        return (numbers[0], numbers[1], letter.upper()) if numbers and letter.isascii() and _is_letter(letter) else None

    def _make_move(self, move: tuple[int, int, str]) -> Outcome:
        row, col, letter = move
        tried = f"you put {letter} at ({row}, {col})"
        if (row, col) not in self._solution:
            return Outcome(text=f"{tried}, which is not a cell of the crossword.", valid=False)
        if (row, col) in self._filled:
            return Outcome(text=f"{tried}, which is filled already.", valid=False)
        if self._solution[row, col] != letter:
            return Outcome(text=f"{tried}, which is wrong.")
        self._filled.add((row, col))
        won = len(self._filled) == len(self._solution)
        return Outcome(
            text="You filled the crossword!" if won else f"{tried}, which is right.",
            reward=1 / len(self._solution),
            over=won,
        )

    def _sample_move(self, rng: Random) -> str:
        empty = sorted(self._solution.keys() - self._filled) or [(0, 0)]
        row, col = rng.choice(empty)
        return f"{row} {col} {rng.choice(string.ascii_uppercase)}"


def _is_letter(text: str) -> bool:
    return len(text) == 1 and text.isalpha()
