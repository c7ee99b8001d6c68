"""CISPO (MiniMax-M1, arXiv 2506.13585).

    loss = - sum_t sg(clip(r_t, 0, 1 + e_high)) A log pi / sum_i |o_i|

The clip bounds a token's weight and never drops its gradient. The paper gives no e_high, and its lower bound is not
active; 1 + e_high = 3 is what public reproductions found stable, and a first update never reaches it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PRESET"]

PRESET: dict[str, Any] = {"gate": {"type": "stop_gradient", "lower": 0.0, "upper": 3.0}, "aggregation": "token_mean"}
