"""RLOO: REINFORCE with a leave-one-out baseline (arXiv 2402.14740).

    A_i = R_i - mean_{j != i} R_j;   loss = -1/N sum_i A_i log pi(o_i)

The gradient is unbiased, because the baseline of a rollout does not include the rollout itself. A_i is G/(G-1) times
the group-centered reward. The whole answer is one action: log-probs are summed over its tokens. Groups must have at
least 2 rollouts.
"""

USE_CASE = "Unbiased baseline; on-policy training with small groups."
COST = "1 model"
STABILITY = "one update per batch only"
PRESET = {
    "advantage": {"mean": "leave_one_out", "std": "none"},
    "gate": {"type": "log_prob"},
    "aggregation": "sequence_sum",
}
