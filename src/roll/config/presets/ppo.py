"""PPO with a critic and GAE (arXiv 1707.06347; GAE, arXiv 1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t;   A_t = sum_k (gamma lambda)^k delta_{t+k}, whitened;   returns = A + V
    actor: min(r A, clip(r) A), mean over tokens;   critic: 1/2 max((V - G)^2, (V_clip - G)^2)

The reward lies on the last token (a turn's on the turn's last), and V is 0 after it, also where the answer was cut off:
the limit is part of the task, so nothing is bootstrapped. Time skips what the environment wrote. gamma = lambda = 1
makes the return unbiased for outcome rewards (arXiv 2503.24290 finds it best); lower lambda trades variance for bias.
Works with one rollout per prompt. Costs a second model.
"""

WHEN = "Dense or delayed rewards, one rollout per prompt, long episodes."
COST = "policy and critic"
STABILITY = "the critic must be warm; see critic.warmup_steps"
PRESET = {
    "advantage": {"estimator": "gae", "mean": "none", "std": "none", "gae_lambda": 1.0, "whiten": "token"},
    "aggregation": "token_mean",
    "critic": {"value_clip": 0.5},
    "filters": {"skip_zero_variance": False},
}
