"""Guess a number with `higher` and `lower` as hints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from roll.envs.games.answers import parse_numbers
from roll.envs.games.game import Game, Outcome, check_minimum

__all__ = ["GuessTheNumber"]


@dataclass(kw_only=True, eq=False)
class GuessTheNumber(Game[int]):
    """A secret number from `min_number` to `max_number`.

    The reward of the last turn is 1 - |guess - secret| / range. If a bound is None, the lowest number is sampled from 1
    to 10, and the highest is 5 to 50 above it.
    """

    min_number: int | None = 1
    max_number: int | None = 20

    def _check_arguments(self) -> None:
        check_minimum(0, min_number=self.min_number)
        if self.min_number is not None and self.max_number is not None and self.max_number <= self.min_number:
            raise ValueError(f"max_number must be greater than min_number, got {self.max_number} and {self.min_number}")

    def _begin_episode(self, rng: Random) -> int:
        low, high = self.min_number, self.max_number
        if low is None or high is None:
            low = rng.randint(1, 10)
            high = low + rng.randint(5, 50)
        self._low, self._high = low, high
        self._secret = rng.randint(low, high)
        self._guesses: dict[int, str] = {}
        return self.max_turns or math.ceil(math.sqrt(high - low)) + 1

    def _describe_rules(self) -> str:
        return (
            f"You are playing Guess The Number. I have chosen a whole number from {self._low} to {self._high}. Find it "
            f"within {self._limit} turns. After each guess I say whether my number is higher or lower. "
            f"{self._describe_format()}"
        )

    def _describe_format(self) -> str:
        return f"Write your guess as \\boxed{{number}}, for example \\boxed{{{self._low}}}."

    def _render_view(self) -> str:
        return "Enter your next guess." if self._turn else "Enter your first guess."

    def _encode_state(self) -> str:
        return ", ".join(f"{guess} {hint}" for guess, hint in sorted(self._guesses.items())) or "start"

    def _parse_move(self, answer: str) -> int | None:
        numbers = parse_numbers(answer, 1)
        return numbers[0] if numbers else None

    def _make_move(self, move: int) -> Outcome:
        self._last = move
        if not self._low <= move <= self._high:
            return Outcome(text=f"you guessed {move}, which is not from {self._low} to {self._high}.", valid=False)
        if move in self._guesses:
            return Outcome(text=f"you guessed {move}, as you did before: {self._guesses[move]}.", valid=False)
        if move == self._secret:
            return Outcome(text=f"Right! The number is {move}.", reward=1.0, over=True)
        self._guesses[move] = "higher" if move < self._secret else "lower"
        return Outcome(text=f"you guessed {move}, and my number is {self._guesses[move]} than {move}.")

    def _compute_last_reward(self, outcome: Outcome, reward: float) -> float:
        if not self._low <= self._last <= self._high:
            return reward
        return 1 - abs(self._last - self._secret) / (self._high - self._low)

    def _sample_move(self, rng: Random) -> str:
        return str(rng.randint(self._low, self._high))
