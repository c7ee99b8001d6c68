"""Forecast of how many idle sandboxes of a kind to keep: pure functions of past arrivals.

    arrivals of a window ──► Demand ──► target = max(99 % of a Poisson(rate × lead), burst) ──► bounded, all together

`rate` predicts requests that come at random: while one sandbox starts (the lead), a Poisson number of others is
requested. `burst` predicts requests that a rate cannot: the rollouts of a training step come at once, and then none for
a while. It is the largest recent shortage (`update_shortage`), and is kept through silences of the usual length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

__all__ = [
    "Demand",
    "compute_hold_s",
    "compute_max_idle",
    "compute_poisson_quantile",
    "compute_target",
    "scale_to_total",
    "update_shortage",
]

QUANTILE = 0.99
RATE_HALF_LIFE_S = 10.0
BURST_HALF_LIFE_S = 60.0
"""Counted in windows with arrivals only."""
FADE_HALF_LIFE_S = 20.0
"""Half-life of a burst, once a silence is longer than usual."""
HOLD_S = 60.0
MAX_HOLD_S = 1800.0
IDLE_BYTES = 2_300_000
"""Measured: what an idle sandbox adds to the memory in use (`make bench NAME=sandbox-service`)."""
MEMORY_SHARE = 0.25
"""Share of free memory that idle sandboxes may take."""
STARTED_WITHIN_S = 10.0
"""The cores must be able to start all idle sandboxes within this time."""
_K = TypeVar("_K")


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The recent arrivals of one kind of sandbox."""

    rate_per_s: float = 0.0
    burst: float = 0.0
    """Idle sandboxes that would have prevented any shortage."""
    gap_s: float = 0.0
    """The longest recent silence between arrivals."""
    quiet_s: float = 0.0
    """Time since the last arrival."""

    def update(self, arrivals: int, shortage: float, window_s: float) -> Demand:
        """Return the demand after another window.

        Args:
            arrivals: sandboxes requested in the window.
            shortage: the largest number that was missing in it (see `update_shortage`).
            window_s: length of the window.
        """
        rate = self.rate_per_s + _compute_gain(window_s, RATE_HALF_LIFE_S) * (arrivals / window_s - self.rate_per_s)
        if arrivals:
            burst = max(shortage, self.burst + _compute_gain(window_s, BURST_HALF_LIFE_S) * (shortage - self.burst))
            gap_s = max(self.quiet_s, 0.9 * self.gap_s) if self.quiet_s else self.gap_s
            return Demand(rate_per_s=rate, burst=burst, gap_s=gap_s)
        quiet_s = self.quiet_s + window_s
        fading = _compute_gain(window_s, FADE_HALF_LIFE_S) if quiet_s > compute_hold_s(self) else 0.0
        return Demand(rate_per_s=rate, burst=self.burst * (1 - fading), gap_s=self.gap_s, quiet_s=quiet_s)


def compute_hold_s(demand: Demand) -> float:
    """Return how long a silence may last before a burst is no longer expected to recur."""
    return min(HOLD_S + 2 * demand.gap_s, MAX_HOLD_S)


def _compute_gain(window_s: float, half_life_s: float) -> float:
    return 1 - 0.5 ** (window_s / half_life_s)


def update_shortage(shortage: float, elapsed_s: float, per_s: float) -> float:
    """Return how many sandboxes are missing after one more request: a leaky bucket that drains at `per_s` starts."""
    return max(0.0, shortage - elapsed_s * per_s) + 1


def compute_poisson_quantile(mean: float, probability: float, most: int) -> int:
    """Return the smallest k, at most `most`, with P(X <= k) >= `probability` for a Poisson variable X."""
    below, k = math.exp(-mean), 0
    while below < probability and k < most:
        k += 1
        below += math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
    return k


def compute_target(demand: Demand, lead_s: float, most: int) -> int:
    """Return how many idle sandboxes of a kind to keep.

    Args:
        demand: recent arrivals of the kind.
        lead_s: seconds from the request for another idle sandbox until it is ready.
        most: upper bound of the result.
    """
    return max(compute_poisson_quantile(demand.rate_per_s * lead_s, QUANTILE, most), min(most, round(demand.burst)))


def compute_max_idle(*, free_bytes: int | None, idle: int, cores: int, start_s: float, most: int) -> int:
    """Return how many idle sandboxes of all kinds together may be kept.

    Args:
        free_bytes: free memory, without that of the present `idle` sandboxes; `None`: unknown.
        idle: sandboxes that are idle now.
        cores: cores of this machine.
        start_s: seconds to start one sandbox on one core.
        most: upper bound of the result.
    """
    if free_bytes is not None:
        most = min(most, int(MEMORY_SHARE * (free_bytes / IDLE_BYTES + idle)))
    return min(most, int(cores * STARTED_WITHIN_S / start_s))


def scale_to_total(wanted: Mapping[_K, int], most: int) -> dict[_K, int]:
    """Scale the numbers down to a total of `most`: in proportion, with the rest given to the largest remainders."""
    total = sum(wanted.values())
    if total <= most:
        return dict(wanted)
    given = {kind: number * most // total for kind, number in wanted.items()}
    by_remainder = sorted(wanted, key=lambda kind: -(wanted[kind] * most % total))
    for kind in by_remainder[: most - sum(given.values())]:
        given[kind] += 1
    return given
