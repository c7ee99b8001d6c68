"""Save and load states for back-ends whose library stores states in its own layout.

The format is that of `roll.training.checkpoint.state`: every back-end can load a checkpoint of any other back-end, with
any layout of ranks.

Weights and moments are gathered one at a time. Each of N ranks writes every N-th tensor, so no rank stores more than
its share.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from roll.errors import CheckpointError
from roll.training.checkpoint.reader import SafeReader
from roll.training.checkpoint.state import (
    check_entries,
    collect_random_states,
    format_first_cause,
    read_counts,
    restore_random_states,
    suppress_dcp_warning,
    write_entries,
)
from roll.training.distributed import Ranks
from roll.training.random_states import RandomStates

__all__ = ["FullWeights", "load_full_state", "save_full_state"]

_PARTS: dict[str, str | None] = {"weight": None, "moment1": "moment1", "moment2": "moment2"}


class FullWeights(Protocol):
    """Reads and writes trained weights and AdamW moments as full tensors, by HF name, independent of their sharding."""

    @property
    def num_updates(self) -> int:
        """The number of AdamW updates."""

    @num_updates.setter
    def num_updates(self, number: int) -> None: ...

    @property
    def names(self) -> list[str]:
        """All names, in the same order on every rank."""

    def get_shape(self, name: str) -> torch.Size:
        """Return the shape of the full weight."""

    def read_full(self, name: str, state: str | None = None) -> Tensor:
        """Return a full master weight, or one of its moments if `state` is `moment1` or `moment2`. Collective."""

    def write(self, name: str, value: Tensor, state: str | None = None) -> None:
        """Set a full master weight, or one of its moments if `state` is given, in the layout that `read_full` returns.

        Call `refresh` once after the last write.
        """

    def refresh(self) -> None:
        """Copy the master weights into the network."""


def save_full_state(
    path: Path, weights: FullWeights, counters: Mapping[str, int], ranks: Ranks, random_states: RandomStates
) -> None:
    """Write a trainer's state below `path`, an empty or missing directory, and fsync. Collective.

    Raises:
        CheckpointError: The state cannot be written.
    """
    state: dict[str, Any] = {}
    for number, name in enumerate(weights.names):
        for part, key in _PARTS.items():
            whole = weights.read_full(name, key)
            if number % ranks.size == ranks.rank:
                state[f"{part}/{name}"] = whole.cpu()
    state["updates"] = torch.full((len(weights.names),), weights.num_updates, dtype=torch.int64)
    state["counters"] = torch.tensor([counters[name] for name in sorted(counters)], dtype=torch.int64)
    write_entries(path, state | collect_random_states(ranks, random_states), ranks)


def load_full_state(
    path: Path, weights: FullWeights, counters: Mapping[str, int], ranks: Ranks, random_states: RandomStates, seed: int
) -> dict[str, int]:
    """Load a trainer's state, saved by any back-end, in place; return the counters. Collective.

    Raises:
        CheckpointError: Files are missing or corrupted, or they belong to another model.
    """
    try:
        reader = SafeReader(path)
        saved = reader.read_metadata().state_dict_metadata
        names = sorted(weights.names)
        shapes = {f"{part}/{name}": weights.get_shape(name) for part in _PARTS for name in names}
        check_entries(path, saved, shapes)
        random = {name: torch.empty_like(value) for name, value in collect_random_states(ranks, random_states).items()}
        few: dict[str, Tensor] = {
            "updates": torch.zeros(len(names), dtype=torch.int64),
            "counters": torch.zeros(len(counters), dtype=torch.int64),
        }
        known = all(name in saved for name in random)
        # The checkpoint has no random states for ranks that the saving run did not have.
        _read(few | random if known else few, reader)
        for name in names:
            # One weight at a time, so that no rank holds the whole model.
            parts = {f"{part}/{name}": torch.empty(weights.get_shape(name)) for part in _PARTS}
            _read(parts, reader)
            for part, key in _PARTS.items():
                weights.write(name, parts[f"{part}/{name}"], key)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # corruption may appear anywhere inside the reader
        raise CheckpointError(
            f"the trainer's checkpoint '{path}' cannot be read: {format_first_cause(error)}"
        ) from error
    weights.refresh()
    weights.num_updates = max(read_counts(path, names, few["updates"]).values(), default=0)
    result = read_counts(path, sorted(counters), few["counters"])
    restore_random_states(random_states, random if known else {}, ranks, seed, result["num_steps"])
    return result


def _read(state: dict[str, Tensor], reader: SafeReader) -> None:
    """Read the tensors of `state` from the checkpoint, in place; every rank reads independently."""
    with suppress_dcp_warning():
        dcp.load(state, storage_reader=reader, no_dist=True)
