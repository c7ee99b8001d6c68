"""The stored states of models, from which a restarted server continues.

A state has the weights and the optimizer's state after a request that leaves no gradient. A server that continues loads
it and repeats the later requests of the model from the journal.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from roll.serving.checkpoints import STATE, Checkpoint, Checkpoints, build_path
from roll.serving.failures import RequestFailure
from roll.serving.journal import Journal
from roll.serving.models import Model, ModelTrainer
from roll.training.adapter_snapshot import AdapterSnapshot

__all__ = ["STEPS_PER_STATE", "ModelStates", "StoredAdapter", "get_state_path"]

logger = logging.getLogger(__name__)

STEPS_PER_STATE = 20
"""The number of optimizer steps between two states, and so the maximum number that a restarted server repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAdapter:
    """A checkpoint or a state that was read."""

    checkpoint: Checkpoint
    snapshot: AdapterSnapshot
    state_seq: int = 0
    """For a state: the sequence ID of the last request that it includes."""


def get_state_path(model_id: str) -> str:
    """Return the path of the state of a model."""
    return build_path(model_id, "weights", STATE)


class ModelStates:
    """Stores and finds the states of models.

    Args:
        checkpoints: The checkpoints on disk.
        trainer: The trainer of all models.
        journal: The journal of the server.
    """

    def __init__(self, checkpoints: Checkpoints, trainer: ModelTrainer, journal: Journal) -> None:
        self._checkpoints = checkpoints
        self._journal = journal
        self._trainer = trainer

    async def find(self, model_id: str) -> StoredAdapter | None:
        """Return the state of a model, if it has one.

        Raises:
            RequestFailure: The state is corrupted.
        """
        checkpoint = await asyncio.to_thread(self._checkpoints.describe, get_state_path(model_id))
        if checkpoint is None:
            return None
        snapshot = await asyncio.to_thread(self._checkpoints.load, checkpoint, optimizer=True)
        return StoredAdapter(checkpoint=checkpoint, snapshot=snapshot, state_seq=checkpoint.seq_id)

    async def exists(self, model_id: str) -> bool:
        """Return whether a model has a state."""
        return await asyncio.to_thread(self._checkpoints.describe, get_state_path(model_id)) is not None

    async def store(self, model: Model, seq_id: int) -> None:
        """Store the state of a model that has no gradient, after a request."""
        snapshot = await self._trainer.read(model)
        await self._journal.sync()  # a later server does not run what the state includes, so it must have the outcomes
        try:
            await asyncio.to_thread(
                self._checkpoints.save,
                snapshot,
                model_id=model.model_id,
                kind="weights",
                name=STATE,
                owner=model.owner,
                train_unembed=model.lora.train_unembed,
                overwrite=True,
                seq_id=seq_id,
            )
        except RequestFailure as failure:  # the journal has what the state lacks
            logger.error("the state of the model %s could not be stored: %s", model.model_id, failure.message)
            return
        model.state_seq, model.num_unstored_steps = seq_id, 0

    async def store_if_due(self, model: Model, seq_id: int) -> None:
        """Store the state after an optimizer step, if `STEPS_PER_STATE` steps are not stored."""
        model.num_unstored_steps += 1
        if model.num_unstored_steps >= STEPS_PER_STATE:
            await self.store(model, seq_id)

    async def delete(self, model_id: str) -> None:
        """Delete the state of a model."""
        if checkpoint := await asyncio.to_thread(self._checkpoints.describe, get_state_path(model_id)):
            await asyncio.to_thread(self._checkpoints.delete, checkpoint)
