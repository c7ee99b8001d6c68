"""EngineWidths: engines of several widths on the same devices, of which those of one width are awake.

    a round is planned ──► another width for this type of round? ──► its engines sleep, the others wake ──► launch
    a batch is complete ──► preemptions, context lengths ──► `width_rule`

Engines that wake get the current weights before requests are routed to them. Requests of engines that go to sleep
continue on the others from their tokens.

Invariants:
    - engines of two widths are never awake at the same time, because they share devices;
    - short and long rounds of tail batching have separate widths.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from roll.protocols import InferenceEngine
from roll.rollout.batch import Batch
from roll.rollout.proxy import LLMProxy
from roll.rollout.width_rule import StepLoad, WidthCapacity, WidthState

__all__ = ["EngineWidths"]

logger = logging.getLogger(__name__)


class EngineWidths:
    """Switches between engines of different widths; a `roll.rollout.controller.RoundListener`.

    Args:
        proxy: Proxy of all engines.
        engine_ids: Ids of the engines of each width, with ascending widths. The first width is used first.
        num_requests: Number of rollouts that run at once.
        on_change: Called with the old and the new width after every switch.
    """

    def __init__(
        self,
        proxy: LLMProxy,
        engine_ids: Mapping[int, Sequence[str]],
        *,
        num_requests: int,
        on_change: Callable[[int, int], None] = lambda before, after: None,
    ) -> None:
        self.width = next(iter(engine_ids))
        """Width of the engines that are awake."""
        self.num_switches = 0
        self._used_width = self.width
        """Width of the engines that were awake when the last batch was complete."""
        self._num_preempted_in_step = 0
        self._proxy = proxy
        self._engine_ids = {width: tuple(ids) for width, ids in engine_ids.items()}
        self._num_requests = num_requests
        self._on_change = on_change
        self._states: dict[str, WidthState] = {}
        """State by type of round."""
        self._kv_capacities: dict[str, int] = {}
        """Last known capacity of each engine's KV cache, in tokens."""
        self._num_preempted = 0
        """Number of preemptions of all engines until the previous batch."""

    async def start(self) -> None:
        """Put all engines to sleep except those of the first width; must be called before the first request.

        Raises:
            UnsupportedError: An engine does not support sleep.
        """
        self._read_capacities()
        for width, ids in self._engine_ids.items():
            if width != self.width:
                await asyncio.gather(*map(self._proxy.transitions.sleep, ids))

    def on_batch(self, batch: Batch) -> None:
        """Choose the width of the next round of the same type from the load of a step."""
        self._read_capacities()
        contexts = [
            len(group.draw.token_ids) + len(rollout.token_ids) for group in batch.groups for rollout in group.rollouts
        ]
        total = sum(engine.load().num_preempted or 0 for engine in self._proxy.engines)
        # The counters of an engine that was replaced start again.
        num_preempted, self._num_preempted = max(0, total - self._num_preempted), total
        self._used_width, self._num_preempted_in_step = self.width, num_preempted
        if not contexts:
            return
        load = StepLoad(
            num_preempted=num_preempted,
            mean_context=sum(contexts) / len(contexts),
            num_requests=self._num_requests,
        )
        kind = _get_round_type(batch.kind)
        state = self._states.get(kind, WidthState(width=self.width))
        self._states[kind] = state.record_step(load, list(self._engine_ids), self._measure_capacities())

    async def before_round(self, kind: str) -> None:
        """Switch to the width of a type of round, unless its engines are awake."""
        state = self._states.get(_get_round_type(kind))
        if state is None or state.width == self.width:
            return
        before, transitions = self.width, self._proxy.transitions
        # In this order: engines that wake need the memory that the others release.
        await asyncio.gather(*map(transitions.sleep, self._engine_ids[before]))
        await asyncio.gather(*map(transitions.wake, self._engine_ids[state.width]))
        self.width = state.width
        self.num_switches += 1
        logger.info(
            "engines of width %d replace engines of width %d%s: %s",
            self.width,
            before,
            f" for a {kind} round" if kind else "",
            state.reason or "the last such round used this width",
        )
        self._on_change(before, self.width)

    def get_counters(self) -> dict[str, int]:
        """Return the width and the preemptions of the last step, and the number of switches in the run so far."""
        return {
            "width": self._used_width,
            "width_switches": self.num_switches,
            "preempted": self._num_preempted_in_step,
        }

    def _read_capacities(self) -> None:
        for engine in self._proxy.engines:
            if (capacity := engine.load().kv_capacity) is not None:
                self._kv_capacities[engine.engine_id] = capacity

    def _measure_capacities(self) -> dict[int, WidthCapacity]:
        by_id: dict[str, InferenceEngine] = {engine.engine_id: engine for engine in self._proxy.engines}
        return {
            width: WidthCapacity(
                num_slots=sum(by_id[name].load().capacity for name in ids if name in by_id),
                kv_tokens=sum(self._kv_capacities[name] for name in ids)
                if all(name in self._kv_capacities for name in ids)
                else None,
            )
            for width, ids in self._engine_ids.items()
        }


def _get_round_type(kind: str) -> str:
    """Return the type of a round whose width is chosen separately: the last rounds run as long ones."""
    return "long" if kind == "last" else kind
