"""Two-player games: against a scripted or random opponent or a user-defined function, or with a model in both seats.

Match(game): whose turn ─► observe(seat) ─► act(text) ─► … ─► rewards of both seats     two models, or one twice
TwoPlayer: an `Env` of one seat; the opponent plays the other
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from roll.envs.base import ResetResult, StepResult, map_result
from roll.envs.worlds.board_games import GAMES, Game
from roll.envs.worlds.world import FORMAT_ERROR_REWARD, World, extract_answer
from roll.errors import ConfigError
from roll.registry import did_you_mean
from roll.user_code import load_function

__all__ = ["Match", "Opponent", "TwoPlayer"]

Opponent: TypeAlias = Callable[[str, list[str]], Any]
r"""A function that gets its seat's observation and the legal moves, and returns text with a move in `\boxed{}`; may be
async.
"""


class Match:
    """One game between two seats, 0 and 1. Players observe the game and make moves through this object.

    Args:
        game: The game's name: see `GAMES`.
        seed: Seed of the deal.
    """

    def __init__(self, game: str, seed: int | None = None) -> None:
        if game not in GAMES:
            raise ConfigError(
                f"unknown two-player game '{game}'.{did_you_mean(game, list(GAMES))} Known: {', '.join(GAMES)}."
            )
        self._game: Game = GAMES[game](Random(seed))
        self.rewards: tuple[float, float] | None = None
        """Rewards of seats 0 and 1, from −1 to 1, with sum 0; `None` while the game is running."""

    @property
    def turn(self) -> int:
        """The seat that moves next."""
        return self._game.turn

    def list_moves(self) -> list[str]:
        """Return the legal moves."""
        return self._game.list_moves()

    def find_best_move(self) -> str:
        """Return an expert's move; ties are broken by the order of moves."""
        return self._game.find_best_move()

    def observe(self, seat: int) -> str:
        """Return a seat's observation, with the legal moves if the seat moves next."""
        seen = self._game.describe_view(seat)
        return (
            f"{seen}\nMoves: {', '.join(self.list_moves())}. Put yours into \\boxed{{}}." if seat == self.turn else seen
        )

    def act(self, text: str) -> bool:
        r"""Make the move in `\boxed{}` for the seat whose turn it is; return whether it was legal. An illegal move has
        no effect.
        """
        assert self.rewards is None, "the game is over"
        move = (extract_answer(text) or "").casefold()
        if move not in self.list_moves():
            return False
        self._game.play(move)
        self.rewards = self._game.compute_rewards()
        return True

    def encode_state(self, seat: int) -> str:
        """Return a string that identifies the seat's information state."""
        return f"{seat} {self._game.describe_view(seat)}"


@dataclass(eq=False)
class TwoPlayer(World):
    """An environment for one seat of a `Match`; the opponent plays the other seat.

    The reward is 1 for a win, 0 for a draw and −1 for a loss (in Kuhn poker, 0.5 per chip), and −0.1 for an answer
    without a legal move.

    Args:
        game: `nim`, `tic_tac_toe` or `kuhn_poker`.
        opponent: `random`, `expert`, a function (`Opponent`), or the path of a function: `file.py:function`.
        seat: The agent's seat; 0 moves first; `None` samples it from the seed.
        max_turns: Number of turns after which the episode is truncated.
    """

    game: str = "tic_tac_toe"
    opponent: str | Opponent = "random"
    seat: int | None = None
    max_turns: int = 20

    def __post_init__(self) -> None:
        if self.seat not in (0, 1, None) or self.max_turns < 1:
            raise ValueError(
                f"seat must be 0, 1 or None, and max_turns at least 1, got {self.seat} and {self.max_turns}"
            )
        given = self.opponent
        self._opponent = load_function(given, "opponent") if isinstance(given, str) and ":" in given else given
        if isinstance(self._opponent, str) and self._opponent not in ("random", "expert"):
            raise ValueError(f"opponent must be 'random', 'expert', a function or 'file.py:function', got '{given}'")
        self._match = Match(self.game, 0)

    def reset(self, seed: int | None = None) -> Any:
        """See `Env`. Returns a coroutine if it is the opponent's turn and the opponent is an async function."""
        self.begin(seed)
        self._match = Match(self.game, self.random.randrange(2**31))
        self._seat = self.random.randrange(2) if self.seat is None else self.seat
        self._turn = 0
        return map_result(self._play_opponent(), self._finish_reset)

    def step(self, action: str) -> Any:
        """See `Env`. Returns a coroutine if it is the opponent's turn and the opponent is an async function."""
        self._turn += 1
        if not self._match.act(action):
            return self._finish_step(FORMAT_ERROR_REWARD, "That is not a legal move.\n")
        return map_result(self._play_opponent(), lambda note: self._finish_step(0.0, note))

    def _finish_reset(self, note: str) -> ResetResult:
        return note + self._match.observe(self._seat), self._build_info()

    def _finish_step(self, reward: float, note: str) -> StepResult:
        match = self._match
        observation = note + match.observe(self._seat)
        if match.rewards is not None:
            return observation, match.rewards[self._seat], True, False, self._build_info()
        return observation, reward, False, self._turn >= self.max_turns, self._build_info()

    def _play_opponent(self, note: str = "") -> Any:
        """Play the opponent's moves until it is the agent's turn or the game is over.

        Returns `note`, followed by a note for each illegal move of the opponent. The result is a coroutine if the
        opponent is an async function.
        """
        if self._match.rewards is not None or self._match.turn == self._seat:
            return note
        return map_result(
            self._request_opponent_move(), lambda text: self._play_opponent(note + self._make_opponent_move(text))
        )

    def _request_opponent_move(self) -> Any:
        match = self._match
        if self._opponent == "random":
            return f"\\boxed{{{self.random.choice(match.list_moves())}}}"
        if self._opponent == "expert":
            return f"\\boxed{{{match.find_best_move()}}}"
        assert callable(self._opponent)
        return self._opponent(match.observe(match.turn), match.list_moves())

    def _make_opponent_move(self, text: Any) -> str:
        """Make the opponent's move in `text`. If it is not legal, make the first legal move and return a note on it."""
        if isinstance(text, str) and self._match.act(text):
            return ""
        self._match.act(f"\\boxed{{{self._match.list_moves()[0]}}}")
        return "The opponent gave no legal move; its first legal move was made.\n"

    def _build_info(self) -> dict[str, Any]:
        moves = [] if self._match.rewards is not None else self._match.list_moves()
        return {"state": self._match.encode_state(self._seat), "admissible": [f"\\boxed{{{move}}}" for move in moves]}

    def sample_random_action(self) -> str:
        """Return a random legal move."""
        return (
            f"\\boxed{{{self.action_random.choice(self._match.list_moves())}}}"
            if self._match.rewards is None
            else "\\boxed{}"
        )

    def solution(self) -> str:
        """Return an expert's next move."""
        return f"\\boxed{{{self._match.find_best_move()}}}"
