"""The cache of snapshots in an engine. A snapshot is read from disk when a request first samples from it.

The engine has a fixed number of adapter slots. A snapshot replaces the least recently used one that no request uses, so
a request samples from the same snapshot to its end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from roll.config.model import LoRAConfig
from roll.serving.engine_calls import EngineCalls
from roll.serving.failures import RequestFailure
from roll.training.adapter_snapshot import AdapterSnapshot
from roll.types import WeightUpdate
from roll.weights import Sender, send_weights
from roll.weights.adapters import name_adapter_tensor

__all__ = ["EngineLayers", "SnapshotCache", "SnapshotId"]


class SnapshotId(NamedTuple):
    """The ID of a snapshot, which never changes."""

    path: str
    saved_by: str
    """The ID of the request that saved the snapshot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLayers:
    """The layers, ranks and shapes of the adapters that the engine accepts.

    An adapter of a lower rank is sent with rows and columns of 0, and a layer without an adapter with zeros.
    """

    shapes: Mapping[str, tuple[int, int]]
    """The shape [outputs, inputs] of each layer with an adapter."""
    lora: LoRAConfig
    dtype: torch.dtype

    def build_tensors(self, snapshot: AdapterSnapshot | None) -> dict[str, Tensor]:
        """Return the tensors that the engine receives for a snapshot; without a snapshot, all are 0.

        Raises:
            RequestFailure: The snapshot has another rank, other tensors or other shapes than the engine expects.
        """
        if snapshot is not None:
            self._check(snapshot)
        tensors: dict[str, Tensor] = {}
        for layer, (outputs, inputs) in self.shapes.items():
            rank = self.lora.get_rank(layer)
            names = [name_adapter_tensor(layer, part) for part in ("lora_A.weight", "lora_B.weight")]
            a, b = torch.zeros(rank, inputs, dtype=self.dtype), torch.zeros(outputs, rank, dtype=self.dtype)
            if snapshot is not None and names[0] in snapshot.weights:
                own = snapshot.spec.rank
                a[:own] = snapshot.weights[names[0]].to(self.dtype)
                # Rounded first, as in the trainer's network. The engine multiplies with the scale of its configuration.
                ratio = snapshot.spec.scale / self.lora.compute_scale(layer)
                b[:, :own] = (snapshot.weights[names[1]].to(self.dtype).float() * ratio).to(self.dtype)
            tensors |= {names[0]: a, names[1]: b}
        return tensors

    def _check(self, snapshot: AdapterSnapshot) -> None:
        rank, expected = snapshot.spec.rank, {}
        for layer, (outputs, inputs) in self.shapes.items():
            if snapshot.spec.covers(layer):
                if not 1 <= rank <= self.lora.get_rank(layer):
                    highest = self.lora.get_rank(layer)
                    raise _fail(f"its rank is {rank}, but ranks between 1 and {highest} are expected")
                expected[name_adapter_tensor(layer, "lora_A.weight")] = rank, inputs
                expected[name_adapter_tensor(layer, "lora_B.weight")] = outputs, rank
        for name in sorted(set(expected) ^ set(snapshot.weights)):
            names = f"{len(expected)} tensors such as '{next(iter(expected), '')}' are expected"
            raise _fail(f"it {'lacks the' if name in expected else 'has an unknown'} tensor '{name}', and {names}")
        for name, shape in expected.items():
            if (given := tuple(snapshot.weights[name].shape)) != shape:
                raise _fail(f"the tensor '{name}' has the shape {given}, but {shape} is expected")


def _fail(problem: str) -> RequestFailure:
    return RequestFailure(f"the files of the snapshot do not fit the model: {problem}.", "server")


@dataclass(slots=True)
class _Slot:
    """An adapter of the engine."""

    name: str
    snapshot: SnapshotId | None = None
    """The snapshot that is in the slot, or is being loaded."""
    loading: asyncio.Task[None] | None = None
    num_users: int = 0
    last_use: int = 0


class SnapshotCache:
    """Loads snapshots into an engine, and keeps the most recently used ones.

    Args:
        engine: The calls to the engine, whose spec has `lora` and `max_adapters`.
        transport: The transport of weights to the engine.
        layers: The layers of the engine that have adapters.
        num_slots: The number of adapter slots of the engine.
        read: A blocking function that reads a snapshot.
    """

    def __init__(
        self,
        engine: EngineCalls,
        transport: str,
        layers: EngineLayers,
        num_slots: int,
        read: Callable[[SnapshotId], AdapterSnapshot],
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._layers = layers
        self._read = read
        self._slots = [_Slot(f"slot-{index}") for index in range(num_slots)]
        self._released = asyncio.Condition()
        self._sending = asyncio.Lock()
        self._sender = Sender()
        self._versions = itertools.count(1)

    def __contains__(self, snapshot: object) -> bool:
        """Return whether a snapshot is in the engine, or is being loaded."""
        return any(slot.snapshot == snapshot for slot in self._slots)

    async def start(self) -> None:
        """Send an adapter of zeros: until the first adapter arrives, engines reject all requests."""
        await self._send(self._slots[0].name, None)

    @asynccontextmanager
    async def use(self, snapshot: SnapshotId | None) -> AsyncIterator[str | None]:
        """Load a snapshot if the engine does not have it, and keep it during the `with` block.

        Args:
            snapshot: The snapshot; `None` for the base model.

        Yields:
            The name of the adapter in the engine.
        """
        if snapshot is None:
            yield None
            return
        slot = await self._acquire(snapshot)
        try:
            assert slot.loading is not None
            try:
                await asyncio.shield(slot.loading)  # several requests wait for it
            except BaseException:
                if slot.snapshot == snapshot and slot.loading.done():
                    slot.snapshot = None  # the next request tries again
                raise
            yield slot.name
        finally:
            slot.num_users -= 1
            async with self._released:
                self._released.notify_all()

    async def close(self) -> None:
        """Stop loading, and free the memory of the transport."""
        tasks = [slot.loading for slot in self._slots if slot.loading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sender.close()

    async def abandon(self) -> None:
        """Wait for the loads, which fail because the engine was closed, and free the memory of the transport."""
        tasks = [slot.loading for slot in self._slots if slot.loading is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sender.close()

    async def _acquire(self, snapshot: SnapshotId) -> _Slot:
        """Return the slot of a snapshot; if necessary, wait for a slot that no request uses, and load the snapshot."""
        async with self._released:
            while True:
                slot = next((each for each in self._slots if each.snapshot == snapshot), None)
                if slot is None:
                    free = [each for each in self._slots if each.num_users == 0]
                    slot = min(free, key=lambda each: (each.snapshot is not None, each.last_use), default=None)
                    if slot is not None:
                        slot.snapshot = snapshot
                        slot.loading = asyncio.create_task(self._load(slot.name, snapshot, slot.loading))
                if slot is not None:
                    slot.num_users += 1
                    slot.last_use = max(each.last_use for each in self._slots) + 1
                    return slot
                await self._released.wait()

    async def _load(self, name: str, snapshot: SnapshotId, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:  # a canceled request may have left a load behind
            await asyncio.gather(earlier, return_exceptions=True)
        await self._send(name, await asyncio.to_thread(self._read, snapshot))

    async def _send(self, name: str, snapshot: AdapterSnapshot | None) -> None:
        tensors = await asyncio.to_thread(self._layers.build_tensors, snapshot)

        async def deliver(update: WeightUpdate) -> None:
            await self._engine.update_weights(dataclasses.replace(update, adapter=name))

        async with self._sending:
            version = next(self._versions)
            await send_weights(_Tensors(tensors), version, self._transport, deliver, sender=self._sender)


class _Tensors:
    """A `WeightSource` of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())

    def names(self) -> Sequence[str]:
        """Return the names of all tensors."""
        return list(self._tensors)
