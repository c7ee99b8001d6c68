"""REINFORCE++-baseline (arXiv 2501.03262): the group's mean first, then whitening over the batch.

    A_i = R_i - mean_g R, whitened over all tokens of the batch;   loss: PPO's clip, mean over tokens, + beta KL_k2

Unlike in GRPO, the standard deviation is computed over the batch, so the advantages of a nearly solved group are not
amplified. Groups with equal rewards are not trained, but their zeros count in the standard deviation. The paper's KL is
k2 in the loss; the coefficient is 0 by default, so that no reference is loaded.
"""

USE_CASE = "Groups of rollouts, normalized by the standard deviation of the whole batch."
COST = "1 model"
STABILITY = "stable"
PRESET = {
    "advantage": {"std": "none", "whiten": "token"},
    "kl": {"estimator": "k2"},
    "aggregation": "token_mean",
}
