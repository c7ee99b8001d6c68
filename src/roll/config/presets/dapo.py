"""DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token-level loss, overlong shaping.

    loss = -1/(sum_i |o_i|) sum_i sum_t min(r A, clip(r, 1 - 0.2, 1 + 0.28) A);   A as in GRPO
    groups with 0 < #correct < G, refilled;   #correct by the verdict, before the overlong penalty

Soft overlong punishment depends on the answer's length limit: set `reward.overlong_buffer` (the paper: 4,096 of 20,480
tokens). No KL. Refills cost generation: at most `filters.max_refills` per step, counted in `data/refills`.
"""

WHEN = "Long reasoning; many prompts that are solved or hopeless."
COST = "up to max_refills + 1 times the generation"
STABILITY = "keeps entropy; set reward.overlong_buffer"
PRESET = {
    "gate": {"type": "min_clip", "low": 0.2, "high": 0.28},
    "aggregation": "token_mean",
    "filters": {"refill": True, "metric": "accuracy"},
}
