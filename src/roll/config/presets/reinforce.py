"""REINFORCE: the plain policy gradient (Williams 1992).

    A_i = R_i - mean_batch R;   loss = -1/N sum_i A_i sum_t log pi(o_t)

There is no ratio and no clip, so every batch must be on-policy and can be used for only one update. The only baseline
is the mean of the batch, so one rollout per prompt is sufficient. The variance is large if prompts differ in
difficulty. Set `advantage.mean: none` to use no baseline.
"""

USE_CASE = "The simplest baseline; one rollout per prompt."
COST = "1 model"
STABILITY = "noisy; one update per batch only"
PRESET = {
    "advantage": {"mean": "batch", "std": "none"},
    "gate": {"type": "log_prob"},
    "aggregation": "sequence_sum",
    "filters": {"skip_zero_variance": False},
}
