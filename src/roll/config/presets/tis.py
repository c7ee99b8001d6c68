"""TIS: truncated importance sampling (ROLL Flash, arXiv 2510.11345, section on off-policy losses).

    r_t = pi / mu, mu the engine's policy that sampled the token
    loss = -1/n sum_i 1/|o_i| sum_t sg(clip(r_t, 0, 1)) A log pi

A token's weight is at most 1, even if the new policy gives the token a higher probability than the policy that sampled
it. The ratio to the engine covers staleness, mismatch and earlier updates on the batch together, so there is no further
correction. Relative to the trainer's policy before the update (`ratio.against: old`, as in the paper's code), the ratio
would be 1 in the only update of a batch, however stale the batch is.
"""

USE_CASE = "Stale rollouts (asynchronous training)."
COST = "1 model"
STABILITY = "stable off-policy"
PRESET = {
    "ratio": {"against": "rollout"},
    "gate": {"type": "stop_gradient", "lower": 0.0, "upper": 1.0},
    "correction": {"upper": None},
}
