"""Keep weights of earlier policy versions in host memory, so that a policy's trainer can use them again.

    keep(v)     trained weights of this rank ─ copy ─► host memory
    activate(v) current weights ─► host memory;  version v ─► network  ─ forward passes ─►  current weights back

A copy has the compute dtype, so a pass through version v is bitwise identical to one when v was current. Current
weights are restored bitwise. With LoRA a copy contains only the adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["Snapshots"]


class Snapshots:
    """Copies of one rank's trained weights, by policy version.

    Args:
        tensors: The network's tensors that training changes: parameters in any dtype, including DTensor shards.
        dtype: The compute dtype of the network.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._tensors = dict(tensors)
        self._dtype = dtype
        self._kept: dict[int, dict[str, Tensor]] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy versions that have a snapshot, in ascending order."""
        return tuple(sorted(self._kept))

    @torch.no_grad()
    def store(self, version: int, kept_versions: Collection[int]) -> None:
        """Save the current weights as the snapshot of `version`, and delete snapshots not in `kept_versions`."""
        self._kept = {known: copy for known, copy in self._kept.items() if known in kept_versions and known != version}
        if version in kept_versions:
            self._kept[version] = {
                name: _get_local(tensor).to("cpu", self._get_copy_dtype(tensor), copy=True)
                for name, tensor in self._tensors.items()
            }

    @contextlib.contextmanager
    def activate(self, version: int) -> Iterator[None]:
        """Use the weights of `version` within a `with` block.

        Raises:
            ValueError: This version has no snapshot.
        """
        if version not in self._kept:
            raise ValueError(f"policy version {version} has no snapshot; available versions: {list(self.versions)}")
        # On the host and in full precision: master weights in the network must not be rounded.
        current = {name: _get_local(tensor).to("cpu", copy=True) for name, tensor in self._tensors.items()}
        try:
            self._write(self._kept[version])
            yield
        finally:
            self._write(current)

    @torch.no_grad()
    def _write(self, source: Mapping[str, Tensor]) -> None:
        for name, tensor in self._tensors.items():
            _get_local(tensor).copy_(source[name])

    def _get_copy_dtype(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which a snapshot stores a tensor: the compute dtype for an FSDP shard, although the shard
        is float32.
        """
        return self._dtype if isinstance(tensor, DTensor) else tensor.dtype


def _get_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; it shares memory with the tensor."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
