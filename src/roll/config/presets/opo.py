"""OPO: on-policy RL with the optimal baseline (arXiv 2505.23585).

    A_i = R_i - sum_g |o_j| R_j / sum_g |o_j|;   loss = -1/N sum_i A_i sum_t log pi(o_t)

The length-weighted mean minimizes the gradient's variance if the squared norm of the gradient of log pi(o_i) grows with
the length of the answer. The method is exactly on-policy: one update per batch, no clip, no KL term, no entropy bonus.
"""

USE_CASE = "Answers of very different lengths, trained strictly on-policy."
COST = "1 model"
STABILITY = "one update per batch only"
PRESET = {
    "advantage": {"mean": "length_weighted", "std": "none"},
    "gate": {"type": "log_prob"},
    "aggregation": "sequence_sum",
}
