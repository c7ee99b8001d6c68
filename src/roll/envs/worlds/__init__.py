"""Environments other than the games. Each has its own file, which is imported on first use.

`WORLDS` maps every ID to its entry point and its options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["WORLDS"]

_PACKAGE = "roll.envs.worlds"

WORLDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "math:Generated-v0-easy": (f"{_PACKAGE}.mathematics:MathQuestion", {"level": 1}),
    "math:Generated-v0-hard": (f"{_PACKAGE}.mathematics:MathQuestion", {"level": 3}),
    **{f"logic:RuleTaker-v0-d{depth}": (f"{_PACKAGE}.logic:RuleTaker", {"depth": depth}) for depth in (0, 1, 2, 3, 5)},
    "qa:MultiHop-v0-easy": (f"{_PACKAGE}.multi_hop:make_multi_hop", {"hops": 2}),
    "qa:MultiHop-v0-hard": (f"{_PACKAGE}.multi_hop:make_multi_hop", {"hops": 3}),
    "code:Generated-v0": (f"{_PACKAGE}.code:CodeQuestion", {}),
    "terminal:Tasks-v0": (f"{_PACKAGE}.terminal:Terminal", {}),
    "web:Shopping-v0": (f"{_PACKAGE}.shopping:Shopping", {}),
    "house:Household-v0": (f"{_PACKAGE}.household:Household", {}),
    "gui:Click-v0-easy": (f"{_PACKAGE}.screen:Screen", {}),
    "gui:Click-v0-hard": (
        f"{_PACKAGE}.screen:Screen",
        {"rows": 6, "columns": 6, "num_widgets": 12, "num_targets": 3, "max_turns": 5},
    ),
    "dialogue:Booking-v0-easy": (f"{_PACKAGE}.dialogue:Booking", {"num_wishes": 3, "num_told": 1}),
    "dialogue:Booking-v0-hard": (f"{_PACKAGE}.dialogue:Booking", {"num_wishes": 6, "num_told": 0, "max_turns": 12}),
    "duel:Nim-v0": (f"{_PACKAGE}.two_player:TwoPlayer", {"game": "nim"}),
    "duel:TicTacToe-v0": (f"{_PACKAGE}.two_player:TwoPlayer", {"game": "tic_tac_toe"}),
    "duel:KuhnPoker-v0": (f"{_PACKAGE}.two_player:TwoPlayer", {"game": "kuhn_poker"}),
}
"""Entry point and options by environment ID."""
