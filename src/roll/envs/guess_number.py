"""Guess a number, with `higher` and `lower` as hints."""

from __future__ import annotations

import copy
import re
from random import Random
from typing import Any

from roll.data.guess_number import build_question

__all__ = ["GuessNumber"]

_NUMBER_PATTERN = re.compile(r"\d+")
_MAX_DIGITS = 9


class GuessNumber:
    """An `Env` with a secret integer from 1 to `max_number`. The correct guess has a reward of 1, other guesses 0.

    The last number of an action is the guess. An action without a number uses up its turn and gets no hint. Every hint
    repeats the first question, so that the policy has to learn the answer's format only once.

    Args:
        max_number: Highest number, at least 2.
        num_turns: Number of guesses, at least 1.
        secret: The secret number; with `None`, it is sampled from the seed.
    """

    def __init__(self, max_number: int = 5, num_turns: int = 2, secret: int | None = None) -> None:
        if max_number < 2 or num_turns < 1:
            raise ValueError(
                f"max_number must be at least 2 and num_turns at least 1, got {max_number} and {num_turns}"
            )
        if secret is not None and not 1 <= secret <= max_number:
            raise ValueError(f"secret must be from 1 to {max_number}, got {secret}")
        self._max_number, self._num_turns, self._given = max_number, num_turns, secret
        self._secret = secret or 1
        self._history: list[str] = []

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._secret = self._given or Random(seed).randint(1, self._max_number)
        self._history = []
        return build_question(self._max_number), {"state": "start"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        numbers = _NUMBER_PATTERN.findall(action)
        guess = int(numbers[-1]) if numbers and len(numbers[-1]) <= _MAX_DIGITS else None
        if guess == self._secret:
            return "Right!", 1.0, True, False, {"state": "won"}
        if guess is None:
            hint, remembered = "That is not a number.", "?"
        else:
            direction = "higher" if guess < self._secret else "lower"
            hint, remembered = _format_hint(direction, guess), f"{guess} {direction}"
        self._history.append(remembered)
        over = len(self._history) >= self._num_turns
        return f"{hint} {build_question(self._max_number)}", 0.0, over, False, {"state": ", ".join(self._history)}

    def sample_random_action(self) -> str:
        return str(Random().randint(1, self._max_number))

    def spawn(self, same_state: bool = False, **overrides: Any) -> GuessNumber:
        """Return another game with the same settings, changed by `overrides`; with `same_state`, copy the episode."""
        if same_state:
            return copy.deepcopy(self)
        given: dict[str, Any] = {"max_number": self._max_number, "num_turns": self._num_turns, "secret": self._given}
        return GuessNumber(**{**given, **overrides})


def _format_hint(direction: str, guess: int) -> str:
    return f"No, my number is {direction} than {guess}."
