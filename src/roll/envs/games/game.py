"""Base class of the games: turns, the rewards of GEM's language games, seeds, and copies."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, ClassVar, Generic, TypeVar

from roll.envs.base import Started, Stepped
from roll.envs.games.answers import boxed

__all__ = ["Game", "Outcome", "at_least"]

Move = TypeVar("Move")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a move.

    Args:
        text: The text for the player.
        reward: The move's reward.
        over: Whether the game is won or lost.
        valid: Whether the rules allow the move; an invalid move only costs the turn.
    """

    text: str
    reward: float = 0.0
    over: bool = False
    valid: bool = True


@dataclass(kw_only=True, eq=False)
class Game(ABC, Generic[Move]):
    r"""An environment whose actions are moves in `\boxed{...}`; each field is an argument, and None is drawn at reset.

    A win gives 1, or rewards that sum to 1 over the episode; a move on the way 0, unless the game has another reward;
    an invalid move 0; an action without a readable move -0.1, and the game ends. After the last turn the episode is
    terminated and truncated, as in GEM. Every observation is complete: the last event, and the board.
    """

    format_error_reward: ClassVar[float] = -0.1
    invalid_reward: ClassVar[float] = 0.0

    max_turns: int | None = 20
    _rng: Random = field(default_factory=Random, init=False, repr=False)
    _hints: Random = field(default_factory=Random, init=False, repr=False)
    _over: bool = field(default=True, init=False, repr=False)
    _turn: int = field(default=0, init=False, repr=False)
    _limit: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        at_least(1, max_turns=self.max_turns)
        self._check()

    def reset(self, seed: int | None = None) -> Started:
        if seed is not None:
            self._rng = Random(int(seed))  # the seed may be a NumPy integer
        self._hints = Random(self._rng.getrandbits(32))  # of its own: random actions change no episode
        self._over, self._turn = False, 0
        self._limit = self._begin(self._rng)
        return f"{self._rules()}\n{self._view()}".rstrip("\n"), {"state": self._state()}

    def step(self, action: str) -> Stepped:
        if self._over:
            raise RuntimeError("the episode is over, or none has begun: call reset() first")
        self._turn += 1
        answer = boxed(action)
        move = None if answer is None else self._read(answer)
        if move is None:
            self._over = True
            told = f"At turn {self._turn}, you gave no move that can be read. {self._form()}"
            return told, self.format_error_reward, True, self._turn == self._limit, {"state": "unreadable"}
        outcome = self._play(move)
        reward = outcome.reward if outcome.valid else self.invalid_reward
        if outcome.over:
            self._over = True
            return outcome.text, reward, True, False, {"state": f"over: {self._state()}"}
        told = f"At turn {self._turn}, {outcome.text}"
        if self._turn >= self._limit:
            self._over = True
            ending = f"{told} That was your last turn."
            return ending, self._at_the_end(outcome, reward), True, True, {"state": f"over: {self._state()}"}
        return f"{told}\n{self._view()}".rstrip("\n"), reward, False, False, {"state": self._state()}

    def sample_random_action(self) -> str:
        """Return a random well-formed move."""
        return f"\\boxed{{{self._some_move(self._hints)}}}"

    def spawn(self, same_state: bool = False, **overrides: Any) -> Any:
        """Return another game with the same arguments, changed by `overrides`; with `same_state`, a copy of the
        episode.

        Raises:
            TypeError: An argument does not exist.
            ValueError: `same_state` and `overrides` are both given, or a value is invalid.
        """
        if not same_state:
            return replace(self, **overrides)
        if overrides:
            raise ValueError("a copy with the same state has the same arguments: leave the overrides out")
        return copy.deepcopy(self)

    def close(self) -> None:
        """Do nothing: a game holds no resources."""

    @property
    def unwrapped(self) -> Any:
        return self

    def _check(self) -> None:
        """Raise a `ValueError` for invalid arguments."""

    @abstractmethod
    def _begin(self, rng: Random) -> int:
        """Draw an episode; return its number of turns."""

    @abstractmethod
    def _rules(self) -> str:
        """Return the rules, the first text that the player sees."""

    @abstractmethod
    def _form(self) -> str:
        """Return a sentence that explains how a move is written."""

    @abstractmethod
    def _view(self) -> str:
        """Return the board and the question, which are part of every observation."""

    @abstractmethod
    def _state(self) -> str:
        """Return a name of the state: equal for equal boards."""

    @abstractmethod
    def _read(self, answer: str) -> Move | None:
        """Parse a move from a short printable text; return None if it is not a move."""

    @abstractmethod
    def _play(self, move: Move) -> Outcome:
        """Make a move."""

    @abstractmethod
    def _some_move(self, rng: Random) -> str:
        """Return a random move as a player would write it into the box."""

    def _at_the_end(self, outcome: Outcome, reward: float) -> float:
        """Return the reward of the last turn, if the game was not won by it."""
        return reward


def at_least(least: int, **arguments: int | None) -> None:
    """Reject arguments that are too small.

    Raises:
        ValueError: An argument is too small; the message names the first one.
    """
    for name, value in arguments.items():
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}: give at least {least}, or None to have it drawn at every reset")
