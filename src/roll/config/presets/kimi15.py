"""Kimi k1.5's policy mirror descent (arXiv 2501.12599, section 2.3.2).

    loss = 1/G sum_i 1/|o_i| sum_t -(R_i - mean_g R) log pi_t + tau/2 (log pi_t - log old_t)^2,   tau = 0.1

The squared log-ratio replaces the clip as the trust region. It has no effect in the first update on a batch. The loss
is per token, as in ROLL Flash (arXiv 2510.11345); the paper squares the log-ratio of the whole answer and does not
specify tau.
"""

USE_CASE = "Several updates per batch, with a squared penalty instead of a clip."
COST = "1 model"
STABILITY = "stable; tau bounds the distance from the old policy"
PRESET = {"advantage": {"std": "none"}, "gate": {"type": "squared_penalty", "tau": 0.1}}
