"""TIS: truncated importance sampling (ROLL Flash, arXiv 2510.11345, section on off-policy losses).

    r_t = pi / mu;   mu is the engine's policy, which sampled the token
    loss = -1/n sum_i 1/|o_i| sum_t sg(clip(r_t, 0, 1)) A log pi

A token's weight is at most 1, even if the new policy assigns a higher probability to the token than the policy that
sampled it. The ratio to mu already covers staleness, mismatch and earlier updates on the batch, so no correction is
applied. With the trainer's policy before the update as the denominator (`ratio.against: old`, as in the paper's code),
the ratio would always be 1 if a batch has one update, even for a stale batch.
"""

USE_CASE = "Stale rollouts (asynchronous training)."
COST = "1 model"
STABILITY = "stable off-policy"
PRESET = {
    "ratio": {"against": "rollout"},
    "gate": {"type": "stop_gradient", "lower": 0.0, "upper": 1.0},
    "correction": {"upper": None},
}
