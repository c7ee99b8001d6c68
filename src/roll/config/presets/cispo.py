"""CISPO (MiniMax-M1, arXiv 2506.13585).

    r_t = pi / mu;   mu is the engine's policy, which sampled the token
    loss = - sum_t sg(clip(r_t, 0, 1 + e_high)) A_i log pi / sum_i |o_i|

The clip bounds a token's weight but never removes its gradient. As in the paper, there is no lower bound. The paper
does not specify e_high; here, 1 + e_high is 3. In the first update on fresh rollouts, ratios are near 1 and do not
reach this bound. The ratio to mu already covers staleness, mismatch and earlier updates on the batch, so no correction
is applied.
"""

USE_CASE = "Several updates per batch, stale rollouts; rare tokens must keep their gradient."
COST = "1 model"
STABILITY = "stable; no trust region"
PRESET = {
    "ratio": {"against": "rollout"},
    "gate": {"type": "stop_gradient", "lower": 0.0, "upper": 3.0},
    "aggregation": "token_mean",
    "correction": {"upper": None},
}
