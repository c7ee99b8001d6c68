"""Transport `in_process`: trainer and engine share one process, so tensors are passed by reference.

Data flow:  sender stores tensors in a table of this process ─ token in the handle ─► receiver reads the table

Invariants: staged tensors do not change until their release, because the trainer is idle between the sender's `stage`
and `release`. A token is never reused, so a handle is rejected after the release and in other processes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from roll.errors import WeightSyncError
from roll.protocols import WeightSource
from roll.types import WeightUpdate
from roll.weights.checksum import compute_checksum
from roll.weights.plan import describe_tensor
from roll.weights.receiver import ReceiverLocation, TensorStream

__all__ = ["InProcessSender", "receive"]


@dataclass(frozen=True, slots=True)
class _Token:
    """Identifies the tensors that one call to `stage` stored."""

    process_id: int
    number: int


_staged_tensors: dict[_Token | None, list[tuple[str, torch.Tensor]]] = {}
_token_numbers = itertools.count()


class InProcessSender:
    """The trainer's end of the transport `in_process`.

    It stores references to tensors; a tensor is copied only if the source casts or merges it.
    """

    def __init__(self) -> None:
        self._token: _Token | None = None

    def stage(self, source: WeightSource, policy_version: int) -> WeightUpdate | None:
        """Store references to all tensors in this process; return the update, or `None` on ranks other than 0."""
        self._token = token = _Token(os.getpid(), next(_token_numbers))
        tensors = [(name, tensor) for name, tensor in source if tensor is not None]
        if not tensors:
            return None
        _staged_tensors[token] = tensors
        if self._token is not token:  # released by another thread; merged or cast tensors would keep their memory
            del _staged_tensors[token]
            raise WeightSyncError(
                f"weight sync of policy version {policy_version}: the sync was aborted while weights were being staged."
            )
        manifest = tuple(describe_tensor(name, tensor) for name, tensor in tensors)
        return WeightUpdate(policy_version=policy_version, manifest=manifest, transport="in_process", handle=token)

    def send(self) -> dict[str, int]:
        """Return the checksums by tensor name; no data is transferred."""
        return {name: compute_checksum(tensor) for name, tensor in _staged_tensors.get(self._token, ())}

    def release(self, failed: bool) -> None:
        """Remove the references to the staged tensors."""
        token, self._token = self._token, None
        _staged_tensors.pop(token, None)

    def close(self) -> None:
        """Do nothing, because this transport allocates no memory."""


@contextmanager
def receive(update: WeightUpdate, location: ReceiverLocation) -> Generator[TensorStream]:
    """Yield the stream of the staged tensors.

    Raises:
        WeightSyncError: the tensors have been released, or belong to another process.
    """
    token = update.handle
    if token not in _staged_tensors:
        here = os.getpid()
        elsewhere = f"they were staged in process {token.process_id}, this is {here}: use shared_memory or broadcast"
        raise WeightSyncError(
            f"weight sync of policy version {update.policy_version}: the tensors are not available: "
            f"{'they were released already' if token.process_id == here else elsewhere}."
        )
    yield iter(_staged_tensors[token])
