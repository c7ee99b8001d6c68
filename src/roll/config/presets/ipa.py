"""IPA: interaction-perceptive agentic policy optimization (ROME, arXiv 2512.24873, eq. 7-10).

    chunk = the policy's tokens between two interactions;   G_c = gamma^{chunks to the end} (R - mean_g R)
    rho_c = geometric mean of pi/mu over the chunk, mu the engine's policy;   m_c = 1[ geometric mean of old/mu <= H ]
    G > 0: -m G log pi;   G <= 0: -m sg(clip(rho, 0, 1)) G log pi;   expert rollouts: -lambda_IL G log pi

The paper gives no constants. gamma = 0.95 halves the return of a chunk 14 steps before the end; H = 1.2 is ROLL's bound
for engine mismatch. rho is relative to the policy that sampled the chunk, as in topr. Relative to the trainer's policy
before the update, it would be 1 in the only update of a batch, however stale the batch is. The paper's R is the final
reward, which has no effect if a failure has reward 0. Here R is the rollout's total reward over all turns, centered
over the group, so failures get the negative sign that the split needs. The paper's chunk-level initialized resampling
is `anchors` of the pipeline `agentic`.
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
