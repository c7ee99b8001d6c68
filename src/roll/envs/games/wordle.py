"""Find a word from marks that show which letters are in place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from roll.envs.games.game import Game, Outcome
from roll.envs.games.words import words

__all__ = ["Wordle", "marks"]


@dataclass(kw_only=True, eq=False)
class Wordle(Game[str]):
    """A secret word of `word_length` letters, 3 to 7.

    A letter that is in its place for the first time gives its share of a half, and the whole word the other half;
    together they give 1. If an argument is None, 3 to 5 letters are drawn, and five turns for each letter.

    Args:
        only_real_words: Whether a guess that is not in the game's word list is invalid.
    """

    word_length: int | None = 5
    only_real_words: bool = False

    def _check(self) -> None:
        if self.word_length is not None and not words(self.word_length):
            raise ValueError(f"word_length is {self.word_length}: give 3 to 7")

    def _begin(self, rng: Random) -> int:
        length, turns = self.word_length, self.max_turns
        if length is None or turns is None:
            length = rng.randint(3, 5)
            turns = 5 * length
        self._length = length
        self._secret = rng.choice(words(length))
        self._guesses: dict[str, str] = {}
        self._placed: set[int] = set()
        return turns

    def _rules(self) -> str:
        return (
            f"You are playing Wordle. Find my word of {self._length} letters within {self._limit} turns. I mark each "
            "letter of your guess: G is the right letter in the right place, Y is in the word at another place, X is "
            f"not in the word. {self._form()}"
        )

    def _form(self) -> str:
        return f"Write a word of {self._length} letters, for example \\boxed{{{words(self._length)[0]}}}."

    def _view(self) -> str:
        return "Enter your guess."

    def _state(self) -> str:
        return "; ".join(f"{guess} {found}" for guess, found in sorted(self._guesses.items())) or "start"

    def _read(self, answer: str) -> str | None:
        letters = "".join(answer.split())
        return letters.upper() if letters.isascii() and letters.isalpha() else None

    def _play(self, move: str) -> Outcome:
        if len(move) != self._length:
            return Outcome(
                text=f"you guessed {move}, {len(move)} letters, but my word has {self._length}.", valid=False
            )
        if move in self._guesses:
            return Outcome(text=f"you guessed {move}, as you did before: {self._guesses[move]}.", valid=False)
        if self.only_real_words and move not in words(self._length):
            return Outcome(text=f"you guessed {move}, which is not in my list of words.", valid=False)
        found = self._guesses[move] = marks(self._secret, move)
        placed = {place for place, mark in enumerate(found) if mark == "G"}
        reward = 0.5 * len(placed - self._placed) / self._length
        self._placed |= placed
        if move == self._secret:
            return Outcome(text=f"Right! The word is {move}.", reward=reward + 0.5, over=True)
        return Outcome(text=f"you guessed {move}:\n{move}\n{found}", reward=reward)

    def _some_move(self, rng: Random) -> str:
        return rng.choice(words(self._length))


def marks(secret: str, guess: str) -> str:
    """Return `G`, `Y` or `X` for each letter of a guess.

    Each letter of the secret accounts for one mark at most, and matches in place come first.
    """
    elsewhere = Counter(a for a, b in zip(secret, guess, strict=True) if a != b)
    found = []
    for wanted, letter in zip(secret, guess, strict=True):
        if letter == wanted:
            found.append("G")
        elif elsewhere[letter] > 0:
            elsewhere[letter] -= 1
            found.append("Y")
        else:
            found.append("X")
    return "".join(found)
