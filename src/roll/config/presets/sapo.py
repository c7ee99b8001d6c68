"""SAPO: soft adaptive policy optimization (arXiv 2511.20347).

    f(r) = 4/tau sigmoid(tau (r - 1)),   tau = 1.0 for A > 0 and 1.05 for A <= 0;   loss: mean of -f(r) A

A smooth function replaces the hard clip. Its gradient is 1 at r = 1 and decreases on both sides, faster for negative A.
"""

USE_CASE = "Several updates per batch without a hard clip."
COST = "1 model"
STABILITY = "stable"
PRESET = {"gate": {"type": "soft"}}
