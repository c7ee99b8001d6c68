"""Guess a word, with marks that show which letters are in the correct position."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from roll.envs.games.game import Game, Outcome
from roll.envs.games.words import list_words

__all__ = ["Wordle", "mark_guess"]


@dataclass(kw_only=True, eq=False)
class Wordle(Game[str]):
    """A secret word of `word_length` letters, 3 to 7.

    The letters give 0.5 in total; each gives its part when a guess first has it in the correct position. The whole word
    gives the other 0.5. If an argument is None, the length is sampled from 3 to 5, with five turns per letter.

    Args:
        only_real_words: Whether a guess that is not in the game's word list is invalid.
    """

    word_length: int | None = 5
    only_real_words: bool = False

    def _check_arguments(self) -> None:
        if self.word_length is not None and not list_words(self.word_length):
            raise ValueError(f"word_length must be from 3 to 7, got {self.word_length}")

    def _begin_episode(self, rng: Random) -> int:
        length, turns = self.word_length, self.max_turns
        if length is None or turns is None:
            length = rng.randint(3, 5)
            turns = 5 * length
        self._length = length
        self._secret = rng.choice(list_words(length))
        self._guesses: dict[str, str] = {}
        self._placed: set[int] = set()
        return turns

    def _describe_rules(self) -> str:
        return (
            f"You are playing Wordle. Find my word of {self._length} letters within {self._limit} turns. I mark each "
            "letter of your guess: G is the right letter in the right place, Y is in the word at another place, X is "
            f"not in the word. {self._describe_format()}"
        )

    def _describe_format(self) -> str:
        return f"Write a word of {self._length} letters, for example \\boxed{{{list_words(self._length)[0]}}}."

    def _render_view(self) -> str:
        return "Enter your guess."

    def _encode_state(self) -> str:
        return "; ".join(f"{guess} {found}" for guess, found in sorted(self._guesses.items())) or "start"

    def _parse_move(self, answer: str) -> str | None:
        letters = "".join(answer.split())
        return letters.upper() if letters.isascii() and letters.isalpha() else None

    def _make_move(self, move: str) -> Outcome:
        if len(move) != self._length:
            return Outcome(
                text=f"you guessed {move}, {len(move)} letters, but my word has {self._length}.", valid=False
            )
        if move in self._guesses:
            return Outcome(text=f"you guessed {move}, as you did before: {self._guesses[move]}.", valid=False)
        if self.only_real_words and move not in list_words(self._length):
            return Outcome(text=f"you guessed {move}, which is not in my list of words.", valid=False)
        marks = self._guesses[move] = mark_guess(self._secret, move)
        placed = {place for place, mark in enumerate(marks) if mark == "G"}
        reward = 0.5 * len(placed - self._placed) / self._length
        self._placed |= placed
        if move == self._secret:
            return Outcome(text=f"Right! The word is {move}.", reward=reward + 0.5, over=True)
        return Outcome(text=f"you guessed {move}:\n{move}\n{marks}", reward=reward)

    def _sample_move(self, rng: Random) -> str:
        return rng.choice(list_words(self._length))


def mark_guess(secret: str, guess: str) -> str:
    """Return a string with one character per letter of a guess.

    `G`: the letter is in the correct position; `Y`: the secret has it in another position; `X`: neither.

    Each letter of the secret accounts for at most one `G` or `Y`; `G` takes precedence.
    """
    elsewhere = Counter(a for a, b in zip(secret, guess, strict=True) if a != b)
    marks = []
    for wanted, letter in zip(secret, guess, strict=True):
        if letter == wanted:
            marks.append("G")
        elif elsewhere[letter] > 0:
            elsewhere[letter] -= 1
            marks.append("Y")
        else:
            marks.append("X")
    return "".join(marks)
