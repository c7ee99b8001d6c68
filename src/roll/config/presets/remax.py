"""ReMax: the reward of the greedy answer is the baseline (arXiv 2310.10505).

    A_i = R_i - R(greedy answer to the same prompt);   loss = -1/N sum_i A_i sum_t log pi(o_t)

The method needs one more (greedy) answer per prompt, and works with one rollout per prompt. A group whose rewards are
all equal still has a gradient if the greedy answer's reward differs, so it is not dropped.
"""

USE_CASE = "One rollout per prompt with a baseline per prompt."
COST = "one more answer per prompt"
STABILITY = "stable; one update per batch only"
PRESET = {
    "advantage": {"mean": "greedy", "std": "none"},
    "gate": {"type": "log_prob"},
    "aggregation": "sequence_sum",
    "filters": {"skip_zero_variance": False},
}
