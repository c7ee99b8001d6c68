"""Weighted TOPR (ROLL Flash, arXiv 2510.11345): TOPR with a weight for each sign.

    A > 0: -w+ A log pi;   A <= 0: -w- sg(clip(r, 0, 1)) A log pi;   r as in topr

The paper defines the weights without values. Here w- = 0.5: with group-centered rewards, few correct answers and many
wrong ones have the same total weight, and a smaller negative side slows the loss of entropy.
"""

WHEN = "As topr, with the negative side held back."
COST = "1 model"
STABILITY = "as topr"
PRESET = {
    "ratio": {"against": "rollout"},
    "gate": {"type": "sign_split", "positive_weight": 1.0, "negative_weight": 0.5},
    "correction": {"upper": None},
}
