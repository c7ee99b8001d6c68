"""The engine's end of a weight sync.

Data flow:  WeightUpdate ─ open_update ─► transport's stream ─► name, shape, dtype checked ─► hashed ─► engine

    with open_update(update) as receiver:
        for name, tensor in receiver:
            parameters[name].copy_(tensor)
    receipt = WeightReceipt(..., checksums=receiver.checksums)

Invariants: tensors arrive in manifest order, each exactly once; a tensor is hashed before the engine gets it; if the
context ends without an error, every tensor was consumed. A yielded tensor is in the transport's buffer or belongs to
the trainer: copy it immediately, and do not change it. The calls block, so an asyncio engine makes them in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch

from roll.errors import WeightSyncError
from roll.registry import Registry
from roll.types import WeightUpdate
from roll.weights.checksum import compute_checksum
from roll.weights.plan import compute_num_bytes, describe_tensor

__all__ = ["RECEIVE_TIMEOUT_S", "TRANSPORTS", "Receiver", "ReceiverLocation", "TensorStream", "open_update"]

RECEIVE_TIMEOUT_S = 120.0

TensorStream: TypeAlias = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiverLocation:
    """The process and the device that receive tensors."""

    device: torch.device
    """The device of the transport's buffers; transports without buffers leave tensors where they are."""
    worker: int = 0
    """The index of this process among the engine's workers (tensor parallelism)."""
    num_workers: int = 1
    timeout_s: float = RECEIVE_TIMEOUT_S


TransportOpener: TypeAlias = Callable[[WeightUpdate, ReceiverLocation], AbstractContextManager[TensorStream]]
TRANSPORTS: Registry[TransportOpener] = Registry(
    "weight transport",
    {
        "in_process": "roll.weights.in_process:receive",
        "shared_memory": "roll.weights.shared_memory:receive",
        "broadcast": "roll.weights.broadcast:receive",
        "store": "roll.weights.store.receiver:receive",
    },
)


class Receiver:
    """Yields `(name, tensor)` in manifest order, and checks and hashes each tensor; it can be iterated only once."""

    def __init__(self, update: WeightUpdate, stream: TensorStream) -> None:
        self.policy_version = update.policy_version
        self.checksums: dict[str, int] = {}
        """The checksums of the received bytes, by tensor name; complete after the last tensor."""
        self.num_bytes = 0
        self._manifest = update.manifest
        self._stream = self._check_tensors(stream)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._stream

    @property
    def unread_names(self) -> tuple[str, ...]:
        """The names in the manifest that have not been yielded yet."""
        return tuple(spec.name for spec in self._manifest[len(self.checksums) :])

    def _check_tensors(self, stream: TensorStream) -> TensorStream:
        for expected in self._manifest:
            name, tensor = next(stream, (None, None))
            if name is None or tensor is None:
                raise WeightSyncError(f"{self._format_location(expected.name)} is missing: the stream ended before it.")
            if name != expected.name:
                if name in self.unread_names:
                    raise WeightSyncError(
                        f"{self._format_location(expected.name)} is missing: received '{name}' instead."
                    )
                again = "it was received twice" if name in self.checksums else "it is not in the manifest"
                raise WeightSyncError(f"{self._format_location(name)} is unexpected: {again}.")
            received = describe_tensor(name, tensor)
            for aspect in ("shape", "dtype"):
                seen, announced = getattr(received, aspect), getattr(expected, aspect)
                if seen != announced:
                    raise WeightSyncError(f"{self._format_location(name)} has {aspect} {seen}, expected {announced}.")
            self.checksums[name] = compute_checksum(tensor)
            self.num_bytes += compute_num_bytes(expected)
            yield name, tensor
        surplus = next(stream, None)
        if surplus is not None:
            raise WeightSyncError(
                f"{self._format_location(surplus[0])} is unexpected: the last tensor of the manifest was received "
                "before it."
            )

    def _format_location(self, name: str) -> str:
        return f"weight sync of policy version {self.policy_version}: tensor '{name}'"


@contextmanager
def open_update(
    update: WeightUpdate,
    *,
    device: torch.device | str = "cpu",
    worker: int = 0,
    num_workers: int = 1,
    timeout_s: float = RECEIVE_TIMEOUT_S,
) -> Generator[Receiver]:
    """Open a `Receiver`, yield it, and check at the end that the caller has read all weights of the update.

    Args:
        update: The update that the engine received. Updates are plain data and may be passed on to another process.
        device: The device of the tensors that `broadcast` receives.
        worker: The index of this process among the engine's receiving processes (tensor parallelism).
        num_workers: The number of the engine's receiving processes.
        timeout_s: The maximum wait for the sender or for other receivers, in seconds.

    Raises:
        WeightSyncError: a tensor is missing or unexpected, or has the wrong shape or dtype; the sender has ended, has
            aborted the sync, or cannot be reached; or the engine did not read all tensors.
    """
    place = ReceiverLocation(device=torch.device(device), worker=worker, num_workers=num_workers, timeout_s=timeout_s)
    with TRANSPORTS.get(update.transport)(update, place) as stream:
        receiver = Receiver(update, stream)
        yield receiver
        if receiver.unread_names:
            names = ", ".join(f"'{name}'" for name in receiver.unread_names[:5])
            raise WeightSyncError(
                f"weight sync of policy version {update.policy_version}: the engine did not read "
                f"{len(receiver.unread_names)} of {len(update.manifest)} tensors: {names}."
            )
