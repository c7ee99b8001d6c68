"""AsyPPO: asymmetric PPO with mini-critics (arXiv 2510.01656).

    M = 2 critics, each trained on one half of every group's rollouts;   V = their mean;   sigma_t = their std
    A = GAE of V, whitened;   critic m: 1/2 mean_t (V_m - G)^2, with a value clip;   G = A + V before whitening
    loss = -1/n sum_i 1/|o_i| sum_t I^A min(r A, clip(r, 0.8, 1.2) A) + beta I^H H(pi_t)
    I^A = 0 where sigma_t is in the lowest 20 %, I^H = 0 where it is in the highest 20 %

Critics may be smaller than the policy (`critic.model`). The paper does not specify every constant. Here, the GAE lambda
is 1, as in `ppo`, and the entropy coefficient is 0.001, which is small enough that the model still learns to end short
answers.
"""

USE_CASE = "PPO for a large policy with small critics."
COST = "policy and 2 critics"
STABILITY = "more stable than one critic"
PRESET = {
    "advantage": {"estimator": "gae", "mean": "none", "std": "none", "gae_lambda": 1.0, "whiten": "token"},
    "critic": {"num_critics": 2, "drop_agreed": 0.2, "value_clip": 0.5},
    "entropy": {"coefficient": 0.001, "drop_divergent": 0.2},
    "filters": {"skip_zero_variance": False},
}
