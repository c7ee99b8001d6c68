"""Base class of the games: turns, the rewards of GEM's language games, seeds, and copies."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, ClassVar, Generic, TypeVar

from roll.envs.base import ResetResult, StepResult
from roll.envs.games.answers import extract_box

__all__ = ["Game", "Outcome", "check_minimum"]

Move = TypeVar("Move")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a move.

    Args:
        text: The text for the player.
        reward: The move's reward.
        over: Whether the game is won or lost.
        valid: Whether the rules allow the move; an invalid move only uses up the turn.
    """

    text: str
    reward: float = 0.0
    over: bool = False
    valid: bool = True


@dataclass(kw_only=True, eq=False)
class Game(ABC, Generic[Move]):
    r"""An environment whose actions are moves in `\boxed{...}`.

    Each field is a constructor argument; if it is None, its value is sampled at every reset.

    Winning gives a total reward of 1, either with the last move or in parts over the episode. Other moves give 0 unless
    the game defines a reward; invalid moves give 0. An action that cannot be parsed gives -0.1 and ends the game. After
    the last turn the episode is both terminated and truncated, as in GEM. Every observation contains the last event and
    the board.
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
        check_minimum(1, max_turns=self.max_turns)
        self._check_arguments()

    def reset(self, seed: int | None = None) -> ResetResult:
        if seed is not None:
            self._rng = Random(int(seed))  # the seed may be a NumPy integer
        self._hints = Random(self._rng.getrandbits(32))  # separate, so that random actions change no episode
        self._over, self._turn = False, 0
        self._limit = self._begin_episode(self._rng)
        return f"{self._describe_rules()}\n{self._render_view()}".rstrip("\n"), {"state": self._encode_state()}

    def step(self, action: str) -> StepResult:
        if self._over:
            raise RuntimeError("no episode is running: call reset() first")
        self._turn += 1
        answer = extract_box(action)
        move = None if answer is None else self._parse_move(answer)
        if move is None:
            self._over = True
            text = f"At turn {self._turn}, your move cannot be parsed. {self._describe_format()}"
            return text, self.format_error_reward, True, self._turn == self._limit, {"state": "unreadable"}
        outcome = self._make_move(move)
        reward = outcome.reward if outcome.valid else self.invalid_reward
        if outcome.over:
            self._over = True
            return outcome.text, reward, True, False, {"state": f"over: {self._encode_state()}"}
        text = f"At turn {self._turn}, {outcome.text}"
        if self._turn >= self._limit:
            self._over = True
            ending = f"{text} That was your last turn."
            return (
                ending,
                self._compute_last_reward(outcome, reward),
                True,
                True,
                {"state": f"over: {self._encode_state()}"},
            )
        return f"{text}\n{self._render_view()}".rstrip("\n"), reward, False, False, {"state": self._encode_state()}

    def sample_random_action(self) -> str:
        """Return a random well-formed move."""
        return f"\\boxed{{{self._sample_move(self._hints)}}}"

    def spawn(self, same_state: bool = False, **overrides: Any) -> Any:
        """Return another game with the same arguments, changed by `overrides`; with `same_state`, a copy of this
        episode.

        Raises:
            TypeError: An argument does not exist.
            ValueError: `same_state` and `overrides` are both given, or a value is invalid.
        """
        if not same_state:
            return replace(self, **overrides)
        if overrides:
            raise ValueError("same_state and overrides cannot be combined: remove one of them")
        return copy.deepcopy(self)

    def close(self) -> None:
        """Do nothing; a game has no resources."""

    @property
    def unwrapped(self) -> Any:
        return self

    def _check_arguments(self) -> None:
        """Raise a `ValueError` for invalid arguments."""

    @abstractmethod
    def _begin_episode(self, rng: Random) -> int:
        """Generate an episode with `rng`; return its maximum number of turns."""

    @abstractmethod
    def _describe_rules(self) -> str:
        """Return the rules of the game; they are the start of the first observation."""

    @abstractmethod
    def _describe_format(self) -> str:
        """Return a sentence that explains how a move is written."""

    @abstractmethod
    def _render_view(self) -> str:
        """Return the board and the request for a move, which are part of every observation."""

    @abstractmethod
    def _encode_state(self) -> str:
        """Return a string that identifies the state; equal boards give equal strings."""

    @abstractmethod
    def _parse_move(self, answer: str) -> Move | None:
        """Parse a move from short printable text; return None if the text is not a move."""

    @abstractmethod
    def _make_move(self, move: Move) -> Outcome:
        """Apply a move to the game and return its outcome."""

    @abstractmethod
    def _sample_move(self, rng: Random) -> str:
        """Return a random move as a player would write it into the box."""

    def _compute_last_reward(self, outcome: Outcome, reward: float) -> float:
        """Return the reward of the last turn, given the move's `reward`. Not called if the move ended the game."""
        return reward


def check_minimum(minimum: int, **arguments: int | None) -> None:
    """Check that each argument is None or at least `minimum`.

    Raises:
        ValueError: An argument is too small; the message names the first such argument.
    """
    for name, value in arguments.items():
        if value is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, or None to sample it at every reset, got {value}")
