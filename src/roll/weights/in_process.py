"""Transport `in_process`: trainer and engine share one process, so tensors travel as references.

Data flow:  sender stages the tensors in a table of this process ─ token in the handle ─► receiver reads the table

Invariants: a staged tensor may not change until its release (the sender's `stage` … `release` bracket the trainer's idle
time); a token is never used twice, so a handle that outlived its release is refused, as is one from another process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch

from roll.errors import WeightSyncError
from roll.types import WeightUpdate
from roll.weights.receiver import ReceiverPlace, TensorStream

__all__ = ["receive", "stage", "unstage"]

_staged: dict[str, list[tuple[str, torch.Tensor]]] = {}
_numbers = itertools.count()


def stage(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Make tensors reachable in this process.

    Returns:
        The token that a handle carries.
    """
    token = f"{os.getpid()}-{next(_numbers)}"
    _staged[token] = list(tensors)
    return token


def unstage(token: str) -> None:
    """Let go of the tensors; an unknown token is ignored."""
    _staged.pop(token, None)


@contextmanager
def receive(update: WeightUpdate, place: ReceiverPlace) -> Generator[TensorStream]:
    """Read the table."""
    token = update.handle
    if token not in _staged:
        owner = str(token).partition("-")[0]
        reason = (
            "it was released already" if owner == str(os.getpid())
            else f"it was staged in process {owner} and this is process {os.getpid()}: use shared_memory or broadcast"
        )  # fmt: skip
        raise WeightSyncError(f"weight sync of policy version {update.policy_version}: nothing to fetch, {reason}.")
    yield iter(_staged[token])
