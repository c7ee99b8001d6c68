"""Attention credit from its formulas, token by token (arXiv 2510.13554); nothing of `roll` is used."""

from __future__ import annotations

import math
from typing import Any

PRESET: dict[str, Any] = {
    "pattern": "coupled",
    "amplification": 1.5,
    "share": 0.4,
    "introduction_window": 3,
    "introduction_share": 0.5,
    "waad_quantile": 0.5,
    "jump_quantile": 0.6,
}
"""What the preset's page says."""


def reference_factors(waad: list[float], fai: list[float], mask: list[bool], options: dict[str, Any]) -> list[float]:
    """Of every token; a jump is from a counted token to the next one, if that is counted too."""
    pattern, g, share = options["pattern"], options["amplification"], options["share"]
    k, a = options["introduction_window"], options["introduction_share"]
    n = len(waad)
    jump = [abs(waad[t] - waad[t + 1]) if t + 1 < n and mask[t] and mask[t + 1] else 0.0 for t in range(n)]
    counted = [t for t in range(n) if mask[t]]
    size = math.ceil(share * len(counted) - 1e-9)

    def top(scores: list[float]) -> set[int]:
        return set(sorted((t for t in counted if scores[t] > 0), key=lambda t: (-scores[t], t))[:size])

    def quantile(values: list[float], q: float) -> float:
        ordered, place = sorted(values), q * (len(values) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        return low + (high - low) * (place - math.floor(place))

    chosen = top(jump) if pattern == "local" else top(fai)
    gamma = [1 + (g - 1) * (t in chosen) for t in range(n)]
    if pattern == "coupled" and chosen:
        calm_limit = quantile([waad[t] for t in counted], options["waad_quantile"])
        jump_limit = quantile([jump[t] for t in counted], options["jump_quantile"])
        introductions = set()
        for t in chosen:
            before = [u for u in range(max(t - k, 0), t) if mask[u]]
            if waad[t] > calm_limit or not before:
                continue
            best = max(before, key=lambda u: (jump[u], u))
            if jump[best] > 0 and jump[best] >= jump_limit:
                gamma[t] -= a * (g - 1)
                introductions.add(best)
        for u in introductions:
            gamma[u] += a * (g - 1)
    return [min(x, g) for x in gamma]
