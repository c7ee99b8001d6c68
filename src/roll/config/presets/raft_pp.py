"""RAFT++: rejection sampling with importance ratio and clip (arXiv 2504.11343).

    trained: rollouts with R > 0, each with A = R;   loss: PPO's clip, mean over a rollout's tokens

No baseline and no negative signal: entropy falls fast; the paper finds it close to GRPO early on, behind it later.
Works on groups of one. A group in which every answer is right is trained as well.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PRESET"]

PRESET: dict[str, Any] = {
    "advantage": {"mean": "none", "std": "none"},
    "filters": {"skip_zero_variance": False, "keep": "positive"},
}
