"""StarPO: a trajectory of turns as one sequence of actions (RAGEN, arXiv 2504.20073).

    GRPO over all tokens that the policy wrote, whatever turn they are in; tokens of the environment are masked

StarPO-S: `filters.top_variance: 0.25` (train the prompts with the largest deviation of reward) and `gate.high: 0.28`.
RAGEN adds an entropy bonus of 0.001, which needs a pass over the vocabulary and is off here.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PRESET"]

PRESET: dict[str, Any] = {"aggregation": "token_mean"}
