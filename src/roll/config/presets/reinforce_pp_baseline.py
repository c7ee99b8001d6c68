"""REINFORCE++-baseline (arXiv 2501.03262): the group's mean first, then whitening over the batch.

    A_i = R_i - mean_g R, whitened over all tokens of the batch;   loss: PPO's clip, mean over tokens, + beta KL_k2

Against GRPO, the deviation is the batch's: a nearly solved group is not blown up. Groups of equal rewards count in it
with their zeros, though they are not trained. The paper's KL is k2 in the loss;
its coefficient is 0 by default, so that no reference is loaded.
"""

WHEN = "Groups, with a deviation that single groups cannot blow up."
COST = "1 model"
STABILITY = "steady"
PRESET = {
    "advantage": {"std": "none", "whiten": "token"},
    "kl": {"estimator": "k2"},
    "aggregation": "token_mean",
}
