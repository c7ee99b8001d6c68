"""StarPO: a trajectory of turns as one sequence of actions (RAGEN, arXiv 2504.20073).

    A_i = (R_i - mean_g R) / (std_g R + eps);   R_i = the verdict and the rewards of all turns
    loss = -1/(sum_i |o_i|) sum_i sum_t min(r A, clip(r, 0.8, 1.2) A)   over what the policy wrote, in any turn

StarPO-S: `filters.top_variance: 0.25` (train the prompts with the largest deviation of reward) and `gate.high: 0.28`.
RAGEN adds an entropy bonus of 0.001, which needs a pass over the vocabulary and is off here.
"""

WHEN = "Episodes of several turns, reward at the end."
COST = "1 model"
STABILITY = "echo traps: use top_variance"
PRESET = {"aggregation": "token_mean"}
