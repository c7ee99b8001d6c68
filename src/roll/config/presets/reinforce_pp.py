"""REINFORCE++ (arXiv 2501.03262).

    r_t = 1[t last] R - beta kl_t;   A_t = sum_{k >= t} gamma^{k-t} r_k;   A whitened over all tokens of the batch
    loss: PPO's clip, mean over tokens

There is no critic and no group, so the method works with one rollout per prompt. The KL penalty (k1) is part of the
reward. beta is 0 by default, so no reference model is loaded; the paper uses 0.01. Group filters are off, because the
method has no groups.
"""

USE_CASE = "One rollout per prompt, prompts of equal difficulty."
COST = "1 model"
STABILITY = "stable; noisy if prompts differ in difficulty"
PRESET = {
    "advantage": {"estimator": "token", "mean": "none", "std": "none", "whiten": "token"},
    "kl": {"estimator": "k1", "apply_to": "reward"},
    "aggregation": "token_mean",
    "filters": {"skip_zero_variance": False},
}
