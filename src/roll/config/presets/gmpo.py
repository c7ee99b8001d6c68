"""GMPO: geometric-mean policy optimisation (arXiv 2507.20673).

    loss = -1/G sum_i A_i exp( 1/|o_i| sum_t clip-one-sided(log r_t, e) ),   e = 0.4

A token's log-ratio counts only up to ± 0.4 in the direction that raises the objective; the geometric mean keeps single
tokens from dominating an answer.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PRESET"]

PRESET: dict[str, Any] = {"ratio": {"level": "sequence", "token_limit": 0.4}, "gate": {"type": "none"}}
