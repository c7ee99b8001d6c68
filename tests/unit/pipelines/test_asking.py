"""What a frozen model is asked of: everything new once, in the batches and whole units in which it will be learnt."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np

from roll.pipelines.supervised.frozen_outputs import compute_missing_outputs
from roll.pipelines.supervised.output_store import OutputStore, Rows, build_rows
from roll.types import TrainingBatch, TrainingSample


def sample(unit: int, side: int, *tokens: int) -> TrainingSample:
    ids = np.array([1, *tokens], np.int32)
    return TrainingSample(sample_id=f"{unit}.{side}", unit=unit, token_ids=ids, loss_mask=ids > 1)


class World:
    """A cluster, its only trainer, and what that was asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.num_started = self.num_closed = 0

    async def start_trainer(self, spec: Any, role: str) -> World:
        self.num_started += 1
        return self

    async def close(self) -> None:
        self.num_closed += 1

    async def ask(self, trainer: Any, batch: TrainingBatch) -> list[Rows]:
        self.asked.append([s.sample_id for s in batch.samples])
        return [build_rows(logprobs=np.full(s.loss_mask.sum(), len(self.asked), np.float32)) for s in batch.samples]

    def run(self, kept: OutputStore, *batches: tuple[TrainingSample, ...]) -> None:
        asyncio.run(
            compute_missing_outputs(
                cast(Any, self), cast(Any, None), kept, batches, self.ask, model_name="the reference"
            )
        )


def test_frozen_model_outputs_batches_are_asked_as_they_are_learnt_and_what_is_kept_stays() -> None:
    world, kept = World(), OutputStore()
    first = (sample(0, 0, 5), sample(0, 1, 6), sample(1, 0, 7), sample(1, 1, 8))
    second = (sample(2, 0, 5), sample(2, 1, 9), sample(3, 0, 7), sample(3, 1, 8))  # all but one as in the first
    world.run(kept, first, second, ())
    assert world.asked == [["0.0", "0.1", "1.0", "1.1"], ["2.0", "2.1"]]
    assert [kept.get_rows(s)["logprobs"][0] for s in (*first, second[0], second[1])] == [1, 1, 1, 1, 1, 2]
    world.run(kept, second, first)
    assert (world.num_started, world.num_closed, len(world.asked)) == (1, 1, 2)
