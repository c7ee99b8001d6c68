"""Weighted TOPR (ROLL Flash, arXiv 2510.11345): TOPR with a weight for each sign.

    A > 0: -w+ A log pi;   A <= 0: -w- sg(clip(r, 0, 1)) A log pi;   r as in topr

The paper does not specify the weights; here, w- is 0.5. With group-centered rewards, a few correct answers have the
same total weight as many incorrect answers. A smaller negative weight slows the loss of entropy.
"""

USE_CASE = "Like topr, with a smaller weight for negative advantages."
COST = "1 model"
STABILITY = "like topr"
PRESET = {
    "ratio": {"against": "rollout"},
    "gate": {"type": "sign_split", "positive_weight": 1.0, "negative_weight": 0.5},
    "correction": {"upper": None},
}
