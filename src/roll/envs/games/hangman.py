"""Find a word letter by letter."""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random

from roll.envs.games.game import Game, Outcome
from roll.envs.games.words import list_words

__all__ = ["Hangman"]

_SAMPLED_VARIANTS = [(3, 10), (5, 15), (7, 20)]
"""Possible word lengths and turns if `word_length` is None."""


@dataclass(kw_only=True, eq=False)
class Hangman(Game[str]):
    """A secret word of `word_length` letters, 3 to 7; a guess is a letter or the word.

    Letters give 0.5 in total, in proportion to the positions that they reveal. Revealing the last letter wins the game
    and gives another 0.5. Guessing the word also wins, and gives the reward of the letters that are still hidden.

    Args:
        hardcore: Whether to choose a less common word.
    """

    word_length: int | None = 5
    hardcore: bool = False

    def _check_arguments(self) -> None:
        if self.word_length is not None and not list_words(self.word_length, self.hardcore):
            raise ValueError(f"word_length must be from 3 to 7, got {self.word_length}")

    def _begin_episode(self, rng: Random) -> int:
        length, turns = self.word_length, self.max_turns
        if length is None or turns is None:
            length, turns = rng.choice(_SAMPLED_VARIANTS)
        self._length = length
        self._secret = rng.choice(list_words(length, self.hardcore))
        self._letters: set[str] = set()
        self._wrong: set[str] = set()
        return turns

    def _describe_rules(self) -> str:
        return (
            f"You are playing Hangman. Find my word of {self._length} letters within {self._limit} turns. Each turn, "
            f"guess one letter, which is shown wherever it occurs, or the whole word. {self._describe_format()}"
        )

    def _describe_format(self) -> str:
        return f"Write a letter or a word, for example \\boxed{{E}} or \\boxed{{{list_words(self._length)[0]}}}."

    def _render_view(self) -> str:
        return f"{' '.join(self._list_letters())}\nEnter your guess."

    def _list_letters(self) -> str:
        return "".join(letter if letter in self._letters else "_" for letter in self._secret)

    def _encode_state(self) -> str:
        return " ".join([self._list_letters(), "".join(sorted(self._letters)), *sorted(self._wrong)])

    def _parse_move(self, answer: str) -> str | None:
        return answer.upper() if answer.isascii() and answer.isalpha() else None

    def _make_move(self, move: str) -> Outcome:
        hidden = self._list_letters().count("_") / self._length
        if move == self._secret:
            return Outcome(text=f"Right! The word is {move}.", reward=0.5 * hidden + 0.5, over=True)
        if move in self._letters or move in self._wrong:
            return Outcome(text=f"you guessed {move}, as you did before.", valid=False)
        if len(move) == 1:
            self._letters.add(move)
            revealed = hidden - self._list_letters().count("_") / self._length
            if "_" not in self._list_letters():
                return Outcome(
                    text=f"You found every letter of {self._secret}!", reward=0.5 * revealed + 0.5, over=True
                )
            return Outcome(
                text=f"the letter {move} is {'in' if revealed else 'not in'} my word.", reward=0.5 * revealed
            )
        if len(move) != self._length:
            return Outcome(
                text=f"you guessed {move}, {len(move)} letters, but my word has {self._length}.", valid=False
            )
        self._wrong.add(move)
        return Outcome(text=f"you guessed {move}, which is not my word.")

    def _sample_move(self, rng: Random) -> str:
        return rng.choice(string.ascii_uppercase if rng.random() < 0.5 else list_words(self._length, self.hardcore))
