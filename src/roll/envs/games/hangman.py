"""Find a word letter by letter."""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random

from roll.envs.games.game import Game, Outcome
from roll.envs.games.words import words

__all__ = ["Hangman"]

_DRAWN = [(3, 10), (5, 15), (7, 20)]
"""Letters and turns of the variant that draws them."""


@dataclass(kw_only=True, eq=False)
class Hangman(Game[str]):
    """A secret word of `word_length` letters, 3 to 7; a guess is a letter or the word.

    Each new letter gives its share of a half. The word gives a half, plus the share of the letters that were still
    hidden; together they give 1. The last letter also wins the game.

    Args:
        hardcore: Whether to draw from less common words.
    """

    word_length: int | None = 5
    hardcore: bool = False

    def _check(self) -> None:
        if self.word_length is not None and not words(self.word_length, self.hardcore):
            raise ValueError(f"word_length is {self.word_length}: give 3 to 7")

    def _begin(self, rng: Random) -> int:
        length, turns = self.word_length, self.max_turns
        if length is None or turns is None:
            length, turns = rng.choice(_DRAWN)
        self._length = length
        self._secret = rng.choice(words(length, self.hardcore))
        self._letters: set[str] = set()
        self._wrong: set[str] = set()
        return turns

    def _rules(self) -> str:
        return (
            f"You are playing Hangman. Find my word of {self._length} letters within {self._limit} turns. Each turn, "
            f"guess one letter, which is shown wherever it occurs, or the whole word. {self._form()}"
        )

    def _form(self) -> str:
        return f"Write a letter or a word, for example \\boxed{{E}} or \\boxed{{{words(self._length)[0]}}}."

    def _view(self) -> str:
        return f"{' '.join(self._shown())}\nEnter your guess."

    def _shown(self) -> str:
        return "".join(letter if letter in self._letters else "_" for letter in self._secret)

    def _state(self) -> str:
        return " ".join([self._shown(), "".join(sorted(self._letters)), *sorted(self._wrong)])

    def _read(self, answer: str) -> str | None:
        return answer.upper() if answer.isascii() and answer.isalpha() else None

    def _play(self, move: str) -> Outcome:
        hidden = self._shown().count("_") / self._length
        if move == self._secret:
            return Outcome(text=f"Right! The word is {move}.", reward=0.5 * hidden + 0.5, over=True)
        if move in self._letters or move in self._wrong:
            return Outcome(text=f"you guessed {move}, as you did before.", valid=False)
        if len(move) == 1:
            self._letters.add(move)
            found = hidden - self._shown().count("_") / self._length
            if "_" not in self._shown():
                return Outcome(text=f"You found every letter of {self._secret}!", reward=0.5 * found + 0.5, over=True)
            return Outcome(text=f"the letter {move} is {'in' if found else 'not in'} my word.", reward=0.5 * found)
        if len(move) != self._length:
            return Outcome(
                text=f"you guessed {move}, {len(move)} letters, but my word has {self._length}.", valid=False
            )
        self._wrong.add(move)
        return Outcome(text=f"you guessed {move}, which is not my word.")

    def _some_move(self, rng: Random) -> str:
        return rng.choice(string.ascii_uppercase if rng.random() < 0.5 else words(self._length, self.hardcore))
