"""The trainer's end of a weight sync.

Data flow, per sync:

    trainer process   stage ──► WeightUpdate        send (thread) ──► checksums        release
                        │            │                │    ▲                              ▲
    controller          └────────────┴── deliver ─────┼────┼── receipts ──────────────────┘
    engine processes                    open_update ◄─┴────┘

`stage`, `send` and `release` are plain blocking calls that may run in a trainer's process; `run_sync` calls them in
order from the controller's process, and `send_weights` does both in one process.

Invariants: weights do not change between `stage` and `release`; `release` always follows `stage`, also after an error
or a cancellation; with several ranks, all stage and send (iterating the source is collective), and rank 0 transmits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

from roll.errors import ConfigError, WeightSyncError
from roll.protocols import WeightSource
from roll.types import WeightUpdate
from roll.weights.broadcast_sender import BroadcastSender
from roll.weights.in_process import InProcessSender
from roll.weights.shared_memory import SharedMemorySender

__all__ = ["BUCKET_BYTES", "SendSteps", "Sender", "run_sync", "send_weights"]

BUCKET_BYTES = 256 * 2**20
SEND_TIMEOUT_S = 120.0

T = TypeVar("T")
Deliver = Callable[[WeightUpdate], Awaitable[None]]


class TransportSender(Protocol):
    """A transport's sending end on one rank, kept between syncs."""

    def stage(self, source: WeightSource, policy_version: int) -> WeightUpdate | None:
        """Prepare an offer of the weights; return `None` on ranks other than 0."""
        ...

    def send(self) -> dict[str, int]:
        """Transmit the staged weights; return checksums by name (empty on ranks other than 0)."""
        ...

    def release(self, failed: bool) -> None:
        """Release the weights. May be called while `send` runs in another thread, which then raises."""
        ...

    def close(self) -> None:
        """Free all resources."""
        ...


class Sender:
    """One trainer rank's end of every transport. Keep it between syncs: groups and memory are reused.

    Args:
        bucket_bytes: The bucket size of `broadcast`; the largest tensor is a lower bound.
        host: This process's address, as reached by engines on other hosts.
        timeout_s: The longest wait for the engines.
    """

    def __init__(
        self, *, bucket_bytes: int = BUCKET_BYTES, host: str = "127.0.0.1", timeout_s: float = SEND_TIMEOUT_S
    ) -> None:
        self._makers: dict[str, Callable[[], TransportSender]] = {
            "in_process": InProcessSender,
            "shared_memory": SharedMemorySender,
            "broadcast": lambda: BroadcastSender(bucket_bytes=bucket_bytes, host=host, timeout_s=timeout_s),
        }
        self._outgoing: dict[str, TransportSender] = {}
        self._current: TransportSender | None = None
        """The transport in use from `stage` to `release`."""
        self._staged: TransportSender | None = None
        """The transport in use from `stage` to `send`."""

    def stage(self, source: WeightSource, policy_version: int, transport: str) -> WeightUpdate | None:
        """Prepare an offer of the weights for an engine's `open_update`; return `None` on ranks other than 0.

        Args:
            source: The weights, whose tensors must not change until `release`.
            policy_version: The version of the weights.
            transport: `in_process`, `shared_memory` or `broadcast`.

        Raises:
            ConfigError: the transport is unknown.
            UnsupportedError: the transport is not supported on this system.
        """
        if transport not in self._makers:
            known = ", ".join(sorted(self._makers))
            raise ConfigError(f"unknown weight transport '{transport}'. Known: {known}.")
        if transport not in self._outgoing:
            self._outgoing[transport] = self._makers[transport]()
        self._current = self._staged = self._outgoing[transport]
        return self._current.stage(source, policy_version)

    def send(self) -> dict[str, int]:
        """Transmit while engines receive; block until the last byte is sent.

        Returns:
            The checksum of the sent bytes, by tensor name; empty on ranks other than 0.

        Raises:
            WeightSyncError: engines did not join or failed midway (names them), or the sync was released before its
                end.
        """
        staged, self._staged = self._staged, None
        if staged is None:
            raise WeightSyncError("there is nothing to send: the weight sync was not staged, or was already aborted.")
        return staged.send()

    def release(self, *, failed: bool = False) -> None:
        """Release the weights. `failed` aborts a `send` that still runs in another thread."""
        if self._current is not None:
            self._current.release(failed)
            self._current = None

    def close(self) -> None:
        """Free all resources; may be called twice."""
        self.release(failed=True)
        for outgoing in self._outgoing.values():
            outgoing.close()
        self._outgoing.clear()


class SendSteps(Protocol):
    """The three calls of a sync as the controller makes them, on one rank or on all ranks of a trainer at once."""

    async def stage(self, policy_version: int, transport: str) -> WeightUpdate:
        """Call `Sender.stage` on every rank; return rank 0's offer."""
        ...

    async def send(self) -> Mapping[str, int]:
        """Call `Sender.send` on every rank at once; return rank 0's checksums."""
        ...

    async def release(self, failed: bool) -> None:
        """Call `Sender.release` on every rank; must also work while `send` runs."""
        ...


async def run_sync(steps: SendSteps, policy_version: int, transport: str, deliver: Deliver) -> Mapping[str, int]:
    """Stage, deliver the offer while sending, then release: the implementation of `TrainerGroup.send_weights`.

    If `deliver` or `send` fails, the other one is aborted; the first error is raised.
    """
    failed = True
    sending: asyncio.Task[Mapping[str, int]] | None = None
    delivering: asyncio.Task[None] | None = None
    try:
        update = await steps.stage(policy_version, transport)
        sending = asyncio.create_task(_as_coroutine(steps.send()), name="send-weights")
        delivering = asyncio.create_task(_as_coroutine(deliver(update)), name="deliver-weights")
        done, _ = await asyncio.wait({sending, delivering}, return_when=asyncio.FIRST_EXCEPTION)
        for task in (delivering, sending):
            if task in done:
                task.result()
        failed = False
        return sending.result()
    finally:
        await asyncio.shield(_end(steps, failed, sending, delivering))


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _end(
    steps: SendSteps, failed: bool, sending: asyncio.Task[Any] | None, delivering: asyncio.Task[None] | None
) -> None:
    """Release, then wait for both tasks; a `send` in a thread ends on its own when its weights are released."""
    await steps.release(failed)
    if delivering is not None:
        delivering.cancel()
    await asyncio.gather(*filter(None, (sending, delivering)), return_exceptions=True)


class _OneRank:
    """`SendSteps` over a sender of this process."""

    def __init__(self, sender: Sender, source: WeightSource, executor: Executor | None) -> None:
        self._sender = sender
        self._source = source
        self._executor = executor

    async def stage(self, policy_version: int, transport: str) -> WeightUpdate:
        loop = asyncio.get_running_loop()
        update = await loop.run_in_executor(self._executor, self._sender.stage, self._source, policy_version, transport)
        assert update is not None, "a single rank is rank 0"
        return update

    async def send(self) -> Mapping[str, int]:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._sender.send)

    async def release(self, failed: bool) -> None:
        self._sender.release(failed=failed)


async def send_weights(
    source: WeightSource,
    policy_version: int,
    transport: str,
    deliver: Deliver,
    *,
    sender: Sender,
    executor: Executor | None = None,
) -> Mapping[str, int]:
    """Run `TrainerGroup.send_weights` for a trainer of one rank in this process.

    Args:
        source: See `Sender.stage`.
        policy_version: See `Sender.stage`.
        transport: See `Sender.stage`.
        deliver: A function that brings the offer to every engine and returns when all have confirmed.
        sender: The sender, kept by the caller between syncs.
        executor: The executor of `stage` and `send`, which run one after the other (the trainer's own thread); by
            default any thread.

    Returns:
        The checksum of the sent bytes, by tensor name.
    """
    return await run_sync(_OneRank(sender, source, executor), policy_version, transport, deliver)
