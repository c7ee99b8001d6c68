"""Lite PPO (Tricks or Traps, arXiv 2508.08221): group mean, batch standard deviation, token-level loss.

    A_i = (R_i - mean_g R) / (std_batch R + eps);   loss = -sum_i sum_t min(r A, clip(r, 0.8, 1.2) A) / sum_i |o_i|

There is no critic and no KL term. std_batch is computed over all rollouts of a domain. With a single group, the
advantages are the same as in GRPO.
"""

USE_CASE = "Base models; rewards of any scale."
COST = "1 model"
STABILITY = "stable"
PRESET = {"advantage": {"std": "batch"}, "aggregation": "token_mean"}
