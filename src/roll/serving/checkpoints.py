"""Checkpoints on disk: `tinker://<model>/weights/<name>` to train on, `…/sampler_weights/<name>` to sample from.

    <directory>/<model>/<kind>/<name>/
        adapter_model.safetensors, adapter_config.json   an adapter that peft and vLLM load
        optimizer.safetensors                            AdamW's moments; only in `weights`
        checkpoint.json                                  owner, base model, seed, counts

A checkpoint is written to a temporary directory and then renamed, so it is complete or absent. It never changes; only
`save_weights` with `overwrite` replaces it.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from roll.config.model import LoRAConfig
from roll.errors import one_line_error
from roll.serving.failures import RequestFailure
from roll.tracking import atomic
from roll.training.adapter_snapshot import AdapterSnapshot, AdapterSpec
from roll.training.checkpoint.export import move_to_final_name, write_adapter

__all__ = ["STATE", "UNNAMED", "Checkpoint", "Checkpoints", "Kind", "build_path"]

Kind: TypeAlias = Literal["weights", "sampler_weights"]

_PATH = re.compile(r"tinker://([A-Za-z0-9-]+:train:\d+)/(weights|sampler_weights)/([A-Za-z0-9_][A-Za-z0-9._-]{0,127})")
_PREFIX = "base_model.model."
"""Prefix of the names in peft's files."""
_FILE = "checkpoint.json"
UNNAMED = ".snapshot-"
"""Prefix of the names of snapshots that clients reach only through a sampling session."""
STATE = ".state"
"""Name of the state of a model; see `roll.serving.states`."""


def build_path(model_id: str, kind: Kind, name: str) -> str:
    """Return the path by which clients name a checkpoint."""
    return f"tinker://{model_id}/{kind}/{name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint's description."""

    path: str
    owner: str
    base_model: str
    kind: Kind
    spec: AdapterSpec
    train_unembed: bool
    num_steps: int
    expires_at: float | None = None
    """Unix time in seconds."""
    user_metadata: Mapping[str, Any] | None = None
    request_id: str = ""
    """The ID of the request that saved the checkpoint."""
    seq_id: int = 0
    """For the state of a model: the sequence ID of the last request that the state includes."""


class Checkpoints:
    """Saves, finds and loads checkpoints. Its methods block; call them in a thread.

    Args:
        directory: The directory of all checkpoints.
        base_model: The name of the base model.
        model_path: The base model, for the files of adapters.
    """

    def __init__(self, directory: Path, base_model: str, model_path: str) -> None:
        self._directory = directory
        self._base_model = base_model
        self._model_path = model_path
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)

    def save(
        self,
        snapshot: AdapterSnapshot,
        *,
        model_id: str,
        kind: Kind,
        name: str,
        owner: str,
        train_unembed: bool,
        overwrite: bool = False,
        ttl_s: int | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        request_id: str = "",
        seq_id: int = 0,
    ) -> Checkpoint:
        """Write a checkpoint, unless the request `request_id` has already written it.

        Raises:
            RequestFailure: A checkpoint of this name exists, or the checkpoint cannot be written.
        """
        checkpoint = Checkpoint(
            path=build_path(model_id, kind, name),
            owner=owner,
            base_model=self._base_model,
            kind=kind,
            spec=snapshot.spec,
            train_unembed=train_unembed,
            num_steps=snapshot.num_steps,
            expires_at=None if ttl_s is None else time.time() + ttl_s,
            user_metadata=user_metadata,
            request_id=request_id,
            seq_id=seq_id,
        )
        target = self._directory / model_id / kind / name
        with self._lock:
            if request_id and (found := self.describe(checkpoint.path)) and found.request_id == request_id:
                return found
            if target.exists() and not overwrite:
                option = ", or save with overwrite" if kind == "weights" else ""
                raise RequestFailure(f"path: '{checkpoint.path}' exists already: choose another name{option}.")
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                self._write(target, snapshot, checkpoint)
            except OSError as error:
                raise RequestFailure(
                    f"the checkpoint could not be written: {one_line_error(error)}", "server"
                ) from error
        return checkpoint

    def find(self, path: str, owner: str, kinds: tuple[Kind, ...]) -> Checkpoint:
        """Return the description of a checkpoint.

        Raises:
            RequestFailure: There is no such checkpoint, it belongs to another owner, has expired, or is of another
                kind or base model.
        """
        missing = RequestFailure(f"path: there is no checkpoint '{path[:200]}' of this key's models.")
        if _PATH.fullmatch(path) is None:
            raise RequestFailure(
                f"path: '{path[:200]}' is not a path like tinker://<model_id>/{kinds[0]}/<name>, as returned "
                "when the checkpoint was saved."
            )
        found = self.describe(path)
        if found is None or found.owner != owner:
            raise missing
        if found.expires_at is not None and found.expires_at < time.time():
            raise RequestFailure(f"path: the checkpoint '{path}' has expired.")
        if found.kind not in kinds:
            raise RequestFailure(f"path: '{path}' is of kind {found.kind}, but {' or '.join(kinds)} is needed here.")
        if found.base_model != self._base_model:
            raise RequestFailure(
                f"path: '{path}' belongs to the base model '{found.base_model}', but this server has "
                f"'{self._base_model}'."
            )
        return found

    def find_any(self, path: str, request_id: str) -> Checkpoint:
        """Return the description of a checkpoint that a request has saved, whose owner was checked before.

        Raises:
            RequestFailure: The checkpoint was deleted in the meantime, or is corrupted.
        """
        found = self.describe(path)
        if found is None or found.request_id != request_id:
            raise RequestFailure(f"the checkpoint '{path}' was deleted.")
        return found

    def find_and_load(
        self, path: str, owner: str, kinds: tuple[Kind, ...], *, optimizer: bool
    ) -> tuple[Checkpoint, AdapterSnapshot]:
        """Find a checkpoint and read it, while no other request can overwrite or delete it; see `find` and `load`."""
        with self._lock:
            found = self.find(path, owner, kinds)
            return found, self.load(found, optimizer=optimizer)

    def load(self, checkpoint: Checkpoint, *, optimizer: bool) -> AdapterSnapshot:
        """Read a checkpoint.

        Args:
            checkpoint: The result of `find`.
            optimizer: Whether to read the optimizer's state too.

        Raises:
            RequestFailure: A file is missing or corrupted.
        """
        directory = self._directory / checkpoint.path.removeprefix("tinker://")
        try:
            stored = load_file(directory / "adapter_model.safetensors")
            weights = {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()}
            if not optimizer:
                return AdapterSnapshot(spec=checkpoint.spec, weights=weights)
            moments: dict[str, dict[str, Tensor]] = {}
            steps: dict[str, int] = {}
            for name, tensor in load_file(directory / "optimizer.safetensors").items():
                label, _, weight = name.partition("/")
                if label == "step":
                    steps[weight] = int(tensor)
                else:
                    moments.setdefault(weight, {})[label] = tensor
        except (OSError, SafetensorError, ValueError) as error:
            raise RequestFailure(
                f"the checkpoint '{checkpoint.path}' is corrupted: {one_line_error(error)}", "server"
            ) from error
        return AdapterSnapshot(
            spec=checkpoint.spec, weights=weights, moments=moments, steps=steps, num_steps=checkpoint.num_steps
        )

    def delete(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint, if it exists."""
        with self._lock:
            shutil.rmtree(self._directory / checkpoint.path.removeprefix("tinker://"), ignore_errors=True)

    def delete_hidden(self, needed: Collection[str], kept_models: Callable[[str], bool]) -> None:
        """Delete the snapshots without a name and the states of models, and the leftovers of interrupted writes.

        No other process may use the directory.

        Args:
            needed: The paths of those that are kept.
            kept_models: A function that returns whether all of a model is kept.
        """
        for directory in self._directory.glob("*:train:*/*/.*"):
            path = directory.relative_to(self._directory)
            if f"tinker://{path}" not in needed and not kept_models(path.parts[0]):
                shutil.rmtree(directory, ignore_errors=True)

    def delete_expired(self) -> None:
        """Delete all expired checkpoints, and the leftovers of interrupted writes."""
        for file in self._directory.glob(f"*/*/*/{_FILE}"):
            with self._lock:  # a request may overwrite it
                try:
                    expires_at = json.loads(file.read_text(encoding="utf-8"))["expires_at"]
                    has_expired = expires_at is not None and expires_at < time.time()
                except (OSError, ValueError, TypeError, KeyError):
                    continue
                if has_expired:
                    shutil.rmtree(file.parent, ignore_errors=True)
        for directory in self._directory.glob("*/*"):
            atomic.remove_leftovers(directory, min_age_s=3600.0)

    def describe(self, path: str) -> Checkpoint | None:
        """Return the description of a checkpoint of any owner, or `None` if the checkpoint does not exist.

        Raises:
            RequestFailure: The description is corrupted.
        """
        file = self._directory / path.removeprefix("tinker://") / _FILE
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            content["spec"] = AdapterSpec(**content["spec"])
            return Checkpoint(**content)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RequestFailure(f"the checkpoint '{path}' is corrupted: {one_line_error(error)}", "server") from error

    def _write(self, target: Path, snapshot: AdapterSnapshot, checkpoint: Checkpoint) -> None:
        """Write all files into a hidden directory, then rename it."""
        partial = atomic.make_temporary_path(target)
        spec = snapshot.spec
        layers = sorted({name.rpartition(".lora_")[0] for name in snapshot.weights})
        try:
            write_adapter(
                partial,
                {f"{_PREFIX}{name}": tensor for name, tensor in snapshot.weights.items()},
                LoRAConfig(rank=spec.rank, alpha=spec.alpha),
                self._model_path,
                layers,
            )
            if checkpoint.kind == "weights":
                tensors = {
                    f"{label}/{name}": moment
                    for name, moments in snapshot.moments.items()
                    for label, moment in moments.items()
                }
                tensors |= {f"step/{name}": torch.tensor(count) for name, count in snapshot.steps.items()}
                # Not `save_file`: its error of a full disk is no OSError.
                (partial / "optimizer.safetensors").write_bytes(save(tensors))
            fields = {name: getattr(checkpoint, name) for name in Checkpoint.__dataclass_fields__}
            fields["spec"] = {name: getattr(spec, name) for name in AdapterSpec.__dataclass_fields__}
            (partial / _FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
            move_to_final_name(partial, target)
            for directory in target.parents[1:3]:  # the names of new directories
                atomic.fsync(directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
