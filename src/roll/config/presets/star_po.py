"""StarPO: a trajectory of turns as one sequence of actions (RAGEN, arXiv 2504.20073).

    A_i = (R_i - mean_g R) / (std_g R + eps);   R_i = the verdict and the rewards of all turns
    loss = -1/(sum_i |o_i|) sum_i sum_t min(r A, clip(r, 0.8, 1.2) A)   over the policy's tokens of all turns

For StarPO-S, set `filters.top_variance: 0.25` (train only on the prompts with the largest reward variance) and
`gate.high: 0.28`. RAGEN's entropy bonus of 0.001 is off here, because it needs a pass over the vocabulary.
"""

USE_CASE = "Episodes of several turns, reward at the end."
COST = "1 model"
STABILITY = "may collapse into repetition (echo trap): use top_variance"
PRESET = {"aggregation": "token_mean"}
