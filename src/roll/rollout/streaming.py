"""Passes finished groups of a step on while other groups of the step still run, so that gradients are computed
early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from roll.rollout.batch import Batch
from roll.types import Group

__all__ = ["GroupSource", "StreamedEngines", "collect_batch", "compute_part_size"]

NUM_PARTS = 8
"""A part has at least 1/`NUM_PARTS` of a step's groups, so that its micro-batches are well filled."""


class GroupSource(Protocol):
    """Source of batches that also returns groups of the next batch early; `AsyncController` implements it."""

    async def next_batch(self) -> Batch: ...

    async def wait_for_guaranteed_groups(self, known_ids: Collection[int], count: int) -> list[Group]: ...


class StreamedEngines(Protocol):
    """Engines that may share devices with the trainer; `ServedPolicy` implements it."""

    def is_stream_due(self, num_groups: int) -> bool: ...

    async def release_devices(self) -> None: ...

    def record_stream(self, batch: Batch, *, wait_s: float, step_s: float) -> None: ...


def compute_part_size(batch_size: int) -> int:
    """Return the minimum number of finished groups to process at once, in a step with `batch_size` groups."""
    return -(-batch_size // NUM_PARTS)


async def collect_batch(
    source: GroupSource,
    engines: StreamedEngines,
    batch_size: int,
    process: Callable[[list[Group]], Awaitable[None]],
) -> Batch:
    """Return the next batch; meanwhile, call `process` with finished groups that are certain to be in it.

    Every group is passed at most once. Generation continues while `process` runs; the batch is returned after `process`
    has ended.

    Args:
        source: Source of the batch.
        engines: Engines that generate the batch; they release shared devices before the first call of `process`.
        batch_size: Number of groups of a batch.
        process: Processes at least `compute_part_size(batch_size)` groups per call.
    """
    clock = asyncio.get_running_loop().time
    began_s, first_s, busy_s = clock(), 0.0, 0.0
    passed: set[int] = set()
    count = compute_part_size(batch_size)
    has_begun = False
    collecting = asyncio.create_task(source.next_batch(), name="next-batch")
    try:
        while not collecting.done():
            waiting = asyncio.create_task(source.wait_for_guaranteed_groups(passed, count))
            try:
                await asyncio.wait({collecting, waiting}, return_when=asyncio.FIRST_COMPLETED)
                groups = waiting.result() if waiting.done() and not collecting.done() else []
            finally:
                waiting.cancel()
            if groups and not has_begun:
                has_begun = engines.is_stream_due(len(groups))
                count = compute_part_size(batch_size) if has_begun else len(groups) + 1
            if groups and has_begun:
                await engines.release_devices()
                since_s = clock()
                first_s = first_s or since_s
                passed.update(group.draw.draw_id for group in groups)
                await process(groups)
                busy_s += clock() - since_s
        batch, ended_s = collecting.result(), clock()
        engines.record_stream(batch, wait_s=ended_s - first_s - busy_s if first_s else 0.0, step_s=ended_s - began_s)
        return batch
    finally:
        collecting.cancel()
        await asyncio.wait({collecting})
