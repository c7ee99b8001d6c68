"""Dual-clip PPO (arXiv 1912.09729).

    A >= 0: min(r A, clip(r) A);   A < 0: max( min(r A, clip(r) A), c A ),   c = 3

Without the second bound, a token with a negative advantage and a large ratio has an unbounded loss.
"""

USE_CASE = "Several updates per batch, large negative advantages."
COST = "1 model"
STABILITY = "more stable than grpo off-policy"
PRESET = {"gate": {"type": "dual_clip", "bound": 3.0}}
