"""Find a code by black and white pegs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from roll.envs.games.answers import parse_numbers
from roll.envs.games.game import Game, Outcome, check_minimum

__all__ = ["Mastermind", "count_pegs"]

_SAMPLED_VARIANTS = [(2, 4, 10), (4, 6, 20), (4, 8, 30)]
"""Possible code lengths, numbers and turns if an argument is None."""


@dataclass(kw_only=True, eq=False)
class Mastermind(Game[tuple[int, ...]]):
    """A secret code of `code_length` numbers from 1 to `num_numbers`.

    Every black peg beyond the previous maximum gives 1 / `code_length`; these rewards sum to 1 when the code is found.
    """

    code_length: int | None = 4
    num_numbers: int | None = 6
    duplicate_numbers: bool = False

    def _check_arguments(self) -> None:
        check_minimum(1, code_length=self.code_length, num_numbers=self.num_numbers)
        if self.code_length and self.num_numbers and self.code_length > self.num_numbers and not self.duplicate_numbers:
            raise ValueError(
                f"code_length must be <= num_numbers without duplicate_numbers, got {self.code_length} and "
                f"{self.num_numbers}"
            )

    def _begin_episode(self, rng: Random) -> int:
        drawn = None in (self.code_length, self.num_numbers, self.max_turns)
        length, highest, turns = (
            rng.choice(_SAMPLED_VARIANTS) if drawn else (self.code_length, self.num_numbers, self.max_turns)
        )
        assert length and highest and turns
        self._length, self._highest = length, highest
        numbers_ = range(1, highest + 1)
        code = rng.choices(numbers_, k=length) if self.duplicate_numbers else rng.sample(numbers_, length)
        self._code = tuple(code)
        self._guesses: dict[tuple[int, ...], tuple[int, int]] = {}
        self._most_black = 0
        return turns

    def _describe_rules(self) -> str:
        repeated = "A number may occur more than once." if self.duplicate_numbers else "No number occurs twice."
        return (
            f"You are playing Mastermind. Find my code of {self._length} numbers, each from 1 to {self._highest}, "
            f"within {self._limit} turns. {repeated} For each guess I count black pegs, for numbers that are right and "
            f"in the right place, and white pegs, for numbers that are in the code at another place. "
            f"{self._describe_format()}"
        )

    def _describe_format(self) -> str:
        example = " ".join(str(1 + place % self._highest) for place in range(self._length))
        return f"Write your guess with spaces between the numbers, for example \\boxed{{{example}}}."

    def _render_view(self) -> str:
        return "Enter your guess."

    def _encode_state(self) -> str:
        return "; ".join(f"{guess} {result}" for guess, result in sorted(self._guesses.items())) or "start"

    def _parse_move(self, answer: str) -> tuple[int, ...] | None:
        numbers = parse_numbers(answer)
        return tuple(numbers) if numbers else None

    def _make_move(self, move: tuple[int, ...]) -> Outcome:
        guess = " ".join(map(str, move))
        if len(move) != self._length:
            return Outcome(
                text=f"you guessed {guess}, {len(move)} numbers, but the code has {self._length}.", valid=False
            )
        if not all(1 <= number <= self._highest for number in move):
            return Outcome(
                text=f"you guessed {guess}, with a number that is not from 1 to {self._highest}.", valid=False
            )
        if move in self._guesses:
            return Outcome(text=f"you guessed {guess}, as you did before.", valid=False)
        black, white = self._guesses[move] = count_pegs(self._code, move)
        reward = max(0, black - self._most_black) / self._length
        self._most_black = max(black, self._most_black)
        if black == self._length:
            return Outcome(text=f"Right! The code is {guess}.", reward=reward, over=True)
        return Outcome(text=f"you guessed {guess}: {black} black and {white} white peg(s).", reward=reward)

    def _sample_move(self, rng: Random) -> str:
        distinct = self._length <= self._highest
        numbers_ = range(1, self._highest + 1)
        code = rng.sample(numbers_, self._length) if distinct else rng.choices(numbers_, k=self._length)
        return " ".join(map(str, code))


def count_pegs(code: tuple[int, ...], guess: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers of black pegs (correct number in the correct position) and white pegs (correct number in
    another position)."""
    black = sum(a == b for a, b in zip(code, guess, strict=True))
    return black, (Counter(code) & Counter(guess)).total() - black
