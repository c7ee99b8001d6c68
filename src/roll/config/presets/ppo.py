"""PPO with a critic and GAE (arXiv 1707.06347; GAE, arXiv 1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t;   A_t = sum_k (gamma lambda)^k delta_{t+k}, whitened;   returns G = A + V
    actor: min(r A, clip(r) A), mean over tokens;   critic: 1/2 max((V - G)^2, (V_clip - G)^2)

The reward is at the last token (with turns, at the last token of each turn). V is 0 after the end of the answer, even
for truncated answers: the length limit is part of the task, so the value is not bootstrapped. The index t counts only
tokens of the policy, not tokens of the environment. gamma = lambda = 1 makes the return unbiased for outcome rewards
(arXiv 2503.24290 finds it best); a lower lambda reduces variance and adds bias. PPO works with one rollout per prompt,
and needs a second model.
"""

USE_CASE = "Dense or delayed rewards, one rollout per prompt, long episodes."
COST = "policy and critic"
STABILITY = "needs a trained critic; see critic.warmup_steps"
PRESET = {
    "advantage": {"estimator": "gae", "mean": "none", "std": "none", "gae_lambda": 1.0, "whiten": "token"},
    "aggregation": "token_mean",
    "critic": {"value_clip": 0.5},
    "filters": {"skip_zero_variance": False},
}
