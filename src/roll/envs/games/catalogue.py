"""Names of the games: what builds each, and its arguments. GEM's 39, and ours."""

from __future__ import annotations

from typing import Any

__all__ = ["GAMES"]

_RANDOM: dict[str, Any] = {"max_turns": None}


def _variants(game: str, entry_point: str, **variants: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    return {
        f"game:{game}-v0-{name.replace('_', '-')}": (f"roll.envs.games.{entry_point}", options)
        for name, options in variants.items()
    }


GAMES: dict[str, tuple[str, dict[str, Any]]] = {
    **_variants(
        "GuessTheNumber",
        "guess_the_number:GuessTheNumber",
        easy={"min_number": 1, "max_number": 10, "max_turns": 4},
        hard={"min_number": 1, "max_number": 50, "max_turns": 7},
        random={"min_number": None, "max_number": None, "max_turns": None},
    ),
}
