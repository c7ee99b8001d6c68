"""GSPO-token (arXiv 2507.18071, eq. 13-14): GSPO's ratio with the gradient of each token.

    s_{i,t} = sg(s_i) pi_t / sg(pi_t)

The loss and its gradient are the same as in GSPO if all tokens of an answer have the same advantage. The method also
supports advantages per token.
"""

USE_CASE = "Like gspo, if advantages differ within an answer."
COST = "1 model"
STABILITY = "like gspo"
PRESET = {
    "ratio": {"level": "sequence_token"},
    "gate": {"type": "min_clip", "low": 0.0003, "high": 0.0004},
    "correction": {"level": "geometric"},
}
