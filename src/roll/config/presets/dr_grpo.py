"""Dr. GRPO: GRPO without its two biases (arXiv 2503.20783).

    A_i = R_i - mean_g R;   loss = -1/G sum_i 1/L_max sum_t min(r A, clip(r) A)

Dividing by a group's deviation favours questions that are nearly solved or nearly hopeless; dividing by an answer's
own length favours long wrong answers. Both are left out; the constant L_max is the prompt's limit, so the loss,
and with it the fitting learning rate, is smaller than GRPO's where answers are shorter than that.
"""

WHEN = "GRPO without its favour for long wrong answers."
COST = "1 model"
STABILITY = "steady; needs a larger learning rate where answers are short"
PRESET = {"advantage": {"std": "none"}, "aggregation": "constant_length"}
