"""REINFORCE++ (arXiv 2501.03262).

    r_t = 1[t last] R - beta kl_t;   A_t = sum_{k >= t} gamma^{k-t} r_k;   A whitened over all tokens of the batch
    loss: PPO's clip, mean over tokens

No critic and no group: works with one rollout per prompt. The KL penalty lies in the reward (k1); beta is 0 by default,
so that no reference is loaded; the paper uses 0.01. Group filters are off, since groups play no role.
"""

WHEN = "One rollout per prompt, prompts of equal difficulty."
COST = "1 model"
STABILITY = "steady; noisy where prompts differ in difficulty"
PRESET = {
    "advantage": {"estimator": "token", "mean": "none", "std": "none", "whiten": "token"},
    "kl": {"estimator": "k1", "place": "reward"},
    "aggregation": "token_mean",
    "filters": {"skip_zero_variance": False},
}
