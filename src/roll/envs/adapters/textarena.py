"""Games of the package `textarena`: `textarena:Wordle-v0`. Each observation contains only the new messages."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from roll.envs.adapters.packages import RandomState, import_package
from roll.errors import ConfigError
from roll.registry import did_you_mean
from roll.user_code import load_function

__all__ = ["TextArenaEnv", "make"]


class TextArenaEnv:
    """An `Env` of one seat; in multi-player games, `opponent` plays the other seats.

    The last step returns TextArena's reward for this seat. Actions are written in the format of the game.

    Args:
        env: The result of `textarena.make` for a name that ends in `-raw`, whose observations are lists of messages.
        num_players: Number of players.
        opponent: Returns the action of an opponent's seat, given the seat's observations since its last move; `None`
            for single-player games.
    """

    def __init__(self, env: Any, num_players: int = 1, opponent: Callable[[str], str] | None = None) -> None:
        if num_players > 1 and opponent is None:
            raise ConfigError(
                f"a game with {num_players} players requires an `opponent`: set it to a function, or file.py:function."
            )
        self.env = env
        self._num_players, self._opponent = num_players, opponent
        self._randomness = RandomState()
        self._random = Random(0)
        self._seat = 0

    @property
    def unwrapped(self) -> Any:
        """TextArena's game inside its wrappers."""
        inner = self.env
        while hasattr(inner, "env"):
            inner = inner.env
        return inner

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """See `Env`."""
        self._random = Random(self._random.getrandbits(32) if seed is None else seed)
        self._seat = self._random.randrange(self._num_players)
        drawn = self._random.getrandbits(31)
        self._randomness.seed(drawn)
        with self._randomness.activate():
            self.env.reset(num_players=self._num_players, seed=drawn)
            observation, _ = self._play_other_seats(ended=False)
        return observation, {"state": observation, "seat": self._seat}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `Env`."""
        with self._randomness.activate():
            ended, _ = self.env.step(action=action)
            observation, ended = self._play_other_seats(bool(ended))
            if not ended:
                return observation, 0.0, False, False, {"state": observation}
            rewards, about = self.env.close()
        reward = float((rewards or {}).get(self._seat, 0.0))
        about = (about or {}).get(self._seat, {})
        return observation, reward, True, False, {"state": observation, "invalid": bool(about.get("invalid_move"))}

    def _play_other_seats(self, ended: bool) -> tuple[str, bool]:
        """Play the other seats' moves; return the agent's new observation, and whether the game has ended."""
        while not ended:
            seat, messages = self.env.get_observation()
            if seat == self._seat:
                return _join_messages(messages), False
            assert self._opponent is not None
            ended, _ = self.env.step(action=str(self._opponent(_join_messages(messages))))
        return _join_messages(self.unwrapped.state.observations.get(self._seat, [])), True

    def sample_random_action(self) -> str:
        """Return a random digit in brackets. It may be illegal, because TextArena does not list legal actions."""
        return f"[{self._random.randrange(10)}]"


def _join_messages(messages: Any) -> str:
    if isinstance(messages, str):
        return messages
    return "\n".join(str(message[1]) for message in messages)


def make(name: str, *, num_players: int = 1, opponent: str | Callable[[str], str] | None = None, **options: Any) -> Any:
    """Build `textarena.make(name, **options)`.

    Raises:
        ConfigError: The package is missing, has no game of this name, or a multi-player game has no opponent.
    """
    textarena = import_package("textarena", "textarena", f"environment 'textarena:{name}'")
    env = _make_game(textarena, name, options)
    return TextArenaEnv(
        env, num_players, load_function(opponent, "opponent") if isinstance(opponent, str) else opponent
    )


def _make_game(textarena: Any, name: str, options: dict[str, Any]) -> Any:
    """Build the variant of a game without wrappers: `NAME-raw`, or `NAME` if the game has no default wrappers."""
    known = textarena.envs.registration.ENV_REGISTRY
    raw = name if name.endswith("-raw") else f"{name}-raw"
    if raw not in known and name in known and not known[name].default_wrappers:
        raw = name
    if raw not in known:
        if name in known:
            raise ConfigError(
                f"TextArena's game '{name}' has no variant '{raw}', which ROLL requires: choose another game."
            )
        games = sorted({game.removesuffix("-raw") for game in known})
        raise ConfigError(f"TextArena has no game '{name}'.{did_you_mean(name, games)}")
    try:
        return textarena.make(raw, **options)
    except Exception as error:  # games need packages and word lists of their own, and some do not even compile
        line = next((line for line in str(error).splitlines() if any(map(str.isalnum, line))), "")  # no rows of stars
        problem = f"{type(error).__name__}: {line.strip()}".removesuffix(": ")
        raise ConfigError(f"environment 'textarena:{name}' cannot be created: {_shorten(problem)}") from error


def _shorten(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:399]}…"
