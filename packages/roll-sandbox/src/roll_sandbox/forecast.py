"""Forecasts how many idle sandboxes of each type to keep, by pure functions of past requests ("arrivals").

    arrivals of a window ──► Demand ──► target = max(99 % quantile of Poisson(rate × lead), burst) ──► total is bounded

`rate` predicts requests that arrive at random times: while one sandbox starts (the lead), the number of further
requests is Poisson-distributed. `burst` predicts requests that arrive simultaneously, such as the rollouts of a
training step, with long gaps in between. It is the largest recent shortage (`update_shortage`), and does not decay in
gaps of the usual length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

__all__ = [
    "Demand",
    "compute_burst_timeout_s",
    "compute_max_idle",
    "compute_poisson_quantile",
    "compute_target_idle",
    "scale_to_total",
    "update_shortage",
]

DEMAND_QUANTILE = 0.99
"""Quantile of the Poisson distribution up to which requests find an idle sandbox."""
RATE_HALF_LIFE_S = 10.0
"""Half-life of the average `rate_per_s`."""
BURST_HALF_LIFE_S = 60.0
"""Half-life with which `burst` falls to the size of recent shortages. Only the time of windows with arrivals counts."""
BURST_DECAY_HALF_LIFE_S = 20.0
"""Half-life of `burst` once a gap between arrivals is longer than usual."""
MIN_BURST_TIMEOUT_S = 60.0
MAX_BURST_TIMEOUT_S = 1800.0
"""Minimum and maximum time without requests for which `burst` is kept (`compute_burst_timeout_s`)."""
IDLE_BYTES = 2_300_000
"""Memory that an idle sandbox adds to the used memory, as measured (`make bench NAME=sandbox-service`)."""
MAX_MEMORY_FRACTION = 0.25
"""Maximum fraction of the free memory that idle sandboxes may use."""
MAX_START_TIME_S = 10.0
"""Maximum seconds that the cores may need to start all idle sandboxes, which bounds their number."""
_K = TypeVar("_K")


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Statistics of the recent requests ("arrivals") for one type of sandbox."""

    rate_per_s: float = 0.0
    burst: float = 0.0
    """Number of idle sandboxes that would have prevented all recent shortages."""
    gap_s: float = 0.0
    """The longest recent gap between arrivals."""
    quiet_s: float = 0.0
    """Time since the last arrival."""

    def update(self, arrivals: int, shortage: float, window_s: float) -> Demand:
        """Return the demand, updated with the arrivals of another window.

        Args:
            arrivals: number of sandboxes requested in the window.
            shortage: the largest shortage in the window (see `update_shortage`).
            window_s: length of the window.
        """
        rate = self.rate_per_s + _compute_ema_weight(window_s, RATE_HALF_LIFE_S) * (
            arrivals / window_s - self.rate_per_s
        )
        if arrivals:
            # A larger shortage takes effect at once, a smaller one gradually.
            burst = max(
                shortage, self.burst + _compute_ema_weight(window_s, BURST_HALF_LIFE_S) * (shortage - self.burst)
            )
            # The longest gap fades by a tenth with every new gap.
            gap_s = max(self.quiet_s, 0.9 * self.gap_s) if self.quiet_s else self.gap_s
            return Demand(rate_per_s=rate, burst=burst, gap_s=gap_s)
        quiet_s = self.quiet_s + window_s
        fading = (
            _compute_ema_weight(window_s, BURST_DECAY_HALF_LIFE_S) if quiet_s > compute_burst_timeout_s(self) else 0.0
        )
        return Demand(rate_per_s=rate, burst=self.burst * (1 - fading), gap_s=self.gap_s, quiet_s=quiet_s)


def compute_burst_timeout_s(demand: Demand) -> float:
    """Return the seconds without arrivals after which `burst` begins to decay."""
    return min(MIN_BURST_TIMEOUT_S + 2 * demand.gap_s, MAX_BURST_TIMEOUT_S)


def _compute_ema_weight(window_s: float, half_life_s: float) -> float:
    return 1 - 0.5 ** (window_s / half_life_s)


def update_shortage(shortage: float, elapsed_s: float, starts_per_s: float) -> float:
    """Return the number of missing sandboxes after one more request.

    The result is a leaky bucket: every request adds 1, and `starts_per_s` starts per second drain it.

    Args:
        shortage: number of missing sandboxes after the previous request.
        elapsed_s: seconds since the previous request.
        starts_per_s: number of sandboxes that can be started per second.
    """
    return max(0.0, shortage - elapsed_s * starts_per_s) + 1


def compute_poisson_quantile(mean: float, probability: float, maximum: int) -> int:
    """Return the smallest k, at most `maximum`, with P(X <= k) >= `probability` for a Poisson variable X."""
    below, k = math.exp(-mean), 0
    while below < probability and k < maximum:
        k += 1
        # Computed with logarithms, since powers and factorials of large numbers overflow.
        below += math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
    return k


def compute_target_idle(demand: Demand, lead_time_s: float, maximum: int) -> int:
    """Return the number of idle sandboxes of one type to keep.

    Args:
        demand: recent arrivals for this type.
        lead_time_s: seconds from the decision to start another idle sandbox until it is ready.
        maximum: upper bound of the result.
    """
    return max(
        compute_poisson_quantile(demand.rate_per_s * lead_time_s, DEMAND_QUANTILE, maximum),
        min(maximum, round(demand.burst)),
    )


def compute_max_idle(*, free_bytes: int | None, num_idle: int, num_cores: int, start_s: float, maximum: int) -> int:
    """Return the maximum total number of idle sandboxes of all types.

    Args:
        free_bytes: free memory in bytes, without the memory of the current `num_idle` sandboxes; `None` if unknown.
        num_idle: number of sandboxes that are idle now.
        num_cores: number of cores of this machine.
        start_s: seconds to start one sandbox on one core.
        maximum: upper bound of the result.
    """
    if free_bytes is not None:
        maximum = min(maximum, int(MAX_MEMORY_FRACTION * (free_bytes / IDLE_BYTES + num_idle)))
    return min(maximum, int(num_cores * MAX_START_TIME_S / start_s))


def scale_to_total(targets: Mapping[_K, int], maximum: int) -> dict[_K, int]:
    """Return the targets, scaled down in proportion if their total exceeds `maximum`.

    Scaled targets are rounded down, and the targets with the largest remainders are then increased to reach the total.
    """
    total = sum(targets.values())
    if total <= maximum:
        return dict(targets)
    scaled = {kind: number * maximum // total for kind, number in targets.items()}
    by_remainder = sorted(targets, key=lambda kind: -(targets[kind] * maximum % total))
    for kind in by_remainder[: maximum - sum(scaled.values())]:
        scaled[kind] += 1
    return scaled
