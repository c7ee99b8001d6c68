"""CISPO (MiniMax-M1, arXiv 2506.13585).

    r_t = pi / mu, mu the engine's policy that sampled the token
    loss = - sum_t sg(clip(r_t, 0, 1 + e_high)) A_i log pi / sum_i |o_i|

The clip bounds a token's weight and never drops its gradient; the paper's lower bound is not active. The paper gives no
e_high: 1 + e_high = 3 here bounds a token's weight by 3, which a first update on fresh rollouts, with ratio 1, never
reaches. The one weight covers staleness, mismatch and earlier updates alike, so there is no further correction.
"""

WHEN = "Several updates per batch, stale rollouts; rare tokens must keep their gradient."
COST = "1 model"
STABILITY = "steady; not trust-region bounded"
PRESET = {
    "ratio": {"against": "rollout"},
    "gate": {"type": "stop_gradient", "lower": 0.0, "upper": 3.0},
    "aggregation": "token_mean",
    "correction": {"upper": None},
}
