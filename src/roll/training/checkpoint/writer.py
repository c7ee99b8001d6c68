"""Write a trainer's state in the background while training continues.

    begin ─ copy this rank's part to host memory ─► thread: write, fsync ─► finish: done, or its error

Ranks communicate while they write, so the threads use a separate process group. The caller renames the checkpoint to
its final name once all ranks have finished.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from roll.errors import CheckpointError
from roll.training.checkpoint.state import write_entries
from roll.training.distributed import Ranks

__all__ = ["StateWriter"]


class StateWriter:
    """Writes a trainer's states in the background, one at a time.

    Args:
        ranks: The ranks that write together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """True if no write is running."""
        return self._thread is None or not self._thread.is_alive()

    def begin(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """Copy a state and start to write it in the background; the previous write must have finished. Collective.

        Raises:
            CheckpointError: A rank cannot copy its state; then no rank writes.
        """
        if self._group is None and self._ranks.size > 1:
            # The default group serves training at the same time, and its collectives must not mix with those of the
            # write.
            self._group = dist.new_group(backend="gloo")
        copied, failure = {}, ""
        try:
            copied = {name: _copy_to_host(tensor) for name, tensor in state.items()}
        except Exception as error:
            failure = f"rank {self._ranks.rank} cannot copy its state: {type(error).__name__}: {error}"
        # All ranks write or none: a rank without a copy would leave the others waiting in the collectives of the write.
        if failures := list(filter(None, self._gather_failures(failure))):
            raise CheckpointError(failures[0])
        self._thread = threading.Thread(target=self._write, args=(path, copied), name="checkpoint", daemon=True)
        self._thread.start()

    def _gather_failures(self, failure: str) -> list[str]:
        """Return the failure messages of all ranks; an empty string for a rank without a failure."""
        if self._group is None:
            return [failure]
        failures = [""] * self._ranks.size
        dist.all_gather_object(failures, failure, group=self._group)
        return failures

    def finish(self) -> None:
        """Wait for the write that `begin` started.

        Raises:
            CheckpointError, OSError: The write failed; raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, path: Path, state: Mapping[str, Tensor]) -> None:
        try:
            write_entries(path, state, self._ranks, self._group)
        except BaseException as error:  # raised by `finish`
            self._failure = error


@torch.no_grad()
def _copy_to_host(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):  # without `from_local`, which would move it back to its mesh's device
        return DTensor(_copy_to_host(tensor.to_local()), tensor._spec, requires_grad=False)
    return tensor.detach().to("cpu", copy=True)
