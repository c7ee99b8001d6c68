"""The trainer's end of a weight sync.

Data flow, per sync:

    trainer process   stage ──► WeightUpdate        send (thread) ──► checksums        release
                        │            │                │    ▲                              ▲
    controller          └────────────┴── deliver ─────┼────┼── receipts ──────────────────┘
    engine processes                    open_update ◄─┴────┘

`stage`, `send` and `release` are blocking calls that may run in a trainer's process; `run_sync` calls them in order
from the controller's process, and `send_weights` runs everything in one process.

Invariants: weights do not change between `stage` and `release`; `release` always follows `stage`, even after an error
or a cancellation; with several ranks, all ranks call `stage` and `send`, because iterating over the source is
collective, but only rank 0 transmits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

from roll.errors import ConfigError, WeightSyncError
from roll.protocols import WeightSource
from roll.types import WeightStore, WeightUpdate
from roll.weights.broadcast_sender import BroadcastSender
from roll.weights.in_process import InProcessSender
from roll.weights.shared_memory import SharedMemorySender
from roll.weights.store.sender import StoreSender

__all__ = ["BUCKET_BYTES", "SendSteps", "Sender", "run_sync", "send_weights"]

BUCKET_BYTES = 256 * 2**20
SEND_TIMEOUT_S = 120.0

T = TypeVar("T")
DeliverFn = Callable[[WeightUpdate], Awaitable[None]]


class TransportSender(Protocol):
    """The sending end of a transport on one rank, reused in every sync."""

    def stage(self, source: WeightSource, policy_version: int) -> WeightUpdate | None:
        """Prepare the weights for sending; return the update for the engines, or `None` on ranks other than 0."""
        ...

    def send(self) -> dict[str, int]:
        """Transmit the staged weights; return checksums by tensor name (empty on ranks other than 0)."""
        ...

    def release(self, failed: bool) -> None:
        """Release the weights. May be called while `send` runs in another thread; `send` then raises an error."""
        ...

    def close(self) -> None:
        """Free all resources."""
        ...


class Sender:
    """Sends the weights of one trainer rank over any transport. Reuse it for all syncs, because it keeps groups and
    memory.

    Args:
        bucket_bytes: The bucket size of `broadcast`; a larger tensor gets a separate bucket.
        host: The address at which engines on other hosts reach this process.
        timeout_s: The maximum wait for the engines, in seconds.
    """

    def __init__(
        self, *, bucket_bytes: int = BUCKET_BYTES, host: str = "127.0.0.1", timeout_s: float = SEND_TIMEOUT_S
    ) -> None:
        self._makers: dict[str, Callable[[], TransportSender]] = {
            "in_process": InProcessSender,
            "shared_memory": SharedMemorySender,
            "store": StoreSender,
            "broadcast": lambda: BroadcastSender(bucket_bytes=bucket_bytes, host=host, timeout_s=timeout_s),
        }
        self._outgoing: dict[str, TransportSender] = {}
        self._current: TransportSender | None = None
        """The transport in use from `stage` to `release`."""
        self._staged: TransportSender | None = None
        """The transport in use from `stage` to `send`."""

    def stage(
        self, source: WeightSource, policy_version: int, transport: str, store: WeightStore | None = None
    ) -> WeightUpdate | None:
        """Prepare the weights for sending; return the update for the engines, or `None` on ranks other than 0.

        Args:
            source: The weights; its tensors must not change until `release`.
            policy_version: The version of the weights.
            transport: `in_process`, `shared_memory`, `broadcast` or `store`.
            store: The file store of the transport `store`.

        Raises:
            ConfigError: the transport is unknown, or `store` is not set for the transport `store`.
            UnsupportedError: the transport is not supported on this system.
        """
        if transport not in self._makers:
            known = ", ".join(sorted(self._makers))
            raise ConfigError(f"unknown weight transport '{transport}'. Known: {known}.")
        if transport not in self._outgoing:
            self._outgoing[transport] = self._makers[transport]()
        self._current = self._staged = outgoing = self._outgoing[transport]
        if isinstance(outgoing, StoreSender):
            outgoing.select_store(store)
        return outgoing.stage(source, policy_version)

    def send(self) -> dict[str, int]:
        """Transmit the staged weights while engines receive them; block until the last byte is sent.

        Returns:
            The checksum of the sent bytes, by tensor name; empty on ranks other than 0.

        Raises:
            WeightSyncError: an engine did not join or failed while receiving, or `release` was called in the meantime.
        """
        staged, self._staged = self._staged, None
        if staged is None:
            raise WeightSyncError("no weights are staged: `stage` was not called, or the weight sync was aborted.")
        return staged.send()

    def release(self, *, failed: bool = False) -> None:
        """Release the weights. If `failed` is true, also abort a `send` that still runs in another thread."""
        if self._current is not None:
            self._current.release(failed)
            self._current = None

    def close(self) -> None:
        """Free all resources. Calling it twice is safe."""
        self.release(failed=True)
        for outgoing in self._outgoing.values():
            outgoing.close()
        self._outgoing.clear()


class SendSteps(Protocol):
    """The three steps of a sync, called by the controller; each runs on all ranks of a trainer at once."""

    async def stage(self, policy_version: int, transport: str, store: WeightStore | None) -> WeightUpdate:
        """Call `Sender.stage` on every rank; return rank 0's update."""
        ...

    async def send(self) -> Mapping[str, int]:
        """Call `Sender.send` on every rank at once; return rank 0's checksums."""
        ...

    async def release(self, failed: bool) -> None:
        """Call `Sender.release` on every rank; may be called while `send` runs."""
        ...


async def run_sync(
    steps: SendSteps, policy_version: int, transport: str, deliver: DeliverFn, store: WeightStore | None = None
) -> Mapping[str, int]:
    """Stage the weights, send them while `deliver` passes the update to the engines, then release them.

    If `deliver` or `send` fails, the other call is aborted. This implements `TrainerGroup.send_weights`.
    """
    failed = True
    sending: asyncio.Task[Mapping[str, int]] | None = None
    delivering: asyncio.Task[None] | None = None
    try:
        update = await steps.stage(policy_version, transport, store)
        sending = asyncio.create_task(_await_result(steps.send()), name="send-weights")
        delivering = asyncio.create_task(_await_result(deliver(update)), name="deliver-weights")
        done, _ = await asyncio.wait({sending, delivering}, return_when=asyncio.FIRST_EXCEPTION)
        # An engine's error is raised first, because it names the tensor.
        for task in (delivering, sending):
            if task in done:
                task.result()
        failed = False
        return sending.result()
    finally:
        # The release must finish even if this task is canceled: otherwise the trainer would stay in `send`.
        await asyncio.shield(_release_and_wait(steps, failed, sending, delivering))


async def _await_result(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _release_and_wait(
    steps: SendSteps, failed: bool, sending: asyncio.Task[Any] | None, delivering: asyncio.Task[None] | None
) -> None:
    """Release the weights, cancel the delivery, and wait for both tasks; the release also ends a running `send`."""
    await steps.release(failed)
    if delivering is not None:
        delivering.cancel()
    await asyncio.gather(*filter(None, (sending, delivering)), return_exceptions=True)


class _LocalSendSteps:
    """The `SendSteps` of a single-rank trainer: they call a `Sender` in this process."""

    def __init__(self, sender: Sender, source: WeightSource, executor: Executor | None) -> None:
        self._sender = sender
        self._source = source
        self._executor = executor

    async def stage(self, policy_version: int, transport: str, store: WeightStore | None) -> WeightUpdate:
        loop = asyncio.get_running_loop()
        update = await loop.run_in_executor(
            self._executor, self._sender.stage, self._source, policy_version, transport, store
        )
        assert update is not None, "rank 0 always returns an update"
        return update

    async def send(self) -> Mapping[str, int]:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._sender.send)

    async def release(self, failed: bool) -> None:
        self._sender.release(failed=failed)


async def send_weights(
    source: WeightSource,
    policy_version: int,
    transport: str,
    deliver: DeliverFn,
    *,
    sender: Sender,
    executor: Executor | None = None,
    store: WeightStore | None = None,
) -> Mapping[str, int]:
    """Send the weights of a single-rank trainer in this process: see `TrainerGroup.send_weights`.

    Args:
        source: See `Sender.stage`.
        policy_version: See `Sender.stage`.
        transport: See `Sender.stage`.
        deliver: A function that passes the update to every engine, and returns when all engines have confirmed it.
        sender: The sender, which the caller keeps between syncs.
        executor: The executor that runs `stage` and `send`, such as the trainer's thread; by default any thread.
        store: See `Sender.stage`.

    Returns:
        The checksum of the sent bytes, by tensor name.
    """
    return await run_sync(_LocalSendSteps(sender, source, executor), policy_version, transport, deliver, store)
