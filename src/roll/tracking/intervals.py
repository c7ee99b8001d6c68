"""Report the uncertainty of an accuracy: the number of answers and, if there are few, the confidence interval.

Wilson's score interval (Wilson 1927, JASA 22, 209-212, equation 7) of a proportion s of n trials, for z = 1.96 (95 %):

    [ s + z^2 / 2n  ±  z sqrt( s (1 - s) / n + z^2 / 4n^2 ) ] / (1 + z^2 / n)

The trials are assumed to be independent; several answers to one prompt contain less information than answers to
different prompts.
"""

from __future__ import annotations

import math

__all__ = ["MIN_NUM_TRIALS", "compute_accuracy_metrics", "compute_wilson_interval", "format_accuracy"]

MIN_NUM_TRIALS = 100
"""Minimum number of trials of an accuracy that is shown without its confidence interval."""
_Z_95_PERCENT = 1.959963984540054
"""97.5 % quantile of the standard normal distribution."""


def compute_wilson_interval(proportion: float, num_trials: float) -> tuple[float, float]:
    """Return the lower and upper bound of the 95 % confidence interval of a proportion.

    Args:
        proportion: Fraction of successes; a tie is treated as half a success.
        num_trials: Number of trials, above 0.
    """
    middle, spread = (
        proportion + _Z_95_PERCENT**2 / (2 * num_trials),
        _Z_95_PERCENT * math.sqrt(proportion * (1 - proportion) / num_trials + _Z_95_PERCENT**2 / (4 * num_trials**2)),
    )
    low, high = ((middle + side * spread) / (1 + _Z_95_PERCENT**2 / num_trials) for side in (-1, 1))
    return max(low, 0.0), min(high, 1.0)


def compute_accuracy_metrics(prefix: str, accuracy: float, num_trials: float) -> dict[str, float]:
    """Return an accuracy as metrics: `accuracy` and the number of trials, `accuracy_n`.

    With fewer than `MIN_NUM_TRIALS` trials, `accuracy_low` and `accuracy_high` bound the 95 % confidence interval. All
    names begin with `prefix`.
    """
    metrics = {f"{prefix}accuracy": accuracy, f"{prefix}accuracy_n": float(num_trials)}
    if 0 < num_trials < MIN_NUM_TRIALS:
        metrics[f"{prefix}accuracy_low"], metrics[f"{prefix}accuracy_high"] = compute_wilson_interval(
            accuracy, num_trials
        )
    return metrics


def format_accuracy(accuracy: float, num_trials: float | None, format_spec: str = ".3f") -> str:
    """Format an accuracy with the number of trials and, if they are few, the confidence interval.

    Examples are `0.620 of 50 (95 %: 0.482 to 0.741)`, `0.620 of 500`, and `0.620` without `num_trials`.
    """
    text = format(accuracy, format_spec)
    if not num_trials:
        return text
    text += f" of {num_trials:,.0f}"
    if num_trials >= MIN_NUM_TRIALS:
        return text
    low, high = (format(bound, format_spec) for bound in compute_wilson_interval(accuracy, num_trials))
    return f"{text} (95 %: {low} to {high})"
