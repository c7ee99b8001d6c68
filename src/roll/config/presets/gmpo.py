"""GMPO: geometric-mean policy optimization (arXiv 2507.20673).

    loss = -1/G sum_i A_i exp( 1/|o_i| sum_t clip-one-sided(log r_t, e) ),   e = 0.4

clip-one-sided cuts where that bounds the objective: log r at e where A > 0, at -e where A < 0 (the paper's clip range
is e^-0.4 to e^0.4). The geometric mean keeps single tokens from dominating an answer; the engine is corrected for by
one as well.
"""

WHEN = "Several updates per batch with outlier tokens."
COST = "1 model"
STABILITY = "steady"
PRESET = {
    "ratio": {"level": "sequence", "max_token_log_ratio": 0.4},
    "gate": {"type": "none"},
    "correction": {"level": "geometric"},
}
