"""Decoupled PPO (AReaL, arXiv 2505.24298; Hilton 2021, arXiv 2110.00641).

    loss = -1/n sum_i 1/|o_i| sum_t sg(prox / behavior) min( (pi/prox) A, clip(pi/prox, 1 - e, 1 + e) A )

prox is the trainer's policy before the update, behavior the engine's policy at sampling: the trust region lies around
the newest policy, however stale the data is. The factor is truncated at `correction.upper` (5), which bounds its
variance. Mean over an answer's tokens, then over answers, as in GRPO; AReaL's code takes one mean over all tokens
(`aggregation: token_mean`).
"""

WHEN = "Stale rollouts and several updates per batch."
COST = "one more forward pass when there are several updates"
STABILITY = "steady off-policy"
PRESET = {"correction": {"level": "token", "upper": 5.0}}
