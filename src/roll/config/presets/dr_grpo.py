"""Dr. GRPO: GRPO without its two biases (arXiv 2503.20783).

    A_i = R_i - mean_g R;   loss = -1/G sum_i 1/L_max sum_t min(r A, clip(r) A)

Division by a group's standard deviation favors questions that are nearly always or almost never solved; division by an
answer's own length favors long wrong answers. Both are left out. The constant L_max is the prompt's limit, so the loss,
and with it the suitable learning rate, differ from GRPO's: the loss is smaller if answers are shorter than the limit.
"""

WHEN = "GRPO without its favour for long wrong answers."
COST = "1 model"
STABILITY = "steady; needs a larger learning rate where answers are short"
PRESET = {"advantage": {"std": "none"}, "aggregation": "constant_length"}
