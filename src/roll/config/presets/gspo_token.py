"""GSPO-token (arXiv 2507.18071, eq. 13-14): GSPO's ratio with each token's own gradient.

    s_{i,t} = sg(s_i) pi_t / sg(pi_t)

Equal to GSPO in value and gradient while all tokens of an answer have one advantage; takes per-token advantages too.
"""

WHEN = "As gspo, with advantages that differ within an answer."
COST = "1 model"
STABILITY = "as gspo"
PRESET = {
    "ratio": {"level": "sequence_token"},
    "gate": {"type": "min_clip", "low": 0.0003, "high": 0.0004},
    "correction": {"level": "geometric"},
}
