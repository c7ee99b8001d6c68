"""GiGPO: group-in-group policy optimization (arXiv 2505.10978).

    A = A^E + omega A^S;   A^E = (R_i - mean) / std over rollouts of a prompt
    A^S = (G_k - mean) / std over turns of those rollouts that began in the same state;   G_k = sum gamma^{j-k} r_j

omega = 1, gamma = 0.95. States are compared only within a prompt's group. A state that occurs only once has A^S = 0. If
no state recurs, GiGPO is identical to GRPO. A group with equal rewards is kept, because G_k still differs if some
rollouts succeed earlier, or if intermediate rewards differ.
"""

USE_CASE = "Episodes of several turns in which states recur."
COST = "1 model"
STABILITY = "like grpo"
PRESET = {
    "advantage": {"estimator": "anchor_state", "gamma": 0.95, "step_weight": 1.0},
    "filters": {"skip_zero_variance": False},
}
