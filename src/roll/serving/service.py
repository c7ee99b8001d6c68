"""The requests of the API, independent of HTTP.

Each method takes the owner of the key, a parsed body, and the request as it was received. What is accepted is in the
journal, so that a restarted server with the same directory continues.
"""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from typing import Any

from roll.serving.bodies import (
    build_lora_settings,
    build_spec,
    check_base_model,
    check_params,
    describe_model,
    describe_weights,
    find_checkpoint,
)
from roll.serving.checkpoints import UNNAMED, Checkpoint, Checkpoints, build_path
from roll.serving.failures import ApiError, RequestFailure
from roll.serving.journal import Journal
from roll.serving.model_store import ModelStore
from roll.serving.models import ModelTrainer
from roll.serving.ordering import Work
from roll.serving.promises import Promise, Promises
from roll.serving.requests import (
    CreateModel,
    CreateSamplingSession,
    LoadWeights,
    OptimStep,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
)
from roll.serving.sampling import Sampler
from roll.serving.sessions import Session, Sessions
from roll.serving.settings import ServeSettings
from roll.serving.states import get_state_path
from roll.serving.submissions import Result, Submission, to_json

__all__ = ["Service"]

logger = logging.getLogger(__name__)

COMPACT_BYTES = 64 * 2**20
"""The size of the journal from which records that are not needed are removed."""


class Service:
    """The state of a training server.

    Args:
        settings: The settings of the server.
        trainer: The trainer of all models.
        sampler: The sampler of all snapshots.
        checkpoints: The checkpoints on disk.
        journal: The journal.
        tokenizer_id: The name with which clients load the tokenizer.
        max_context: The largest number of tokens of a sequence.
    """

    def __init__(
        self,
        settings: ServeSettings,
        trainer: ModelTrainer,
        sampler: Sampler,
        checkpoints: Checkpoints,
        journal: Journal,
        *,
        tokenizer_id: str,
        max_context: int,
    ) -> None:
        self.settings = settings
        self.sessions = Sessions(settings.session_timeout_s)
        self.promises = Promises(journal=journal)
        self.max_context = max_context
        self.trainer = trainer
        self._sampler = sampler
        self._checkpoints = checkpoints
        self.journal = journal
        self.is_closed = False
        self._tokenizer_id = tokenizer_id
        self.models = ModelStore(settings, self.sessions, self.promises, trainer, checkpoints, journal)
        self._unnamed: dict[str, Checkpoint] = {}
        """The snapshots without a name, by path."""

    # ---- sessions

    def create_session(self, owner: str, submission: Submission) -> str:
        """Create a session, and return its ID."""
        self.journal.add_request(owner, submission)
        return self.sessions.create(owner, submission.request_id).session_id

    # ---- models

    def create_model(self, owner: str, request: CreateModel, submission: Submission) -> Promise:
        """Create a model with a new adapter."""
        session = self.sessions.find(request.session_id, owner)
        if promise := session.models.find(request.model_seq_id, submission):
            return promise
        check_base_model(request.base_model, self.settings)
        lora = request.lora_config
        spec = build_spec(lora, self.settings, int(submission.request_id[:15], 16))
        model_id = f"{session.session_id}:train:{request.model_seq_id}"

        async def create() -> Result:
            state = await self.models.states.find(model_id)
            await self.models.add(session, model_id, state or spec, lora, request.user_metadata)
            return to_json({"model_id": model_id, "type": "create_model"})

        return self._submit_model(session, request.model_seq_id, submission, create())

    def load_weights(self, owner: str, request: LoadWeights, submission: Submission) -> Promise:
        """Load a checkpoint into a model, or into a new one."""
        if (request.model_id is None) == (request.session_id is None):
            raise ApiError(400, "either model_id or session_id must be given, and not both.", field="model_id")
        if request.base_model is not None:
            check_base_model(request.base_model, self.settings)
        if request.model_id is not None:
            if request.seq_id is None:
                raise ApiError(400, "it is needed with model_id.", field="seq_id")
            model = self.models.find(request.model_id, owner)
            return model.order.submit(
                request.seq_id,
                submission,
                Work(
                    run=lambda: self.models.load_into(model, request),
                    changes_model=True,
                    after=lambda: self.models.states.store(model, request.seq_id or 0),
                ),
            )
        assert request.session_id is not None
        if request.model_seq_id is None:
            raise ApiError(400, "it is needed with session_id.", field="model_seq_id")
        session = self.sessions.find(request.session_id, owner)
        if promise := session.models.find(request.model_seq_id, submission):
            return promise
        model_id = f"{session.session_id}:train:{request.model_seq_id}"

        async def create() -> Result:
            state = await self.models.states.find(model_id)
            found = state or await self.models.read(request.path, owner, optimizer=request.optimizer)
            lora = build_lora_settings(found.checkpoint)
            model = await self.models.add(session, model_id, found, lora, request.user_metadata)
            if state is None:
                await self.models.states.store(model, 0)  # the checkpoint may expire
            return to_json({"path": request.path, "model_id": model_id, "type": "load_weights"})

        return self._submit_model(session, request.model_seq_id, submission, create())

    def get_info(self, owner: str, model_id: str) -> dict[str, Any]:
        """Return the description of a model."""
        return describe_model(self.models.find(model_id, owner), self.settings.model_name, self._tokenizer_id)

    def forward_backward(self, owner: str, message: Any, submission: Submission) -> Promise:
        """Compute a loss, and its gradient unless the request asks for the forward pass only."""
        model = self.models.find(message.model_id, owner)
        if message.seq_id < 1:
            raise ApiError(400, f"must be at least 1, got {message.seq_id}.", field="seq_id")
        trains = not message.forward_only
        run = partial(self.trainer.forward_backward, model, message)
        work = Work(run=run, changes_model=trains, loses_gradient=trains)
        return model.order.submit(message.seq_id, submission, work)

    def optim_step(self, owner: str, request: OptimStep, submission: Submission) -> Promise:
        """Update a model with its gradient."""
        model, params = self.models.find(request.model_id, owner), request.adam_params
        check_params(params)

        async def step() -> Result:
            return to_json({"metrics": await self.trainer.optim_step(model, params)})

        async def store() -> None:
            await self.models.states.store_if_due(model, request.seq_id)

        return model.order.submit(request.seq_id, submission, Work(run=step, changes_model=True, after=store))

    # ---- checkpoints

    def save_weights(self, owner: str, request: SaveWeights, submission: Submission) -> Promise:
        """Save a checkpoint to train on."""
        model = self.models.find(request.model_id, owner)

        async def save() -> Result:
            found = await self.models.save(
                model,
                "weights",
                request.path,
                request_id=submission.request_id,
                overwrite=request.overwrite,
                ttl_s=request.ttl_seconds,
                user_metadata=request.user_metadata,
            )
            return to_json({"path": found.path, "type": "save_weights"})

        return model.order.submit(request.seq_id, submission, Work(run=save))

    def save_weights_for_sampler(self, owner: str, request: SaveWeightsForSampler, submission: Submission) -> Promise:
        """Save a snapshot to sample from; without a name, a sampling session is created for it."""
        model, number = self.models.find(request.model_id, owner), request.sampling_session_seq_id
        if (request.path is None) == (number is None):
            raise ApiError(400, "either path or sampling_session_seq_id must be given, and not both.", field="path")
        session = self.sessions.find(model.session_id, owner)

        async def save() -> Result:
            if number is None:
                assert request.path is not None
                found = await self.models.save(
                    model,
                    "sampler_weights",
                    request.path,
                    request_id=submission.request_id,
                    ttl_s=request.ttl_seconds,
                    user_metadata=request.user_metadata,
                )
                return to_json({"path": found.path, "type": "save_weights_for_sampler"})
            found = await self.models.save(
                model, "sampler_weights", f"{UNNAMED}{request.seq_id}", request_id=submission.request_id
            )
            try:
                name = self._add_unnamed(session, number, found, submission)
            except ApiError:
                await asyncio.to_thread(self._checkpoints.delete, found)
                raise
            return to_json({"sampling_session_id": name, "type": "save_weights_for_sampler"})

        promise = model.order.submit(request.seq_id, submission, Work(run=save))
        if number is not None and isinstance(submission.outcome, Result):
            path = build_path(model.model_id, "sampler_weights", f"{UNNAMED}{request.seq_id}")
            self._add_unnamed(session, number, self._checkpoints.find_any(path, submission.request_id), submission)
        return promise

    def _add_unnamed(self, session: Session, number: int, found: Checkpoint, submission: Submission) -> str:
        name = self.sessions.add_sampling(session, number, found.path, found.request_id)
        self._unnamed[found.path] = found
        session.kept.add(submission.request_id)
        return name

    def describe_weights(self, owner: str, path: str) -> dict[str, Any]:
        """Return the description of a checkpoint."""
        return describe_weights(
            find_checkpoint(self._checkpoints, path, owner, ("weights", "sampler_weights"), "tinker_path")
        )

    # ---- sampling

    def create_sampling_session(self, owner: str, request: CreateSamplingSession, submission: Submission) -> str:
        """Create a sampling session for a path or the base model, and return its ID."""
        session, saved_by = self.sessions.find(request.session_id, owner), ""
        if request.base_model is not None:
            check_base_model(request.base_model, self.settings)
        if request.model_path is not None:
            saved_by = _find_saved_by(self._checkpoints, owner, request.model_path, submission)
        elif request.base_model is None:
            raise ApiError(400, "model_path or base_model must be given.", field="base_model")
        name = self.sessions.add_sampling(session, request.sampling_session_seq_id, request.model_path, saved_by)
        self.journal.add_request(owner, submission)
        if submission.outcome is None:
            self.journal.add_outcome(submission.request_id, to_json({"saved_by": saved_by}))
        session.kept.add(submission.request_id)
        return name

    def get_sampler(self, owner: str, sampling_session_id: str) -> dict[str, Any]:
        """Return the description of a sampling session."""
        _, found = self.sessions.find_sampling(sampling_session_id, owner)
        named = found.path if found.path not in self._unnamed else None
        return {"sampler_id": sampling_session_id, "base_model": self.settings.model_name, "model_path": named}

    def sample(self, owner: str, request: Sample, submission: Submission) -> Promise:
        """Sample sequences."""
        session, sampling = self.sessions.find_sampling(request.sampling_session_id, owner)
        submissions = session.samples[request.sampling_session_id]
        if promise := submissions.find(request.seq_id, submission):
            return promise
        tokens = self._sampler.check(request)
        promise = self.promises.create(owner, submission, num_sequences=request.num_samples)
        submissions.add(request.seq_id, submission, promise)
        if promise.outcome is None:
            seed = int(submission.request_id[:15], 16)
            self.promises.run(promise, self._sampler.sample(sampling, request, tokens, seed))
        return promise

    # ---- the end of sessions

    async def finish_session(self, session: Session) -> None:
        """End a session: delete its models and its snapshots without a name. Checkpoints with a name stay."""
        self.journal.finish(session.session_id)
        session.is_finished = True
        await self.journal.sync()  # a later server must not restore the session when its files are gone
        for model_id in sorted(session.model_ids):
            await self.models.delete(model_id)
        for each in session.sampling.values():
            if each.path is not None and (found := self._unnamed.pop(each.path, None)):
                await asyncio.to_thread(self._checkpoints.delete, found)
        session.forget()

    async def clean_up(self) -> None:
        """End sessions whose clients are gone, move idle models to disk, and delete what has expired."""
        self.promises.drop_expired()
        self.models.release_idle()
        await asyncio.to_thread(self._checkpoints.delete_expired)  # first, because the disk may be full
        for session in self.sessions.list_expired():
            logger.info("session %s ends, because it sent no heartbeat", session.session_id)
            await self.finish_session(session)
        if self.journal.should_compact(COMPACT_BYTES):
            needed = self._list_needed()
            self.journal.compact(lambda record: record.request_id in needed)

    def _list_needed(self) -> set[str]:
        """Return the IDs of the requests with which a later server restores the state."""
        needed: set[str] = set()
        for session in self.sessions:
            if not session.is_finished:
                needed |= {session.session_id} | session.kept
        for model in self.models:
            needed |= set(model.order.list_since(model.state_seq))
        return needed | set(self.promises)

    async def start(self) -> None:
        """Run the requests of restored models, and delete files that no model or session needs."""
        self.models.start()
        restored = {model.model_id for model in self.models}
        needed = {*self._unnamed, *map(get_state_path, restored)}

        def is_kept(model_id: str) -> bool:
            """Return whether a model could not be restored; it may be if the server is started again."""
            return model_id not in restored and self.sessions.is_open(model_id.partition(":")[0])

        await asyncio.to_thread(self._checkpoints.delete_hidden, needed, is_kept)

    async def close(self) -> None:
        """Stop all requests; a later server continues them."""
        self.is_closed = True
        self.journal.close()
        for model in self.models:
            await model.order.stop()
        await self.promises.close()

    def _submit_model(self, session: Session, number: int, submission: Submission, work: Any) -> Promise:
        promise = self.promises.create(session.owner, submission)
        session.models.add(number, submission, promise)
        session.kept.add(submission.request_id)
        if isinstance(promise.outcome, RequestFailure):
            work.close()
        else:
            self.promises.run(promise, work, can_be_canceled=False)
        return promise


def _find_saved_by(checkpoints: Checkpoints, owner: str, path: str, submission: Submission) -> str:
    """Return the ID of the request that saved the snapshot of a new sampling session.

    For a session that is restored, the ID is in the journal: its path may have other weights now.
    """
    if isinstance(submission.outcome, Result):
        return json.loads(submission.outcome.body)["saved_by"]
    return find_checkpoint(checkpoints, path, owner, ("sampler_weights",), "model_path").request_id
