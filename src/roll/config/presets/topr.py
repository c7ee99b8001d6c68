"""TOPR: tapered off-policy REINFORCE (arXiv 2503.14286; per token as in ROLL Flash, arXiv 2510.11345).

    A > 0: -A log pi;   A <= 0: -sg(clip(r, 0, 1)) A log pi

Right answers are imitated without a ratio, so that old ones still teach; wrong ones count less the less likely they
have become. The sign is the advantage's. The TOPR paper takes the ratio of the whole answer: `ratio.level: sequence`
with `ratio.reduce: product`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["COST", "PRESET", "STABILITY", "WHEN"]

WHEN = "Stale rollouts, right answers rare."
COST = "1 model"
STABILITY = "steady off-policy; may lose entropy"
PRESET: dict[str, Any] = {"gate": {"type": "sign_split"}}
