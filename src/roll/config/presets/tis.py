"""TIS: truncated importance sampling (ROLL Flash, arXiv 2510.11345, section on off-policy losses).

    r_t = pi / mu, mu the engine's policy that sampled the token
    loss = -1/n sum_i 1/|o_i| sum_t sg(clip(r_t, 0, 1)) A log pi

A token's weight is at most 1, also if the new policy gives it a higher probability than the one that sampled it. The
ratio to the engine covers staleness, mismatch and earlier updates on the batch alike, so there is no further
correction. Relative to the trainer's policy before the update (`ratio.against: old`, as in ROLL's code) it would be 1
at a batch's only update, however stale the batch is.
"""

WHEN = "Stale rollouts (asynchronous training)."
COST = "1 model"
STABILITY = "steady off-policy"
PRESET = {
    "ratio": {"against": "rollout"},
    "gate": {"type": "stop_gradient", "lower": 0.0, "upper": 1.0},
    "correction": {"upper": None},
}
