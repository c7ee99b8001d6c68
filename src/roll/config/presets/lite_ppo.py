"""Lite PPO (Tricks or Traps, arXiv 2508.08221): group mean, batch deviation, token-level loss.

    A_i = (R_i - mean_g R) / (std_batch R + eps);   loss: PPO's clip (0.2), mean over tokens;   no critic, no KL

With a single group its advantages are GRPO's.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PRESET"]

PRESET: dict[str, Any] = {"advantage": {"std": "batch"}, "aggregation": "token_mean"}
