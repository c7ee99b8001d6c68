"""DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token-level loss, overlong shaping.

    loss = -1/(sum_i |o_i|) sum_i sum_t min(r A, clip(r, 1 - 0.2, 1 + 0.28) A);   A as in GRPO
    trained groups: 0 < #correct < G;   other groups are replaced;   #correct does not depend on the penalty

The soft overlong penalty depends on the answer's length limit: set `reward.overlong_buffer` (in the paper, 4,096 of
20,480 tokens). There is no KL term. Replacing groups requires more generation: a step makes at most
`filters.max_refills` refills, and `data/refills` counts them.
"""

USE_CASE = "Long reasoning; many prompts that are always or never solved."
COST = "up to max_refills + 1 times the generation"
STABILITY = "preserves entropy; set reward.overlong_buffer"
PRESET = {
    "gate": {"type": "min_clip", "low": 0.2, "high": 0.28},
    "aggregation": "token_mean",
    "filters": {"refill": True, "metric": "accuracy"},
}
