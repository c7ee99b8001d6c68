"""Pipeline schedules (1F1B, interleaved 1F1B): the order of the forward and backward passes of each stage.

One model chunk per stage, 1F1B (arXiv 1806.03377): a stage runs as many forward passes ahead as there are later stages.

    stage 0    F0 F1 F2 B0 F3 B1 B2 B3
    stage 1       F0 F1 B0 F2 B1 F3 B2 B3
    stage 2          F0 B0 F1 B1 F2 B2 F3 B3

Several chunks per stage, interleaved 1F1B (arXiv 2104.04473, section 2.2): stage r of p has the chunks r, p + r,
2p + r, … of the model. At the beginning and end of a step, stages wait for these shorter passes, so the bubble is
smaller. With chunks a and b:

    stage 0    Fa0 Fa1 Fb0 Fb1 Fa2 Bb0 Fa3 Bb1 Fb2 Ba0 …
    stage 1        Fa0 Fa1 Fb0 Bb0 Fb1 Bb1 Fa2 Ba0 Fa3 …

Micro-batches run in rounds, one chunk after the other. A round with fewer micro-batches than stages would leave gaps,
so a remainder is spread over the other rounds: their sizes differ by at most one, the larger ones first. All stages use
one common order of forward passes, and one of backward passes, so messages arrive in the order in which they are
received. Stages differ only in the number of forward passes that they run ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Action", "build_schedule", "compute_bubble_fraction", "simulate_schedules"]


class Action(NamedTuple):
    """The forward or backward pass of one micro-batch through one chunk of a stage."""

    is_forward: bool
    """True if it is a forward pass; otherwise a backward pass."""
    chunk: int
    """The index of the chunk among the stage's chunks."""
    micro_batch: int


def build_schedule(
    num_micro_batches: int, stage: int, num_stages: int, num_chunks: int, *, backward: bool
) -> list[Action]:
    """Return the actions of a stage in their order of execution.

    Args:
        num_micro_batches: The number of micro-batches.
        stage: The index of the stage.
        num_stages: The number of stages, at least 1.
        num_chunks: The number of chunks per stage; more than 1 only with several stages.
        backward: True if backward passes follow.
    """
    rounds = _split_into_rounds(num_micro_batches, num_stages if num_chunks > 1 else num_micro_batches)
    forwards = [Action(True, chunk, i) for each in rounds for chunk in range(num_chunks) for i in each]
    if not backward:
        return forwards
    backwards = [Action(False, chunk, i) for each in rounds for chunk in reversed(range(num_chunks)) for i in each]
    later = num_stages - 1 - stage
    # The number of forward passes of the warm-up; with several chunks as in Megatron-LM, with the size of the first
    # round instead of the number of stages.
    ahead = later if num_chunks == 1 else 2 * later + (num_chunks - 1) * len(rounds[0])
    ahead = min(ahead, len(forwards))
    actions = forwards[:ahead]
    for i, action in enumerate(backwards):
        actions += [*forwards[ahead + i : ahead + i + 1], action]
    return actions


def compute_bubble_fraction(num_micro_batches: int, num_stages: int, num_chunks: int) -> float:
    """Return the fraction of time in which stages are idle in a step of `num_micro_batches` micro-batches.

    All chunks are assumed to take the same time, and backward passes twice the time of forward passes.
    """
    orders = [
        build_schedule(num_micro_batches, stage, num_stages, num_chunks, backward=True) for stage in range(num_stages)
    ]
    times = simulate_schedules(orders, num_stages * num_chunks)
    return 1 - 3 * num_micro_batches * num_chunks / max(times)  # a forward pass takes 1, a backward pass 2


def simulate_schedules(
    schedules: Sequence[Sequence[Action]], num_model_chunks: int, *, forward: float = 1.0, backward: float = 2.0
) -> list[float]:
    """Return the time at which each stage finishes its schedule, assuming that messages take no time.

    Args:
        schedules: The schedules of all stages.
        num_model_chunks: The number of chunks of the model.
        forward: The time of one chunk's forward pass.
        backward: The time of one chunk's backward pass.

    Raises:
        ValueError: The stages would deadlock.
    """
    num_stages = len(schedules)
    ready: dict[tuple[bool, int, int], float] = {}
    free, left = [0.0] * num_stages, [iter(each) for each in schedules]
    waiting: list[Action | None] = [next(each, None) for each in left]
    moved = True
    while moved:
        moved = False
        for stage in range(num_stages):
            while (action := waiting[stage]) is not None:
                chunk = action.chunk * num_stages + stage
                needed = [(True, chunk, action.micro_batch)] * (not action.is_forward)
                before = chunk - 1 if action.is_forward else chunk + 1
                if 0 <= before < num_model_chunks:
                    needed.append((action.is_forward, before, action.micro_batch))
                if any(key not in ready for key in needed):
                    break
                start = max([free[stage], *(ready[key] for key in needed)])
                free[stage] = start + (forward if action.is_forward else backward)
                ready[action.is_forward, chunk, action.micro_batch] = free[stage]
                waiting[stage], moved = next(left[stage], None), True
    if any(action is not None for action in waiting):
        raise ValueError("the schedules deadlock: every stage waits for another stage")
    return free


def _split_into_rounds(num_micro_batches: int, size: int) -> list[range]:
    """Split micro-batches into rounds of at least `size` each; if there are fewer than `size`, into one round."""
    count = max(1, num_micro_batches // max(size, 1))
    sizes = [num_micro_batches // count + (i < num_micro_batches % count) for i in range(count)]
    return [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(count)]
