"""Decoupled PPO (AReaL, arXiv 2505.24298; Hilton 2021, arXiv 2110.00641).

    loss = -1/n sum_i 1/|o_i| sum_t sg(prox / behavior) min( (pi/prox) A, clip(pi/prox, 1 - e, 1 + e) A )

prox is the trainer's policy before the update, and behavior is the engine's policy at sampling. The trust region is
therefore centered on the newest policy, even if the data is stale. The importance weight prox / behavior is truncated
at `correction.upper` (5), which bounds its variance. As in GRPO, the loss is the mean over an answer's tokens, and then
over answers; AReaL's code averages over all tokens (`aggregation: token_mean`).
"""

USE_CASE = "Stale rollouts and several updates per batch."
COST = "one more forward pass if there are several updates"
STABILITY = "stable off-policy"
PRESET = {"correction": {"level": "token", "upper": 5.0}}
