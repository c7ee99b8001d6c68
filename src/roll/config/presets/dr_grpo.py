"""Dr. GRPO: GRPO without its two biases (arXiv 2503.20783).

    A_i = R_i - mean_g R;   loss = -1/G sum_i 1/L_max sum_t min(r A, clip(r) A)

Division by a group's standard deviation favors prompts that are almost always or almost never solved. Division by an
answer's length favors long incorrect answers. Dr. GRPO omits both. L_max is constant: the length limit of the prompt.
If answers are shorter than this limit, the loss is smaller than in GRPO and needs a larger learning rate.
"""

USE_CASE = "GRPO without the bias toward long incorrect answers."
COST = "1 model"
STABILITY = "stable; needs a larger learning rate if answers are short"
PRESET = {"advantage": {"std": "none"}, "aggregation": "constant_length"}
