"""TOPR: tapered off-policy REINFORCE (arXiv 2503.14286; per token as in ROLL Flash, arXiv 2510.11345).

    r_t = pi / mu, mu the engine's policy that sampled the token
    A > 0: -A log pi;   A <= 0: -sg(clip(r, 0, 1)) A log pi;   mean over an answer's tokens, then over answers

Correct answers are imitated without a ratio or correction, so that old ones still train the policy; wrong answers count
less the more their probability has decreased since they were sampled. The sign is the advantage's; the paper's is that
of the reward minus a baseline. The paper uses the ratio of the whole answer: `ratio.level: sequence` with
`ratio.reduce: product`.
"""

WHEN = "Stale rollouts, right answers rare."
COST = "1 model"
STABILITY = "steady off-policy; may lose entropy"
PRESET = {
    "ratio": {"against": "rollout"},
    "gate": {"type": "sign_split"},
    "correction": {"upper": None},
}
