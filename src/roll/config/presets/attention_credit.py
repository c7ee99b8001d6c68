"""Attention credit (Attention Illuminates LLM Reasoning, arXiv 2510.13554) on top of GRPO.

    A'_t = gamma_t A_t;   gamma_t = 1.5 for the chosen 40 % of an answer's tokens, else 1
    local: largest |WAAD_t - WAAD_{t+1}|;   global: largest FAI_t
    coupled: both; some anchors share their weight with the token that introduces their phrase

WAAD_t (windowed average attention distance) is high if token t attends far back, and FAI_t (future attention influence)
is high if later tokens attend to token t. Tokens with a high FAI_t are called anchors. An anchor inside a phrase shares
its weight with the token that introduces the phrase. Attention maps come from five middle layers of the trained model,
in the forward pass of the update. With several updates per batch, they come from a forward pass before the first
update. The paper does not specify thresholds for the coupled form; here, they are quantiles over the answer's tokens.
"""

USE_CASE = "Long reasoning in which few tokens decide the result."
COST = "1 model; attention maps of 5 layers"
STABILITY = "like grpo; sensitive to its constants"
PRESET = {"credit": {"type": "coupled"}}
