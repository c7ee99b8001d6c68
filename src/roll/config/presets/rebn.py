"""ReBN: return batch normalization per turn (GEM, arXiv 2510.01051).

    G_k = sum_{j >= k} gamma^{j-k} r_j per turn;   A = (G - mean) / std over all turns of the batch
    loss = - sum over turns of A log pi(turn)

A turn is one action, so the method supports any discount, dense rewards, and one rollout per prompt. gamma is 0.9, as
in GEM's games, so shorter successful episodes have higher returns. With one turn, the method reduces to batch
whitening. The sum in the loss is divided by the number of rollouts.
"""

USE_CASE = "Episodes of several turns with intermediate rewards and a discount."
COST = "1 model"
STABILITY = "one update per batch only"
PRESET = {
    "advantage": {"estimator": "turn", "mean": "none", "std": "none", "gamma": 0.9, "whiten": "turn"},
    "gate": {"type": "log_prob"},
    "aggregation": "sequence_sum",
    "filters": {"skip_zero_variance": False},
}
