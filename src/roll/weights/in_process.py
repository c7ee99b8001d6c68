"""Transport `in_process`: trainer and engine share one process, so tensors are passed by reference.

Data flow:  sender stages tensors in a table of this process ─ token in the handle ─► receiver reads the table

Invariants: a staged tensor must not change until its release (the trainer is idle between the sender's `stage` and
`release`). A token is never reused, so a handle is rejected after its release, or in another process.
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
from roll.weights.checksum import tensor_checksum
from roll.weights.plan import spec_of
from roll.weights.receiver import ReceiverLocation, TensorStream

__all__ = ["InProcessSender", "receive"]


@dataclass(frozen=True, slots=True)
class _Token:
    """Identifies one staging of tensors."""

    process_id: int
    number: int


_staged: dict[_Token | None, list[tuple[str, torch.Tensor]]] = {}
_numbers = itertools.count()


class InProcessSender:
    """The trainer's end. Holds references; only tensors that the source casts or merges are copies."""

    def __init__(self) -> None:
        self._token: _Token | None = None

    def stage(self, source: WeightSource, policy_version: int) -> WeightUpdate | None:
        """Put references into the table; return `None` on ranks other than 0."""
        self._token = token = _Token(os.getpid(), next(_numbers))
        tensors = [(name, tensor) for name, tensor in source if tensor is not None]
        if not tensors:
            return None
        _staged[token] = tensors
        if self._token is not token:  # released by another thread; merged or cast tensors use memory of their own
            del _staged[token]
            raise WeightSyncError(
                f"weight sync of policy version {policy_version}: it was aborted while it was staged."
            )
        manifest = tuple(spec_of(name, tensor) for name, tensor in tensors)
        return WeightUpdate(policy_version=policy_version, manifest=manifest, transport="in_process", handle=token)

    def send(self) -> dict[str, int]:
        """Return the checksums; no data is transferred."""
        return {name: tensor_checksum(tensor) for name, tensor in _staged.get(self._token, ())}

    def release(self, failed: bool) -> None:
        """Remove the references from the table."""
        token, self._token = self._token, None
        _staged.pop(token, None)

    def close(self) -> None:
        """Do nothing: there is no memory to free."""


@contextmanager
def receive(update: WeightUpdate, place: ReceiverLocation) -> Generator[TensorStream]:
    """Read the table."""
    token = update.handle
    if token not in _staged:
        here = os.getpid()
        elsewhere = f"they were staged in process {token.process_id}, this is {here}: use shared_memory or broadcast"
        raise WeightSyncError(
            f"weight sync of policy version {update.policy_version}: the tensors cannot be fetched, "
            f"{'they were released already' if token.process_id == here else elsewhere}."
        )
    yield iter(_staged[token])
