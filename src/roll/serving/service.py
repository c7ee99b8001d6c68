"""The requests of the API, independent of HTTP.

Each method takes the owner of the key and a parsed body. Requests with a promise also have a digest, by which repeated
requests are recognized.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from roll.serving.bodies import build_spec, check_params, describe_model, describe_weights
from roll.serving.checkpoints import UNNAMED, Checkpoint, Checkpoints, Kind
from roll.serving.failures import ApiError, RequestFailure
from roll.serving.models import Model, ModelTrainer, check_weights
from roll.serving.ordering import RequestOrder
from roll.serving.promises import Promise, Promises, Result
from roll.serving.requests import (
    CreateModel,
    CreateSamplingSession,
    LoadWeights,
    LoraSettings,
    OptimStep,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
)
from roll.serving.sampling import Sampler
from roll.serving.sessions import Session, Sessions
from roll.serving.settings import ServeSettings
from roll.training.adapter_snapshot import AdapterSnapshot, AdapterSpec

__all__ = ["Service"]

logger = logging.getLogger(__name__)


class Service:
    """The state of a training server.

    Args:
        settings: The settings of the server.
        trainer: The trainer of all models.
        sampler: The sampler of all snapshots.
        checkpoints: The checkpoints on disk.
        tokenizer_id: The name with which clients load the tokenizer.
        max_context: The largest number of tokens of a sequence.
    """

    def __init__(
        self,
        settings: ServeSettings,
        trainer: ModelTrainer,
        sampler: Sampler,
        checkpoints: Checkpoints,
        *,
        tokenizer_id: str,
        max_context: int,
    ) -> None:
        self.settings = settings
        self.sessions = Sessions(settings.session_timeout_s)
        self.promises = Promises()
        self.max_context = max_context
        self._trainer = trainer
        self._sampler = sampler
        self._checkpoints = checkpoints
        self._tokenizer_id = tokenizer_id
        self._models: dict[str, Model] = {}
        self._unnamed: dict[str, Checkpoint] = {}
        """The snapshots without a name, by path."""

    # ---- models

    def create_model(self, owner: str, request: CreateModel, digest: bytes) -> Promise:
        """Create a model with a new adapter."""
        session = self.sessions.find(request.session_id, owner)
        if promise := session.models.find(request.model_seq_id, digest):
            return promise
        self._check_base_model(request.base_model)
        lora = request.lora_config
        spec = build_spec(lora, self.settings)
        model_id = f"{session.session_id}:train:{request.model_seq_id}"

        async def create() -> Result:
            await self._add_model(session, model_id, spec, lora, request.user_metadata)
            return _to_json({"model_id": model_id, "type": "create_model"})

        return self._submit_model(session, request.model_seq_id, digest, create())

    def load_weights(self, owner: str, request: LoadWeights, digest: bytes) -> Promise:
        """Load a checkpoint into a model, or into a new one."""
        if (request.model_id is None) == (request.session_id is None):
            raise ApiError(400, "either model_id or session_id must be given, and not both.", field="model_id")
        if request.base_model is not None:
            self._check_base_model(request.base_model)
        if request.model_id is not None:
            if request.seq_id is None:
                raise ApiError(400, "it is needed with model_id.", field="seq_id")
            model = self._find_model(request.model_id, owner)
            return model.order.submit(request.seq_id, digest, lambda: self._load_into(model, request))
        assert request.session_id is not None
        if request.model_seq_id is None:
            raise ApiError(400, "it is needed with session_id.", field="model_seq_id")
        session = self.sessions.find(request.session_id, owner)
        if promise := session.models.find(request.model_seq_id, digest):
            return promise
        model_id = f"{session.session_id}:train:{request.model_seq_id}"

        async def create() -> Result:
            checkpoint, snapshot = await self._read(request.path, owner, optimizer=request.optimizer)
            spec = checkpoint.spec
            lora = LoraSettings(
                rank=spec.rank, train_mlp=spec.mlp, train_attn=spec.attention, train_unembed=checkpoint.train_unembed
            )
            await self._add_model(session, model_id, snapshot, lora, request.user_metadata)
            return _to_json({"path": request.path, "model_id": model_id, "type": "load_weights"})

        return self._submit_model(session, request.model_seq_id, digest, create())

    def get_info(self, owner: str, model_id: str) -> dict[str, Any]:
        """Return the description of a model."""
        return describe_model(self._find_model(model_id, owner), self.settings.model_name, self._tokenizer_id)

    def forward_backward(self, owner: str, message: Any, digest: bytes) -> Promise:
        """Compute a loss, and its gradient unless the request asks for the forward pass only."""
        model = self._find_model(message.model_id, owner)
        if message.seq_id < 1:
            raise ApiError(400, f"must be at least 1, got {message.seq_id}.", field="seq_id")
        return model.order.submit(message.seq_id, digest, lambda: self._trainer.forward_backward(model, message))

    def optim_step(self, owner: str, request: OptimStep, digest: bytes) -> Promise:
        """Update a model with its gradient."""
        model, params = self._find_model(request.model_id, owner), request.adam_params
        check_params(params)

        async def step() -> Result:
            return _to_json({"metrics": await self._trainer.optim_step(model, params)})

        return model.order.submit(request.seq_id, digest, step)

    # ---- checkpoints

    def save_weights(self, owner: str, request: SaveWeights, digest: bytes) -> Promise:
        """Save a checkpoint to train on."""
        model = self._find_model(request.model_id, owner)

        async def save() -> Result:
            found = await self._save(
                model,
                "weights",
                request.path,
                overwrite=request.overwrite,
                ttl_s=request.ttl_seconds,
                user_metadata=request.user_metadata,
            )
            return _to_json({"path": found.path, "type": "save_weights"})

        return model.order.submit(request.seq_id, digest, save)

    def save_weights_for_sampler(self, owner: str, request: SaveWeightsForSampler, digest: bytes) -> Promise:
        """Save a snapshot to sample from; without a name, a sampling session is created for it."""
        model, number = self._find_model(request.model_id, owner), request.sampling_session_seq_id
        if (request.path is None) == (number is None):
            raise ApiError(400, "either path or sampling_session_seq_id must be given, and not both.", field="path")
        session = self.sessions.find(model.session_id, owner)

        async def save() -> Result:
            if number is None:
                assert request.path is not None
                found = await self._save(
                    model,
                    "sampler_weights",
                    request.path,
                    ttl_s=request.ttl_seconds,
                    user_metadata=request.user_metadata,
                )
                return _to_json({"path": found.path, "type": "save_weights_for_sampler"})
            model.num_snapshots += 1
            found = await self._save(model, "sampler_weights", f"{UNNAMED}{model.num_snapshots}")
            try:
                name = self.sessions.add_sampling(session, number, found.path)
            except ApiError:
                await asyncio.to_thread(self._checkpoints.delete, found)
                raise
            self._unnamed[found.path] = found
            return _to_json({"sampling_session_id": name, "type": "save_weights_for_sampler"})

        return model.order.submit(request.seq_id, digest, save)

    def describe_weights(self, owner: str, path: str) -> dict[str, Any]:
        """Return the description of a checkpoint."""
        return describe_weights(self._find_checkpoint(path, owner, ("weights", "sampler_weights"), "tinker_path"))

    def read_snapshot(self, path: str) -> AdapterSnapshot:
        """Return the snapshot of a path. Blocks."""
        checkpoint = self._unnamed.get(path)
        if checkpoint is None:
            checkpoint = self._checkpoints.find_any(path)
        return self._checkpoints.load(checkpoint, optimizer=False)

    # ---- sampling

    def create_sampling_session(self, owner: str, request: CreateSamplingSession) -> str:
        """Create a sampling session for a path or the base model, and return its ID."""
        session = self.sessions.find(request.session_id, owner)
        if request.base_model is not None:
            self._check_base_model(request.base_model)
        if request.model_path is None:
            if request.base_model is None:
                raise ApiError(400, "model_path or base_model must be given.", field="base_model")
        else:
            self._find_checkpoint(request.model_path, owner, ("sampler_weights",), "model_path")
        return self.sessions.add_sampling(session, request.sampling_session_seq_id, request.model_path)

    def get_sampler(self, owner: str, sampling_session_id: str) -> dict[str, Any]:
        """Return the description of a sampling session."""
        _, found = self.sessions.find_sampling(sampling_session_id, owner)
        named = found.path if found.path not in self._unnamed else None
        return {"sampler_id": sampling_session_id, "base_model": self.settings.model_name, "model_path": named}

    def sample(self, owner: str, request: Sample, digest: bytes) -> Promise:
        """Sample sequences."""
        session, sampling = self.sessions.find_sampling(request.sampling_session_id, owner)
        submissions = session.samples[request.sampling_session_id]
        if promise := submissions.find(request.seq_id, digest):
            return promise
        tokens = self._sampler.check(request)
        promise = self.promises.create(owner, num_sequences=request.num_samples)
        submissions.add(request.seq_id, digest, promise)
        self.promises.run(promise, self._sampler.sample(sampling, request, tokens))
        return promise

    # ---- the end of sessions

    async def finish_session(self, session: Session) -> None:
        """End a session: delete its models and its snapshots without a name. Checkpoints with a name stay."""
        session.is_finished = True
        for model_id in sorted(session.model_ids):
            if model := self._models.pop(model_id, None):
                await model.order.close("the session has ended.")
                await self._trainer.delete(model_id)
        for each in session.sampling.values():
            if each.path is not None and (found := self._unnamed.pop(each.path, None)):
                await asyncio.to_thread(self._checkpoints.delete, found)

    async def clean_up(self) -> None:
        """End sessions whose clients are gone, and delete what has expired."""
        for session in self.sessions.list_expired():
            logger.info("session %s ends, because it sent no heartbeat", session.session_id)
            await self.finish_session(session)
        self.promises.drop_expired()
        await asyncio.to_thread(self._checkpoints.delete_expired)

    async def close(self) -> None:
        """Cancel all requests."""
        for model in self._models.values():
            await model.order.close("the server was stopped.")
        await self.promises.close()

    # ---- parts of requests

    def _submit_model(self, session: Session, number: int, digest: bytes, work: Any) -> Promise:
        promise = self.promises.create(session.owner)
        session.models.add(number, digest, promise)
        self.promises.run(promise, work, can_be_canceled=False)
        return promise

    async def _add_model(
        self,
        session: Session,
        model_id: str,
        content: AdapterSpec | AdapterSnapshot,
        lora: LoraSettings,
        user_metadata: Mapping[str, Any] | None,
    ) -> None:
        await self._trainer.put(model_id, content)
        if session.is_finished:
            await self._trainer.delete(model_id)
            raise RequestFailure("the session has ended.")
        spec = content if isinstance(content, AdapterSpec) else content.spec
        model: Model | None = None

        def discard(message: str) -> None:
            assert model is not None
            model.discard(message)

        order = RequestOrder(self.promises, session.owner, self.settings.gap_timeout_s, discard)
        model = Model(
            model_id=model_id,
            owner=session.owner,
            session_id=session.session_id,
            spec=spec,
            lora=lora,
            order=order,
            user_metadata=dict(user_metadata or {}),
        )
        self._models[model_id] = model
        session.model_ids.add(model_id)

    async def _load_into(self, model: Model, request: LoadWeights) -> Result:
        checkpoint, snapshot = await self._read(request.path, model.owner, optimizer=request.optimizer)
        await self._trainer.put(model.model_id, snapshot)
        model.spec, model.lost_gradient = checkpoint.spec, ""
        return _to_json({"path": request.path, "model_id": model.model_id, "type": "load_weights"})

    async def _read(self, path: str, owner: str, *, optimizer: bool) -> tuple[Checkpoint, AdapterSnapshot]:
        checkpoint = await asyncio.to_thread(self._checkpoints.find, path, owner, ("weights",))
        if checkpoint.spec.rank > self.settings.max_rank:
            raise RequestFailure(
                f"path: the checkpoint has the rank {checkpoint.spec.rank}, but --max-rank of the server is "
                f"{self.settings.max_rank}."
            )
        return checkpoint, await asyncio.to_thread(self._checkpoints.load, checkpoint, optimizer=optimizer)

    async def _save(self, model: Model, kind: Kind, name: str, **options: Any) -> Checkpoint:
        snapshot = await self._trainer.read(model)
        if kind == "sampler_weights":
            await asyncio.to_thread(check_weights, snapshot)
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

    def _find_checkpoint(self, path: str, owner: str, kinds: tuple[Kind, ...], name: str) -> Checkpoint:
        try:
            return self._checkpoints.find(path, owner, kinds)
        except RequestFailure as failure:
            raise ApiError(404, failure.message.removeprefix("path: "), field=name) from failure

    def _find_model(self, model_id: str, owner: str) -> Model:
        model = self._models.get(model_id)
        if model is None or model.owner != owner:
            raise ApiError(404, "there is no such model of this key, or its session has ended.", field="model_id")
        self.sessions.find(model.session_id, owner)
        return model

    def _check_base_model(self, name: str) -> None:
        if name != self.settings.model_name:
            served = self.settings.model_name
            raise ApiError(
                400, f"'{name}' is not served: the base model of this server is '{served}'.", field="base_model"
            )


def _to_json(content: Mapping[str, Any]) -> Result:
    return Result(body=json.dumps(content).encode())
