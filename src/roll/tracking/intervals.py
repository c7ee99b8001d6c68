"""The uncertainty of an accuracy: its number of answers and, if they are few, its confidence interval.

Wilson's score interval (Wilson 1927, JASA 22, 209-212, equation 7) of a share s of n trials, for z = 1.96 (95 %):

    [ s + z^2 / 2n  ±  z sqrt( s (1 - s) / n + z^2 / 4n^2 ) ] / (1 + z^2 / n)

It assumes independent trials: several answers to one prompt carry less information than as many prompts.
"""

from __future__ import annotations

import math

__all__ = ["FEW", "accuracy_figures", "accuracy_text", "wilson_interval"]

FEW = 100
"""An accuracy of fewer trials is shown with its interval."""
_Z = 1.959963984540054
"""97.5 % quantile of the normal distribution."""


def wilson_interval(share: float, num: float) -> tuple[float, float]:
    """Return the lower and upper bound, 0 … 1, of the 95 % confidence interval of a share.

    Args:
        share: share of successes, where a tie counts as half of one.
        num: number of trials, above 0.
    """
    middle, spread = share + _Z**2 / (2 * num), _Z * math.sqrt(share * (1 - share) / num + _Z**2 / (4 * num**2))
    low, high = ((middle + side * spread) / (1 + _Z**2 / num) for side in (-1, 1))
    return max(low, 0.0), min(high, 1.0)


def accuracy_figures(prefix: str, share: float, num: float) -> dict[str, float]:
    """Return `accuracy` and `accuracy_n` behind a prefix, and below `FEW` trials `accuracy_low` and `accuracy_high`."""
    figures = {f"{prefix}accuracy": share, f"{prefix}accuracy_n": float(num)}
    if 0 < num < FEW:
        figures[f"{prefix}accuracy_low"], figures[f"{prefix}accuracy_high"] = wilson_interval(share, num)
    return figures


def accuracy_text(share: float, num: float | None, form: str = ".3f") -> str:
    """Return an accuracy in words, such as `0.620 of 50 (95 %: 0.482 to 0.741)`."""
    text = format(share, form)
    if not num:
        return text
    text += f" of {num:,.0f}"
    if num >= FEW:
        return text
    low, high = (format(bound, form) for bound in wilson_interval(share, num))
    return f"{text} (95 %: {low} to {high})"
