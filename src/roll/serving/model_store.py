"""The models of all sessions: created, loaded, saved and deleted."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from roll.serving.checkpoints import Checkpoint, Checkpoints, Kind
from roll.serving.failures import ApiError, RequestFailure
from roll.serving.journal import Journal
from roll.serving.models import Model, ModelTrainer, check_weights
from roll.serving.ordering import RequestOrder
from roll.serving.promises import Promises
from roll.serving.requests import LoadWeights, LoraSettings, read_place
from roll.serving.sessions import Session, Sessions
from roll.serving.settings import ServeSettings
from roll.serving.states import ModelStates, StoredAdapter
from roll.serving.submissions import Result, Submission, to_json
from roll.training.adapter_snapshot import AdapterSnapshot, AdapterSpec

__all__ = ["ModelStore"]

logger = logging.getLogger(__name__)


class ModelStore:
    """The models, by ID. Models that are added before `start` run no requests until `start`.

    Args:
        settings: The settings of the server.
        sessions: The sessions.
        promises: The promises of the server.
        trainer: The trainer of all models.
        checkpoints: The checkpoints on disk.
        journal: The journal of the server.
    """

    def __init__(
        self,
        settings: ServeSettings,
        sessions: Sessions,
        promises: Promises,
        trainer: ModelTrainer,
        checkpoints: Checkpoints,
        journal: Journal,
    ) -> None:
        self.states = ModelStates(checkpoints, trainer, journal)
        self._journal = journal
        self._settings = settings
        self._sessions = sessions
        self._promises = promises
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._models: dict[str, Model] = {}
        self._is_started = False

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    def start(self) -> None:
        """Run the requests of all models."""
        self._is_started = True
        for model in self._models.values():
            model.order.start()

    def find(self, model_id: str, owner: str) -> Model:
        """Return a model.

        Raises:
            ApiError: There is no such model, or it belongs to another owner.
        """
        model = self._models.get(model_id)
        if model is None or model.owner != owner:
            raise ApiError(404, "there is no such model of this key, or its session has ended.", field="model_id")
        self._sessions.find(model.session_id, owner)
        return model

    def note_rejected(self, owner: str, submission: Submission) -> None:
        """Let the later requests of a model not wait for one that was rejected: clients do not use its number again."""
        if (place := read_place(submission.body)) is None:
            return
        model_id, seq_id = place
        try:
            model = self.find(model_id, owner)
        except ApiError:
            return
        if model.order.reject(seq_id, submission):
            self._journal.add_request(owner, submission)

    async def add(
        self,
        session: Session,
        model_id: str,
        content: AdapterSpec | StoredAdapter,
        lora: LoraSettings,
        user_metadata: Mapping[str, Any] | None,
    ) -> Model:
        """Create a model, and put its adapter into the trainer.

        Raises:
            RequestFailure: The session has ended in the meantime.
        """
        await self._trainer.put(model_id, content if isinstance(content, AdapterSpec) else content.snapshot)
        if session.is_finished:
            await self._trainer.delete(model_id)
            raise RequestFailure("the session has ended.")
        model: Model | None = None

        def discard(message: str) -> None:
            assert model is not None
            model.discard(message)

        state_seq = content.state_seq if isinstance(content, StoredAdapter) else 0
        order = RequestOrder(self._promises, session.owner, self._settings.gap_timeout_s, discard, state_seq + 1)
        model = Model(
            model_id=model_id,
            owner=session.owner,
            session_id=session.session_id,
            spec=content if isinstance(content, AdapterSpec) else content.snapshot.spec,
            lora=lora,
            order=order,
            user_metadata=dict(user_metadata or {}),
            state_seq=state_seq,
            last_use=time.monotonic(),
        )
        self._models[model_id] = model
        session.model_ids.add(model_id)
        if self._is_started:
            order.start()
        return model

    async def load_into(self, model: Model, request: LoadWeights) -> Result:
        """Replace the weights of a model with a checkpoint."""
        found = await self.read(request.path, model.owner, optimizer=request.optimizer)
        await self._trainer.put(model.model_id, found.snapshot)
        model.spec, model.lost_gradient, model.has_gradient = found.checkpoint.spec, "", False
        model.read_state = None
        return to_json({"path": request.path, "model_id": model.model_id, "type": "load_weights"})

    async def read(self, path: str, owner: str, *, optimizer: bool) -> StoredAdapter:
        """Read a checkpoint to train on.

        Raises:
            RequestFailure: The checkpoint does not exist for this owner, is corrupted, or its rank is too high.
        """
        checkpoint, snapshot = await asyncio.to_thread(
            self._checkpoints.find_and_load, path, owner, ("weights",), optimizer=optimizer
        )
        if checkpoint.spec.rank > self._settings.max_rank:
            raise RequestFailure(
                f"path: the checkpoint has the rank {checkpoint.spec.rank}, but --max-rank of the server is "
                f"{self._settings.max_rank}."
            )
        return StoredAdapter(checkpoint=checkpoint, snapshot=snapshot)

    async def save(self, model: Model, kind: Kind, name: str, **options: Any) -> Checkpoint:
        """Save a model; see `Checkpoints.save`.

        Raises:
            RequestFailure: The model cannot be saved, or its weights are too large to sample from.
        """
        snapshot = await self._trainer.read(model)
        if kind == "sampler_weights":
            await asyncio.to_thread(check_weights, snapshot)
        await self._journal.sync()  # so that a checkpoint of a request that was not accepted does not take its name
        return await asyncio.to_thread(
            self._checkpoints.save,
            snapshot,
            model_id=model.model_id,
            kind=kind,
            name=name,
            owner=model.owner,
            train_unembed=model.lora.train_unembed,
            **options,
        )

    def release_idle(self) -> None:
        """Move models without a gradient to disk if the trainer has not used them for `idle_timeout_s`."""
        limit = time.monotonic() - self._settings.idle_timeout_s
        for model in self._models.values():
            if model.read_state is None and model.last_use < limit:
                model.order.run_when_idle(functools.partial(self._release, model))

    async def _release(self, model: Model, seq_id: int) -> None:
        if model.has_gradient or model.lost_gradient or model.read_state is not None:
            return
        if model.state_seq != seq_id or not await self.states.exists(model.model_id):
            await self.states.store(model, seq_id)
            if model.state_seq != seq_id:
                return  # it could not be stored

        async def read_state() -> AdapterSnapshot:
            found = await self.states.find(model.model_id)
            if found is None:
                raise RequestFailure("the stored state of the model is missing on the server.", "server")
            return found.snapshot

        await self._trainer.release(model, read_state)
        logger.info("the model %s is idle and was moved to disk", model.model_id)

    async def delete(self, model_id: str) -> None:
        """Delete a model, if it exists, and its state."""
        if model := self._models.pop(model_id, None):
            await model.order.close("the session has ended.")
            await self._trainer.delete(model_id)
            await self.states.delete(model_id)
