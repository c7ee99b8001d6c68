"""TOPR: tapered off-policy REINFORCE (arXiv 2503.14286; per token as in ROLL Flash, arXiv 2510.11345).

    r_t = pi / mu;   mu is the engine's policy, which sampled the token
    A > 0: -A log pi;   A <= 0: -sg(clip(r, 0, 1)) A log pi;   mean over an answer's tokens, then over answers

Correct answers are imitated without a ratio or correction, so the policy still learns from stale correct answers. The
weight of an incorrect answer decreases as its probability falls below its probability at sampling. Here, the case
depends on the sign of the advantage; in the paper, on the sign of the reward minus a baseline. The paper uses the ratio
of the whole answer; for this, set `ratio.level: sequence` and `ratio.reduce: product`.
"""

USE_CASE = "Stale rollouts; correct answers are rare."
COST = "1 model"
STABILITY = "stable off-policy; may lose entropy"
PRESET = {
    "ratio": {"against": "rollout"},
    "gate": {"type": "sign_split"},
    "correction": {"upper": None},
}
