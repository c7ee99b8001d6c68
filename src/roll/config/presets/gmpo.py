"""GMPO: geometric-mean policy optimization (arXiv 2507.20673).

    loss = -1/G sum_i A_i exp( 1/|o_i| sum_t clip-one-sided(log r_t, e) ),   e = 0.4

clip-one-sided clips log r on the side that bounds the objective: at e if A > 0, and at -e if A < 0 (the paper's clip
range is e^-0.4 to e^0.4). The geometric mean prevents single tokens from dominating an answer. The importance weight
for the train-inference mismatch is also a geometric mean.
"""

USE_CASE = "Several updates per batch with outlier tokens."
COST = "1 model"
STABILITY = "stable"
PRESET = {
    "ratio": {"level": "sequence", "max_token_log_ratio": 0.4},
    "gate": {"type": "none"},
    "correction": {"level": "geometric"},
}
