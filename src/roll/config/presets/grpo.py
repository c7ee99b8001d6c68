"""GRPO: group-relative policy optimization (DeepSeekMath, arXiv 2402.03300, eq. 3).

    A_i = (R_i - mean_g R) / (std_g R + eps)
    loss = -1/G sum_i 1/|o_i| sum_t min(r A, clip(r, 1 - e, 1 + e) A) + beta KL_k3

There is no critic: every token of an answer has the advantage of its rollout. The paper's beta is 0.04. Here it is 0,
as in most later work, so no reference model is loaded. A group whose rewards are all equal has no policy gradient,
so it is dropped (`filters.skip_zero_variance`), and is excluded from the counts and from the KL penalty. std is the
unbiased standard deviation.
"""

USE_CASE = "Verifiable rewards, groups of 4 or more; the default."
COST = "1 model"
STABILITY = "stable; dividing by a group's standard deviation can amplify small differences"
PRESET = {}
