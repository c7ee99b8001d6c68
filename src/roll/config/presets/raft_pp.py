"""RAFT++: rejection sampling with importance ratio and clip (arXiv 2504.11343).

    A_i = R_i if R_i > 0, else the answer is dropped;   loss = -1/n sum_i 1/|o_i| sum_t min(r A, clip(r, 0.8, 1.2) A)

There is no baseline and no negative signal, so entropy decreases fast. In the paper, the method is close to GRPO early
in training and worse later. It works with groups of one rollout. Groups in which every answer is correct are also
trained on. R is the reward after penalties (`algorithm.reward`), so an answer is dropped if penalties reduce its reward
to 0 or less.
"""

USE_CASE = "Verifiers whose verdict is reliable only for correct answers."
COST = "1 model"
STABILITY = "entropy decreases fast"
PRESET = {
    "advantage": {"mean": "none", "std": "none"},
    "filters": {"skip_zero_variance": False, "keep": "positive"},
}
