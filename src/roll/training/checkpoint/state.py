"""Save and load a trainer's complete state, through `torch.distributed.checkpoint`.

    weight/<name>        the trainable weights, as stored by the optimizer
    moment1/<name>, moment2/<name>                          AdamW's moments, or
    moment1_codes/<name>, moment1_scales/<name>, …          the same in 8 bits
    buffer/<layer>       biases of MoE routers; absent from older checkpoints
    updates              number of updates of each weight, in the order of the names
    counters             optimizer steps so far, consecutive steps with non-finite gradients
    rng/<stream>         random states, by random stream (`Ranks.stream`)

Each rank saves its own shards, and any number of ranks can load them. Ranks that did not exist when the state was saved
get new random states, derived from the seed, the stream and the step.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.futures import Future

from roll.errors import CheckpointError, shorten
from roll.tracking import atomic
from roll.training.checkpoint.reader import SafeReader
from roll.training.distributed import Ranks
from roll.training.optimizer import Optimizer
from roll.training.precision import MasterWeights
from roll.training.random_states import RandomStates

__all__ = [
    "check_entries",
    "collect_random_states",
    "collect_state",
    "format_first_cause",
    "load_state",
    "read_counts",
    "restore_random_states",
    "suppress_dcp_warning",
    "write_entries",
]

_DTYPES = {"updates": torch.int64, "counters": torch.int64, "rng": torch.uint8}
"""Dtypes of entries, by the first part of their names; the dtype of a weight is any floating-point dtype."""
_MAX_COUNT = 2**53
"""Upper bound of a plausible count."""


def collect_state(
    weights: MasterWeights,
    optimizer: Optimizer,
    counters: Mapping[str, int],
    ranks: Ranks,
    random_states: RandomStates,
    buffers: Sequence[Tensor] = (),
) -> dict[str, Tensor]:
    """Return a trainer's state as tensors by name, sharing the trainer's memory. Collective."""
    state: dict[str, Any] = _collect_tensors(weights, optimizer)
    # All ranks save the same names, in sorted order: a rank has only the weights of its own pipeline stage.
    updates = ranks.merge_stages(optimizer.get_steps())
    state["updates"] = torch.tensor([updates[name] for name in sorted(updates)], dtype=torch.int64)
    state["counters"] = torch.tensor([counters[name] for name in sorted(counters)], dtype=torch.int64)
    return state | collect_random_states(ranks, random_states) | _name_buffers(buffers)


def write_entries(path: Path, state: Mapping[str, Any], ranks: Ranks, group: dist.ProcessGroup | None = None) -> None:
    """Write tensors by name below `path`, an empty or missing directory, and fsync. Collective, in a group of all
    ranks.

    A name that several ranks have is written once. If one rank fails, all ranks raise.

    Raises:
        OSError: The disk is full, or cannot be written to.
        CheckpointError: The state cannot be written for another reason.
    """
    try:
        with suppress_dcp_warning():
            writer = _Writer(path, sync_files=True)
            dcp.save(dict(state), storage_writer=writer, process_group=group, no_dist=ranks.size == 1)
    except CheckpointException as error:  # not an `Exception`: handlers would not catch it
        failure = next(failure for failure, _ in error.failures.values())
        if isinstance(failure, OSError):
            raise failure from error
        what = f"the trainer's state cannot be written to '{path}': {type(failure).__name__}: {failure}"
        raise CheckpointError(what) from error
    atomic.fsync(path)  # the directory entries; the files themselves are synced already


def load_state(
    path: Path,
    weights: MasterWeights,
    optimizer: Optimizer,
    counters: Mapping[str, int],
    ranks: Ranks,
    random_states: RandomStates,
    seed: int,
    buffers: Sequence[Tensor] = (),
) -> dict[str, int]:
    """Load a state that `write_entries` wrote, in place; return the counters. Collective.

    Raises:
        CheckpointError: Files are missing or corrupted, or they belong to another model.
    """
    try:
        reader = SafeReader(path)
        saved = reader.read_metadata().state_dict_metadata
        state: dict[str, Any] = _collect_tensors(weights, optimizer)
        shapes = ranks.merge_stages({name: tensor.shape for name, tensor in state.items()})
        check_entries(path, saved, shapes)
        names = sorted(ranks.merge_stages(dict.fromkeys(weights.parameters)))
        state["updates"] = torch.zeros(len(names), dtype=torch.int64)
        state["counters"] = torch.zeros(len(counters), dtype=torch.int64)
        state.update({name: buffer for name, buffer in _name_buffers(buffers).items() if name in saved})
        random = {name: torch.empty_like(value) for name, value in collect_random_states(ranks, random_states).items()}
        known = all(name in saved for name in random)
        if known:
            state.update(random)
        with suppress_dcp_warning():
            dcp.load(state, storage_reader=reader, no_dist=ranks.size == 1)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # corruption may appear anywhere inside the reader
        raise CheckpointError(
            f"the trainer's checkpoint '{path}' cannot be read: {format_first_cause(error)}"
        ) from error
    weights.refresh()
    optimizer.set_steps(read_counts(path, names, state["updates"]))
    result = read_counts(path, sorted(counters), state["counters"])
    restore_random_states(
        random_states, {name: state[name] for name in random} if known else {}, ranks, seed, result["num_steps"]
    )
    return result


def check_entries(path: Path, saved: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Reject a checkpoint whose index `saved` does not have the tensors named in `shapes` with these shapes.

    Raises:
        CheckpointError: Tensors are missing, differ in shape, or have a dtype that is never written.
    """
    missing = sorted(set(shapes) - set(saved))
    # Other entries, such as biases of routers, are absent from older checkpoints.
    extra = sorted(n for n in set(saved) - set(shapes) if n.startswith(("weight/", "moment")))
    if missing or extra:
        raise CheckpointError(
            f"the trainer's checkpoint '{path}' belongs to another model: missing tensors {missing[:3]}, "
            f"unexpected tensors {extra[:3]}. Resume with the model and training.optimizer settings of the run that "
            "wrote the checkpoint."
        )
    wrong = [name for name, shape in shapes.items() if tuple(saved[name].size) != tuple(shape)]
    if wrong:
        raise CheckpointError(
            f"the trainer's checkpoint '{path}' belongs to another model: tensors with other shapes {wrong[:3]}. "
            "Resume with the model of the run that wrote it."
        )
    for name, entry in saved.items():
        kind, dtype = name.partition("/")[0], entry.properties.dtype
        if not (dtype.is_floating_point if kind == "weight" else dtype == _DTYPES.get(kind, dtype)):
            raise CheckpointError(f"the trainer's checkpoint '{path}' is corrupted: {shorten(name)} has dtype {dtype}")


def read_counts(path: Path, names: Sequence[str], values: Tensor) -> dict[str, int]:
    """Return the counts in `values` by name, after checking that they are plausible.

    Raises:
        CheckpointError: A count is outside the possible range.
    """
    counts = dict(zip(names, values.tolist(), strict=True))
    for name, count in counts.items():
        if not 0 <= count < _MAX_COUNT:
            raise CheckpointError(f"the trainer's checkpoint '{path}' is corrupted: the count of '{name}' is {count}")
    return counts


def restore_random_states(
    random_states: RandomStates, saved: Mapping[str, Tensor], ranks: Ranks, seed: int, num_steps: int
) -> None:
    """Restore the states that `collect_random_states` returned; a rank without saved states gets new states.

    Raises:
        CheckpointError: A value is not the state of a generator.
    """
    if saved:
        try:
            random_states.restore({name.rpartition("/")[2]: state for name, state in saved.items()})
        except RuntimeError as error:
            raise CheckpointError(
                f"the trainer's checkpoint is corrupted: the random states {sorted(saved)} are not valid: {error}"
            ) from error
    else:
        # Hashes of integers are the same in every process, unlike those of strings.
        random_states.restart(hash((seed, ranks.stream, num_steps)) % 2**63)


def format_first_cause(error: BaseException) -> str:
    """Return the message of an error; for a DCP error, only the cause on the first failed rank, without tracebacks."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"{type(cause).__name__} on rank {rank}{': ' if str(cause) else ''}{cause}"
    return str(error) or type(error).__name__


@contextlib.contextmanager
def suppress_dcp_warning() -> Iterator[None]:
    """Suppress DCP's warning about a missing process group, which is expected with one rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _collect_tensors(weights: MasterWeights, optimizer: Optimizer) -> dict[str, Tensor]:
    moments = optimizer.get_moments()
    state: dict[str, Tensor] = {}
    for name in weights.parameters:
        full = weights.get_full(name)
        state[f"weight/{name}"] = full
        for label, moment in moments[name].items():
            state[f"{label}/{name}"] = _wrap_as_dtensor(moment, full)
    return state


def _name_buffers(buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"buffer/{number}": buffer for number, buffer in enumerate(buffers)}


def _wrap_as_dtensor(local: Tensor, full: Tensor) -> Tensor:
    """Wrap this rank's part as a DTensor sharded like `full`; its last dimension may differ from that of `full`."""
    if not isinstance(full, DTensor):
        return local
    shape = full.shape
    if local.shape != full.to_local().shape:  # the scales of blocks
        parts = [full.device_mesh.size(i) for i, p in enumerate(full.placements) if p.is_shard(full.ndim - 1)]
        shape = torch.Size([*full.shape[:-1], local.shape[-1] * math.prod(parts)])
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(full.device_mesh, full.placements, TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)  # `from_local` would move an offloaded tensor to the mesh's device


class _Writer(dcp.FileSystemWriter):
    """A DCP writer that raises the `OSError` of a failed write instead of the `RuntimeError` that DCP raises."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the data; if `torch.save` fails, raise the original `OSError` instead of its `RuntimeError`."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def collect_random_states(ranks: Ranks, random_states: RandomStates) -> dict[str, Tensor]:
    """Return this rank's random states, by their names in a checkpoint."""
    return {f"rng/{ranks.stream}/{name}": state for name, state in random_states.states.items()}
