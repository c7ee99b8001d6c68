"""TIS: truncated importance sampling (ROLL Flash, arXiv 2510.11345, section on off-policy losses).

    loss = - sum_t sg(clip(r_t, 0, 1)) A log pi

A token counts at most once: where the new policy makes it likelier than the old one did, its weight stays 1.
"""

from __future__ import annotations

from typing import Any

__all__ = ["COST", "PRESET", "STABILITY", "WHEN"]

WHEN = "Stale rollouts (asynchronous training)."
COST = "1 model"
STABILITY = "steady off-policy"
PRESET: dict[str, Any] = {"gate": {"type": "stop_gradient", "lower": 0.0, "upper": 1.0}}
