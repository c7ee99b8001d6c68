"""A pool of idle sandboxes of one type, and the demand for them."""

from __future__ import annotations

import asyncio
import dataclasses
import zlib
from dataclasses import dataclass

from roll_sandbox.agent_sandbox import Sandbox
from roll_sandbox.forecast import Demand, update_shortage
from roll_sandbox.sanitize import escape_control_chars
from roll_sandbox.types import SandboxSpec

__all__ = ["REFILL_DELAY_S", "Pool", "PoolReport", "make_pool_key"]

REFILL_DELAY_S = 0.01
"""Seconds to wait before a refill, so that a start does not compete with the program that has just started."""
_INITIAL_START_TIME_S = 0.05
"""Assumed seconds of a start until one was measured."""


def make_pool_key(spec: SandboxSpec) -> SandboxSpec:
    """Return the spec without its affinity: specs that differ only in the affinity share a pool."""
    return dataclasses.replace(spec, affinity="") if spec.affinity else spec


@dataclass(frozen=True, kw_only=True)
class PoolReport:
    """Metrics of one pool."""

    pool: str
    """Name of the pool: its image, and a number that distinguishes it from other pools."""
    idle: int
    target: int
    hits: int
    """Number of requests for which an idle sandbox was ready."""
    misses: int


class Pool:
    """The idle sandboxes of one spec, and the demand for them.

    Args:
        key: the spec of the pool's sandboxes.
        target: initial number of idle sandboxes to keep.
        cores: number of sandboxes that can be started concurrently.
    """

    def __init__(self, key: SandboxSpec, target: int, cores: int) -> None:
        self.key = key
        self.target = target
        self.idle: list[tuple[Sandbox, int]] = []
        """Idle sandboxes, each with the number of programs it has run; unused ones come first."""
        self.starting = 0
        self.hits = 0
        self.misses = 0
        self.start_s = _INITIAL_START_TIME_S
        """Exponential moving average of the seconds that a start takes."""
        self.demand = Demand()
        self._cores = cores
        self._arrivals = 0
        self._shortage = 0.0
        self._max_shortage = 0.0
        self._last_request = 0.0
        self._least_idle = 0
        """Minimum number of idle sandboxes in this window, that is, the number that were not needed in it."""

    @property
    def lead_time_s(self) -> float:
        """Seconds from a request until another idle sandbox is ready."""
        return REFILL_DELAY_S + self.start_s

    def _record_request(self) -> None:
        now = asyncio.get_running_loop().time()
        self._shortage = update_shortage(self._shortage, now - self._last_request, self._cores / self.lead_time_s)
        self._last_request = now
        self._arrivals += 1
        self._max_shortage = max(self._max_shortage, self._shortage)

    def pop_idle(self, *, fresh: bool) -> tuple[Sandbox, int] | None:
        """Record a request. Remove and return an idle sandbox with the number of programs it has run; return `None` if
        no sandbox is suitable. If `fresh` is true, only sandboxes that have not run a program are suitable.
        """
        self._record_request()
        # From the end: sandboxes that have run programs are used first, since `fresh` requests need the unused ones.
        for index in range(len(self.idle) - 1, -1, -1):
            if self.idle[index][0].has_ended:
                del self.idle[index]
            elif not fresh or self.idle[index][1] == 0:
                self.hits += 1
                entry = self.idle.pop(index)
                self._least_idle = min(self._least_idle, len(self.idle))
                return entry
        self.misses += 1
        self._least_idle = 0
        return None

    def record_start(self, seconds: float) -> None:
        """Update the average `start_s` with a start that took `seconds`."""
        self.start_s += 0.2 * (seconds - self.start_s)

    def reset_forecast(self) -> None:
        """Reset the forecast after a failed start, so that no sandboxes are started until the next request."""
        self.target, self.demand = 0, Demand()

    def end_window(self, seconds: float) -> None:
        """Update the demand at the end of a window that lasted `seconds`."""
        self.demand = self.demand.update(self._arrivals, self._max_shortage, seconds)
        self._arrivals, self._max_shortage = 0, 0.0

    def remove_surplus(self) -> list[Sandbox]:
        """Remove the sandboxes beyond the target that were idle during the whole window; return them to be closed."""
        number = max(0, min(len(self.idle) - self.target, self._least_idle))
        gone = [sandbox for sandbox, _ in self.idle[:number]]
        del self.idle[:number]
        self._least_idle = len(self.idle)
        return gone

    @property
    def num_missing(self) -> int:
        """Number of sandboxes that must be started to reach the target."""
        return max(0, self.target - len(self.idle) - self.starting)

    @property
    def is_unused(self) -> bool:
        """True if the pool has no idle sandboxes, is starting none, and has the target 0."""
        return not (self.idle or self.starting or self.target)

    def make_report(self) -> PoolReport:
        """Return the pool's metrics."""
        number = zlib.crc32(repr(self.key).encode())
        name = f"{escape_control_chars(self.key.image or 'host')[:100]}-{number:08x}"
        return PoolReport(pool=name, idle=len(self.idle), target=self.target, hits=self.hits, misses=self.misses)
