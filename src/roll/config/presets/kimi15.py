"""Kimi k1.5's policy mirror descent (arXiv 2501.12599, section 2.3.2).

    loss = -(R_i - mean_g R) log pi + tau/2 (log pi - log old)^2,   tau = 0.1

The squared log-ratio holds the policy near the old one in place of a clip; it acts from the second update on a batch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PRESET"]

PRESET: dict[str, Any] = {"advantage": {"std": "none"}, "gate": {"type": "squared_penalty", "tau": 0.1}}
