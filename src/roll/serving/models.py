"""The models of clients: one adapter each, with its gradient and optimizer state, in one trainer.

    forward_backward, forward_backward, … ─► gradient (a sum) ─► optim_step ─► weights

Models take turns: a call of the trainer is for one model. A request that fails discards the gradient of its model, and
the next `optim_step` of the model is rejected, because it would otherwise update with only a part of the data.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from roll.errors import WorkerDiedError
from roll.protocols import TrainerGroup
from roll.serving import wire
from roll.serving.data import decode_request
from roll.serving.failures import RequestFailure, describe_failure
from roll.serving.ordering import RequestOrder
from roll.serving.requests import AdamParams, LoraSettings
from roll.serving.submissions import Result
from roll.training.adapter_snapshot import AdapterSnapshot, AdapterSpec
from roll.types import OptimParams

__all__ = ["MAX_WEIGHT", "Model", "ModelTrainer", "check_weights"]

logger = logging.getLogger(__name__)

MAX_WEIGHT = 1000.0
"""The largest absolute weight of an adapter from which the server samples. Typical weights are below 1."""


@dataclass(kw_only=True, slots=True)
class Model:
    """A model of a client."""

    model_id: str
    """The ID, which is also the name of the adapter in the trainer."""
    owner: str
    session_id: str
    spec: AdapterSpec
    lora: LoraSettings
    order: RequestOrder
    lost_gradient: str = ""
    """Why the gradient was discarded; empty if it was not."""
    user_metadata: dict[str, Any] = field(default_factory=dict)
    state_seq: int = 0
    """The sequence ID of the last request that the stored state includes."""
    num_unstored_steps: int = 0
    """The number of optimizer steps since the stored state."""
    has_gradient: bool = False
    last_use: float = 0.0
    """The time (`time.monotonic`) of the last call to the trainer."""
    read_state: Callable[[], Awaitable[AdapterSnapshot]] | None = None
    """Reads the stored state; `None` while the model is in the trainer."""

    def discard(self, reason: str) -> None:
        """Mark the gradient as lost; the next `optim_step` is rejected."""
        self.lost_gradient = self.lost_gradient or reason


class ModelTrainer:
    """Calls a trainer for one model at a time.

    Args:
        group: The trainer, with adapters (`model.lora`).
        max_tokens: The largest number of tokens of a datum.
        vocab_size: The number of tokens in the vocabulary.
    """

    def __init__(self, group: TrainerGroup, max_tokens: int, vocab_size: int) -> None:
        self._group = group
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._turn = asyncio.Lock()
        self.died: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()
        """Fails with the error of the first rank whose process ends. The server must then be restarted."""

    @asynccontextmanager
    async def _take_turn(self) -> AsyncIterator[None]:
        """Use the trainer for one request. If the trainer dies, the request stays without an outcome.

        A later server then runs the request again, instead of telling the client that it failed.
        """
        async with self._turn:
            try:
                yield
            except WorkerDiedError as error:
                if not self.died.done():
                    self.died.set_exception(error)
                await asyncio.Event().wait()  # until the server stops

    async def put(self, model_id: str, content: AdapterSpec | AdapterSnapshot) -> None:
        """Create a model's adapter, or replace its weights, gradient and optimizer state."""
        async with self._take_turn():
            await self._group.call("put_adapter", model_id, content)

    async def read(self, model: Model) -> AdapterSnapshot:
        """Return a copy of a model's adapter."""
        async with self._take_turn():
            await self._load(model)
            return await self._group.call("read_adapter", model.model_id)

    async def release(self, model: Model, read_state: Callable[[], Awaitable[AdapterSnapshot]]) -> None:
        """Free the memory of a model without a gradient until it is used again, when `read_state` reads it."""
        async with self._take_turn():
            await self._group.call("delete_adapter", model.model_id)
            model.read_state = read_state

    async def _load(self, model: Model) -> None:
        """Put a released model back into the trainer. Call this only within `_take_turn`."""
        model.last_use = time.monotonic()
        if model.read_state is not None:
            await self._group.call("put_adapter", model.model_id, await model.read_state())
            model.read_state = None

    async def delete(self, model_id: str) -> None:
        """Delete a model's adapter."""
        async with self._take_turn():
            await self._group.call("delete_adapter", model_id)

    async def forward_backward(self, model: Model, message: Any) -> Result:
        """Compute the loss of a request and add its gradient, unless it asks for the forward pass only."""
        try:
            request = await asyncio.to_thread(
                decode_request, message, max_tokens=self._max_tokens, vocab_size=self._vocab_size
            )
            async with self._take_turn():
                await self._load(model)
                await self._group.use_adapter(model.model_id)
                run = self._group.measure if request.forward_only else self._group.forward_backward
                model.has_gradient |= not request.forward_only
                found = await run(request.batch, request.loss)
        except BaseException as error:
            if not message.forward_only:
                cause = "it was canceled" if isinstance(error, asyncio.CancelledError) else str(describe_failure(error))
                model.discard(f"request {message.seq_id} (forward_backward) failed: {cause}")
            raise
        if not np.isfinite(found.loss):
            problem = f"the loss is {found.loss}: lower the learning rate, or check logprobs and advantages."
            if not request.forward_only:
                model.discard(f"request {message.seq_id} (forward_backward) failed: {problem}")
            raise RequestFailure(problem)
        logprobs = [each[1:] for each in found.logprobs]
        body = await asyncio.to_thread(wire.encode_outputs, logprobs, {"loss:sum": float(found.loss)})
        return Result(body=body, content_type=wire.CONTENT_TYPE)

    async def optim_step(self, model: Model, params: AdamParams) -> dict[str, float]:
        """Update a model with its gradient.

        Raises:
            RequestFailure: A part of the gradient was discarded, there is no gradient, or it is not finite. The weights
                are unchanged, and there is no gradient afterwards.
        """
        async with self._take_turn():
            await self._load(model)
            await self._group.use_adapter(model.model_id)
            model.has_gradient = False
            if reason := model.lost_gradient:
                model.lost_gradient = ""
                await self._group.discard_gradients()
                raise RequestFailure(
                    f"optim_step was rejected and the weights are unchanged, because {reason.rstrip('.')}. The "
                    "gradient was discarded: send forward_backward for all data again."
                )
            try:
                found = await self._group.optim_step(
                    OptimParams(
                        learning_rate=params.learning_rate,
                        beta1=params.beta1,
                        beta2=params.beta2,
                        epsilon=params.eps,
                        weight_decay=params.weight_decay,
                        max_grad_norm=params.grad_clip_norm or float("inf"),
                    )
                )
            except ValueError as error:
                raise RequestFailure(f"{error}.") from error
        if not found.stepped:
            raise RequestFailure(
                f"optim_step was rejected and the weights are unchanged: the gradient's norm is {found.grad_norm}. "
                "The gradient was discarded."
            )
        return {"grad_norm": float(found.grad_norm), "learning_rate": float(found.learning_rate)}


def check_weights(snapshot: AdapterSnapshot) -> None:
    """Check that an engine can compute with a snapshot.

    Weights that are not finite, or so large that logits overflow, would end the engine for the requests of all clients.

    Raises:
        RequestFailure: A weight is not finite or larger than `MAX_WEIGHT`.
    """
    for name, weight in snapshot.weights.items():
        largest = float(weight.abs().max())
        if not largest <= MAX_WEIGHT:
            raise RequestFailure(
                f"the training has diverged: the largest weight of '{name}' is {largest:g}, and at most {MAX_WEIGHT:g} "
                "can be sampled from. Load an earlier checkpoint, and lower the learning rate."
            )
