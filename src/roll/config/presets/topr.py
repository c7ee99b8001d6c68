"""TOPR: tapered off-policy REINFORCE (arXiv 2503.14286; per token as in ROLL Flash, arXiv 2510.11345).

    r_t = pi / mu, mu the engine's policy that sampled the token
    A > 0: -A log pi;   A <= 0: -sg(clip(r, 0, 1)) A log pi;   mean over an answer's tokens, then over answers

Correct answers are imitated without a ratio or correction, so old answers still train the policy. The weight of a wrong
answer decreases as the policy makes it less likely than it was at sampling. Here the sign of the advantage
selects the case; in the paper, the sign of the reward minus a baseline. The paper uses the ratio of the whole answer:
`ratio.level: sequence` with `ratio.reduce: product`.
"""

USE_CASE = "Stale rollouts; correct answers are rare."
COST = "1 model"
STABILITY = "stable off-policy; may lose entropy"
PRESET = {
    "ratio": {"against": "rollout"},
    "gate": {"type": "sign_split"},
    "correction": {"upper": None},
}
