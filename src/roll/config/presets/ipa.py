"""IPA: interaction-perceptive agentic policy optimization (ROME, arXiv 2512.24873, eq. 7-10).

    chunk = the policy's tokens between two interactions;   G_c = gamma^{chunks to the end} (R - mean_g R)
    rho_c = geometric mean of pi/mu over the chunk (mu: the engine's policy);   m_c = 1[ geometric mean of old/mu <= H ]
    G > 0: -m G log pi;   G <= 0: -m sg(clip(rho, 0, 1)) G log pi;   expert rollouts: -lambda_IL G log pi

The paper does not specify the constants. With gamma = 0.95, the return halves every 14 chunks. H = 1.2 is ROLL's bound
for the train-inference mismatch. As in `topr`, the denominator of rho is the policy that sampled the chunk. With the
trainer's policy before the update as the denominator, rho would always be 1 if a batch has one update, even for a stale
batch. In the paper, R is the final reward, so failed rollouts with reward 0 contribute no gradient. Here, R is the
total reward of all turns, and the group mean is subtracted, so failed rollouts have a negative G and the second case
applies. The pipeline `agentic` implements the paper's chunk-level initialized resampling as `anchors`.
"""

USE_CASE = "Episodes of many turns with tools; mismatch between engine and trainer."
COST = "1 model"
STABILITY = "stable off-policy"
PRESET = {
    "advantage": {"estimator": "chunk", "std": "none", "gamma": 0.95},
    "ratio": {"level": "chunk", "against": "rollout"},
    "gate": {"type": "sign_split"},
    "correction": {"level": "chunk", "upper": None, "mask_high": 1.2},
    "aggregation": "token_mean",
}
