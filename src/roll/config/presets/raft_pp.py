"""RAFT++: rejection sampling with importance ratio and clip (arXiv 2504.11343).

    A_i = R_i where R_i > 0, the others are not trained;   loss = -1/n sum_i 1/|o_i| sum_t min(r A, clip(r, 0.8, 1.2) A)

No baseline and no negative signal, so entropy falls fast; in the paper it is close to GRPO early on and behind it
later. Works with groups of one. A group in which every answer is correct is trained as well. R is the reward after
penalties (`algorithm.reward`), so an answer whose penalties leave nothing is dropped.
"""

WHEN = "Only right answers are to be trusted (a noisy verifier of wrong ones)."
COST = "1 model"
STABILITY = "entropy falls fast"
PRESET = {
    "advantage": {"mean": "none", "std": "none"},
    "filters": {"skip_zero_variance": False, "keep": "positive"},
}
