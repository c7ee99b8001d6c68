"""GSPO: group sequence policy optimization (arXiv 2507.18071).

    s_i = (pi(y_i) / old(y_i))^(1/|y_i|);   loss = -1/G sum_i min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i)

Ratio and clip apply to the whole answer, like the reward. The method was designed for MoE models, in which token ratios
can change abruptly. The clip range is taken from the paper, which uses 4 mini-batches. With one update per batch, the
ratio is 1, so the clip has no effect. The importance weight for the train-inference mismatch is also computed per
answer, as a geometric mean over its tokens.
"""

USE_CASE = "Mixture-of-experts models; several updates per batch."
COST = "1 model"
STABILITY = "stable even if token ratios jump"
PRESET = {
    "ratio": {"level": "sequence"},
    "gate": {"type": "min_clip", "low": 0.0003, "high": 0.0004},
    "correction": {"level": "geometric"},
}
