"""Two-player games: against a scripted, a random or a user's opponent, or with a model on either side.

Match(game): whose turn ─► observe(seat) ─► act(text) ─► … ─► rewards of both seats     two models, or one twice
TwoPlayer: an `Env` of one seat; the opponent plays the other
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from roll.envs.base import Started, Stepped, then
from roll.envs.worlds.board_games import GAMES, Game
from roll.envs.worlds.world import FORMAT_ERROR, World, final_answer
from roll.errors import ConfigError
from roll.registry import did_you_mean
from roll.user_code import load_function

__all__ = ["Match", "Opponent", "TwoPlayer"]

Opponent: TypeAlias = Callable[[str, list[str]], Any]
r"""A function from its seat's observation and the legal moves to text with a move in `\boxed{}`; may be async."""


class Match:
    """One game between two seats, 0 and 1. The players observe and act through it.

    Args:
        game: The game's name: see `GAMES`.
        seed: Seed of the deal.
    """

    def __init__(self, game: str, seed: int | None = None) -> None:
        if game not in GAMES:
            raise ConfigError(
                f"unknown game of two '{game}'.{did_you_mean(game, list(GAMES))} Known: {', '.join(GAMES)}."
            )
        self._game: Game = GAMES[game](Random(seed))
        self.rewards: tuple[float, float] | None = None
        """Rewards of seats 0 and 1, from −1 to 1, with sum 0; `None` while the game is running."""

    @property
    def turn(self) -> int:
        """The seat whose move it is."""
        return self._game.turn

    def moves(self) -> list[str]:
        """Return the legal moves."""
        return self._game.moves()

    def best(self) -> str:
        """Return an expert's move; ties are broken by the order of moves."""
        return self._game.best()

    def observe(self, seat: int) -> str:
        """Return the observation of a seat, with the legal moves if it is its turn."""
        seen = self._game.seen(seat)
        return f"{seen}\nMoves: {', '.join(self.moves())}. Put yours into \\boxed{{}}." if seat == self.turn else seen

    def act(self, text: str) -> bool:
        r"""Make the move in `\boxed{}` for the seat whose turn it is; return whether it was legal. Otherwise it has no
        effect.
        """
        assert self.rewards is None, "the game is over"
        move = (final_answer(text) or "").casefold()
        if move not in self.moves():
            return False
        self._game.play(move)
        self.rewards = self._game.rewards()
        return True

    def state(self, seat: int) -> str:
        """Return the name of the seat's information state."""
        return f"{seat} {self._game.seen(seat)}"


@dataclass(eq=False)
class TwoPlayer(World):
    """One seat of a `Match`: 1 for a win, 0 for a draw, −1 for a loss (Kuhn poker: half the chips), −0.1 for no move.

    Args:
        game: `nim`, `tic_tac_toe` or `kuhn_poker`.
        opponent: `random`, `expert`, a function (`Opponent`), or the path of one: `file.py:function`.
        seat: The seat; 0 begins; `None` draws it from the seed.
        max_turns: Number of turns after which the episode is truncated.
    """

    game: str = "tic_tac_toe"
    opponent: str | Opponent = "random"
    seat: int | None = None
    max_turns: int = 20

    def __post_init__(self) -> None:
        if self.seat not in (0, 1, None) or self.max_turns < 1:
            raise ValueError(f"seat is 0, 1 or nothing and max_turns at least 1, got {self.seat} and {self.max_turns}")
        given = self.opponent
        self._opponent = load_function(given, "opponent") if isinstance(given, str) and ":" in given else given
        if isinstance(self._opponent, str) and self._opponent not in ("random", "expert"):
            raise ValueError(f"opponent is 'random', 'expert', a function or 'file.py:function', got '{given}'")
        self._match = Match(self.game, 0)

    def reset(self, seed: int | None = None) -> Any:
        """See `Env`; returns a coroutine if the opponent moves and is an async function."""
        self.begin(seed)
        self._match = Match(self.game, self.random.randrange(2**31))
        self._seat = self.random.randrange(2) if self.seat is None else self.seat
        self._turn = 0
        return then(self._answered(), self._begun)

    def step(self, action: str) -> Any:
        """See `Env`; returns a coroutine if the opponent moves and is an async function."""
        self._turn += 1
        if not self._match.act(action):
            return self._stepped(FORMAT_ERROR, "That is no move.\n")
        return then(self._answered(), lambda note: self._stepped(0.0, note))

    def _begun(self, note: str) -> Started:
        return note + self._match.observe(self._seat), self._info()

    def _stepped(self, reward: float, note: str) -> Stepped:
        match = self._match
        observation = note + match.observe(self._seat)
        if match.rewards is not None:
            return observation, match.rewards[self._seat], True, False, self._info()
        return observation, reward, False, self._turn >= self.max_turns, self._info()

    def _answered(self, note: str = "") -> Any:
        """Play the opponent's moves until it is the agent's turn; return a note for each move that was not legal."""
        if self._match.rewards is not None or self._match.turn == self._seat:
            return note
        return then(self._their_text(), lambda text: self._answered(note + self._moved(text)))

    def _their_text(self) -> Any:
        match = self._match
        if self._opponent == "random":
            return f"\\boxed{{{self.random.choice(match.moves())}}}"
        if self._opponent == "expert":
            return f"\\boxed{{{match.best()}}}"
        assert callable(self._opponent)
        return self._opponent(match.observe(match.turn), match.moves())

    def _moved(self, text: Any) -> str:
        """Make the opponent's move: its first legal one if its text names none."""
        if isinstance(text, str) and self._match.act(text):
            return ""
        self._match.act(f"\\boxed{{{self._match.moves()[0]}}}")
        return "The opponent named no move; its first one was made.\n"

    def _info(self) -> dict[str, Any]:
        moves = [] if self._match.rewards is not None else self._match.moves()
        return {"state": self._match.state(self._seat), "admissible": [f"\\boxed{{{move}}}" for move in moves]}

    def sample_random_action(self) -> str:
        """Return a random legal move."""
        return f"\\boxed{{{self.chance.choice(self._match.moves())}}}" if self._match.rewards is None else "\\boxed{}"

    def solution(self) -> str:
        """Return an expert's next move."""
        return f"\\boxed{{{self._match.best()}}}"
