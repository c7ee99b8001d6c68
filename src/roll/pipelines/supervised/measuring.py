"""Measuring a model on held-out examples, without training."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from roll.cluster.base import open_cluster
from roll.config.supervised import SupervisedConfig
from roll.data.examples import ExampleKind
from roll.errors import DataError
from roll.pipelines.supervised.preparation import held_out_batch, prepare
from roll.protocols import LossFn
from roll.training import TrainerSpec

__all__ = ["measure_model"]


async def measure_model(config: SupervisedConfig, *, kind: ExampleKind, loss: LossFn) -> dict[str, float]:
    """The loss of the configuration's model, and the loss's metrics, under `eval/…`.

    Raises:
        DataError: no source holds examples out.
    """
    prepared = await asyncio.to_thread(prepare, config, kind)
    if not prepared.examples.held_out:
        raise DataError("no source holds examples out: set `held_out`, a held-out file, or a held-out split.")
    batch = await asyncio.to_thread(held_out_batch, config, prepared.examples)
    spec = TrainerSpec(
        model_path=str(prepared.model_path),
        model=config.model.model_copy(update={"lora": None}),
        training=prepared.training,
        role="reference",
        seed=config.seed,
    )
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles)
        stack.push_async_callback(cluster.close)
        trainer = await cluster.start_trainer(spec, "actor_train")
        stack.push_async_callback(trainer.close)
        found = await trainer.measure(batch, loss)
    named = {name.rpartition("/")[2]: value for name, value in found.metrics.items()}
    return {f"eval/{name}": value for name, value in {"loss": found.loss, **named}.items()}
