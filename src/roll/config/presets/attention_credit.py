"""Attention credit (Attention Illuminates LLM Reasoning, arXiv 2510.13554) on top of GRPO.

    A'_t = gamma_t A_t;   gamma_t = 1.5 for chosen tokens, 40 % of each answer, else 1
    local: largest |WAAD_t - WAAD_{t+1}|;   global: largest FAI_t;   coupled: both, shared with an anchor's introduction

Attention maps come from five middle layers of the trained model itself, in the update's own forward pass; with several
updates per batch, in the forward pass before them. The paper gives no thresholds for the coupled form; here they are
quantiles of the answer (docs/algorithms.md).
"""

WHEN = "Long reasoning, where few tokens decide."
COST = "1 model; 5 layers' maps"
STABILITY = "as grpo; sharp in its constants"
PRESET = {"credit": {"type": "coupled"}}
