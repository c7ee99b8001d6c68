"""Lite PPO (Tricks or Traps, arXiv 2508.08221): group mean, batch deviation, token-level loss.

    A_i = (R_i - mean_g R) / (std_batch R + eps);   loss = -sum_i sum_t min(r A, clip(r, 0.8, 1.2) A) / sum_i |o_i|

No critic, no KL. The batch's deviation is that of the rollouts of a domain. With a single group its advantages are
GRPO's.
"""

WHEN = "Base models, rewards of any spread."
COST = "1 model"
STABILITY = "steady"
PRESET = {"advantage": {"std": "batch"}, "aggregation": "token_mean"}
