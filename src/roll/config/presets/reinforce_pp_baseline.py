"""REINFORCE++-baseline (arXiv 2501.03262): subtract the mean of the group, then whiten over the batch.

    A_i = R_i - mean_g R, whitened over all tokens of the batch;   loss: PPO's clip, mean over tokens, + beta KL_k2

Unlike in GRPO, the standard deviation is computed over the batch, so the advantages of a nearly solved group are not
amplified. Groups with equal rewards are not trained on, but the standard deviation includes their advantages, which are
0. The paper adds the KL estimate k2 to the loss. Its coefficient is 0 by default, so no reference model is loaded.
"""

USE_CASE = "Groups of rollouts, normalized by the standard deviation of the whole batch."
COST = "1 model"
STABILITY = "stable"
PRESET = {
    "advantage": {"std": "none", "whiten": "token"},
    "kl": {"estimator": "k2"},
    "aggregation": "token_mean",
}
