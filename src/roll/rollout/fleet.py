"""EngineFleet: fault tolerance of inference engines; it replaces engines that died or hang.

    serving ──died, hangs, or found dead by a caller──► lost ──► replaced ──► weights are synced ──► serving
                                                       ▲            │ failed, or died again: retried after a backoff
                                                       └────────────┴── six consecutive times ──► given up

Invariants:
    - an engine that does not serve is either being started by exactly one task of the fleet, or was given up;
    - the other engines take over the work of an engine that was given up; if no engine is left, every waiting request
      raises `error`;
    - an error that a retry cannot fix (any error except an `InfraError`) is stored as `error` immediately;
    - only `starts` starts engines; it does not start detached engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Literal, TypeAlias

from roll.errors import ConfigError, EngineDiedError, InfraError, NoEngineError, one_line_error
from roll.protocols import InferenceEngine
from roll.rollout.engine_connection import EngineConnection
from roll.rollout.engine_group import EngineGroup
from roll.rollout.engine_starts import EngineStarts
from roll.rollout.routing import Router

__all__ = ["EngineChange", "EngineFleet"]

logger = logging.getLogger(__name__)

EngineChange: TypeAlias = Literal["died", "hung", "replaced", "given up", "joined", "left"]

MAX_FAILURES = 6
"""Number of consecutive failures after which an engine is given up; an answer of the engine resets the count."""
STOP_TIMEOUT_S = 60.0
"""Maximum time to close a lost engine whose devices are needed, in seconds."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
"""First and maximum backoff before a restart, in seconds; used from the second failure on, and doubled after each."""


class EngineFleet:
    """Tracks the engines of a run, and replaces engines that are lost.

    Args:
        engines: The engines of the run.
        prepare: Syncs the current weights to a fresh engine before it serves.
        router: Router to which serving engines are added.
        on_change: Called whenever an engine changes.
    """

    def __init__(
        self,
        engines: EngineGroup,
        prepare: Callable[[InferenceEngine], Awaitable[object]],
        router: Router,
        on_change: Callable[[EngineChange], None],
    ) -> None:
        self.error: Exception | None = None
        """Error because of which no engine is available; `None` while an engine is available or being started."""
        self._engines = engines
        self._router = router
        self._on_change = on_change
        self._connections: dict[str, EngineConnection] = {}
        self._failures: Counter[str] = Counter()
        """Number of consecutive failures, by engine."""
        self._given_up: dict[str, Exception] = {}
        self._bring_ups: dict[str, asyncio.Task[None]] = {}
        self._detached_ids: set[str] = set()
        self._abandoned_ids: set[str] = set()
        """Engines that are about to be removed, and are not replaced if they are lost."""
        self._preemptible_ids: set[str] = set()
        self.withheld_ids: frozenset[str] = frozenset()
        """Engines that return only after the next batch, so requests must not wait for them."""
        self.asleep_ids: set[str] = set()
        """Engines that were put to sleep individually, so requests must not wait for them either."""
        self.inactive: set[str] = set()
        """Engines that were put to sleep or suspended individually; pausing or resuming all engines skips them."""
        self.starts = EngineStarts(engines, prepare, self._detached_ids)
        """Starts engines."""
        self._closed = False
        for engine in engines.engines:
            self._serve(engine)

    @property
    def engines(self) -> Sequence[InferenceEngine]:
        """All engines of the run, in the order in which they were added."""
        return self._engines.engines

    @property
    def serving_connections(self) -> list[EngineConnection]:
        """Connections to the engines that may get requests, in the order in which they were added."""
        return [self._connections[engine.engine_id] for engine in self._router.serving_engines]

    def get_connection(self, engine_id: str) -> EngineConnection:
        """Return the connection to an engine; during a replacement, return the connection to the lost engine.

        Raises:
            ConfigError: The group has no engine with this id.
        """
        if engine_id not in self._connections:
            raise ConfigError(
                f"engine '{engine_id}' does not exist; available engines: {', '.join(self._connections) or 'none'}."
            )
        return self._connections[engine_id]

    def replace(self, engine: InferenceEngine, cause: str) -> None:
        """Replace a dead engine; an engine that was given up is started once more."""
        engine_id = engine.engine_id
        connection = self._connections.get(engine_id)
        if connection is None:  # it has not served yet, or has been retired
            return
        if connection.engine is engine and connection.lost is None:
            connection.mark_lost(EngineDiedError(engine_id, cause))
        elif engine_id in self._given_up and not self._closed:
            del self._given_up[engine_id]
            self._failures[engine_id] = MAX_FAILURES - 1
            self.error = None
            self._start(engine_id)

    async def wait_for_orphaned_requests(self) -> None:
        """Wait until the engines have released all requests whose callers have been canceled."""
        await asyncio.gather(
            *(connection.wait_for_orphaned_requests() for connection in list(self._connections.values()))
        )

    async def wait_for_replacements(self) -> None:
        """Wait until every engine serves or was given up."""
        while self._bring_ups:
            await asyncio.wait(self._bring_ups.values())

    # ---- engines that join and leave (`transitions`)

    async def start(self, engine_id: str, *, is_preemptible: bool = False) -> None:
        """Start a new member of the group, and route requests to it, without retries.

        Args:
            engine_id: Id of the member.
            is_preemptible: See `EngineConnection.is_preemptible`.

        Raises:
            Exception: The start failed.
        """

        def serve(engine: InferenceEngine) -> None:
            if is_preemptible:
                self._preemptible_ids.add(engine_id)
            self._serve(engine)

        await self.starts.start(engine_id, serve)
        if isinstance(self.error, NoEngineError):
            self.error = None
        self._on_change("joined")

    async def detach(self, engine_id: str) -> None:
        """Stop routing requests to an engine, and do not replace it any more; end or postpone a start in progress."""
        self._router.disable(self.get_connection(engine_id).engine.engine_id)
        self._detached_ids.add(engine_id)
        await self.starts.wait_for_start(engine_id)

    async def stop_if_lost(self, engine_id: str) -> None:
        """Close a lost engine whose devices are needed; an engine that hangs still occupies them."""
        if self.get_connection(engine_id).lost is None:
            return
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._engines.stop(engine_id)
        except (InfraError, TimeoutError) as error:
            logger.warning("engine %s may still occupy its devices: %s", engine_id, one_line_error(error))

    def mark_lost(self, engine_id: str, cause: str) -> None:
        """Mark an engine as lost before it is removed: other engines restart its requests. Unknown IDs are ignored."""
        connection = self._connections.get(engine_id)
        if connection is not None:
            self._detached_ids.add(engine_id)
            self._abandoned_ids.add(engine_id)
            connection.mark_lost(EngineDiedError(engine_id, cause))

    async def abandon(self, engine_id: str) -> None:
        """Stop routing requests to an engine that will be removed, and cancel its replacement in progress."""
        self._router.disable(self.get_connection(engine_id).engine.engine_id)
        self._detached_ids.add(engine_id)
        self._abandoned_ids.add(engine_id)
        await self._cancel_bring_up(engine_id)

    def reattach(self, engine_id: str) -> None:
        """Undo `detach`: the engine serves again, or is replaced if it is lost."""
        self._detached_ids.discard(engine_id)
        if isinstance(self.error, NoEngineError):
            self.error = None
        self.starts.check_detached()
        if self._connections[engine_id].lost is None:
            self._router.add(self._connections[engine_id].engine)
            self._on_change("joined")

    async def remove(self, engine_id: str) -> None:
        """Remove a detached engine permanently."""
        await self._cancel_bring_up(engine_id)
        self._connections.pop(engine_id).close()
        del self._failures[engine_id]
        self._given_up.pop(engine_id, None)
        self._detached_ids.discard(engine_id)
        self._abandoned_ids.discard(engine_id)
        self._preemptible_ids.discard(engine_id)
        self.inactive.discard(engine_id)
        self._router.remove(engine_id)
        self._fail_if_none_left()
        self._on_change("left")

    @property
    def engine_ids(self) -> Collection[str]:
        """Ids of the engines that have joined and were not removed."""
        return self._connections.keys()

    def is_detached(self, engine_id: str) -> bool:
        """Return whether requests are not routed to an engine, and it is not replaced, until it is reattached."""
        return engine_id in self._detached_ids

    def is_serving(self, connection: EngineConnection) -> bool:
        """Return whether the engine of this connection may get requests."""
        return connection.lost is None and connection.engine.engine_id not in self._detached_ids

    @property
    def decoding_connections(self) -> list[EngineConnection]:
        """Connections to engines that may decode, without lost and `inactive` engines."""
        return self.list_connections(excluded_ids=self.inactive)

    def list_connections(self, *, excluded_ids: Collection[str]) -> list[EngineConnection]:
        """Return the connections to engines that are not lost, except those whose ids are in `excluded_ids`."""
        return [
            connection
            for name, connection in self._connections.items()
            if connection.lost is None and name not in excluded_ids
        ]

    async def close(self) -> None:
        """Stop replacing engines, and cancel the starts in progress."""
        self._closed = True
        for connection in self._connections.values():
            connection.close()
        tasks = list(self._bring_ups.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- bringing up

    def _serve(self, engine: InferenceEngine) -> None:
        self._connections[engine.engine_id] = EngineConnection(
            engine,
            self._on_lost,
            self._router.record_latency,
            is_preemptible=engine.engine_id in self._preemptible_ids,
        )
        self._router.add(engine)
        if engine.engine_id in self._detached_ids:
            self._router.disable(engine.engine_id)

    def _on_lost(self, connection: EngineConnection) -> None:
        engine_id = connection.engine.engine_id
        assert connection.lost is not None, "the connection is lost"
        if self._connections.get(engine_id) is not connection:  # the last call to a retired engine
            return
        self._router.disable(engine_id)
        self._engines.exclude(connection.engine)
        if self._closed or engine_id in self._abandoned_ids:
            return
        logger.warning("%s; the engine is being replaced, and its requests are sent to other engines", connection.lost)
        # An answer in between shows that the engine works: rare failures in a long run must not add up.
        self._failures[engine_id] = 1 if connection.has_answered else self._failures[engine_id] + 1
        if self._failures[engine_id] >= MAX_FAILURES:
            self._give_up(engine_id, connection.lost)
        else:
            self._start(engine_id)
        self._on_change("hung" if connection.hangs else "died")

    def _start(self, engine_id: str) -> None:
        task = asyncio.create_task(self._bring_up(engine_id), name=f"bring-up-{engine_id}")
        self._bring_ups[engine_id] = task
        task.add_done_callback(lambda task: self._on_bring_up_end(engine_id, task))

    async def _cancel_bring_up(self, engine_id: str) -> None:
        if (task := self._bring_ups.get(engine_id)) is not None:
            task.cancel()
            await asyncio.wait({task})

    def _on_bring_up_end(self, engine_id: str, task: asyncio.Task[None]) -> None:
        if self._bring_ups.get(engine_id) is task:  # the new engine may have died, and its replacement be starting
            del self._bring_ups[engine_id]

    async def _bring_up(self, engine_id: str) -> None:
        """Replace an engine, with retries, until a replacement serves or the engine is given up."""
        # One task per engine owns the retries. Requests only report dead engines, so no failure is lost with a request,
        # and an engine that dies again while it starts needs no special case.
        while True:
            repeated = self._failures[engine_id] - 2
            if repeated >= 0:
                await asyncio.sleep(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**repeated))
            try:
                await self.starts.start(engine_id, self._serve)
            except InfraError as error:
                self._failures[engine_id] += 1
                logger.warning("engine %s could not be replaced: %s", engine_id, one_line_error(error))
                if self._failures[engine_id] >= MAX_FAILURES:
                    self._give_up(engine_id, error)
                    break
            except Exception as error:  # not an infrastructure error, so a retry would fail again
                self._give_up(engine_id, error, final=True)
                break
            else:
                logger.warning("engine %s was replaced and serves again", engine_id)
                self._on_change("replaced")
                return
        self._on_change("given up")

    def _give_up(self, engine_id: str, error: Exception, *, final: bool = False) -> None:
        self._given_up[engine_id] = error
        for engine in self._engines.engines:
            if engine.engine_id == engine_id:
                self._engines.include(engine)  # the next weight sync starts it once more
        if final:
            self.error = error
        elif not self._fail_if_none_left():
            left = len(self._connections) - len(self._given_up)
            logger.error(
                "engine %s failed %d consecutive times and will not be replaced again; %d other engines continue",
                engine_id,
                MAX_FAILURES,
                left,
            )

    def _fail_if_none_left(self) -> bool:
        """Set `error` if all engines that requests may wait for were given up, and return whether it was set."""
        needed = (self._connections.keys() - self.withheld_ids - self.asleep_ids) or self._connections.keys()
        if not needed or not self._given_up.keys() >= needed:
            return False
        engine_id, error = list(self._given_up.items())[-1]
        self.error = NoEngineError(
            f"no inference engine is left: {engine_id} failed {MAX_FAILURES} consecutive times; the last error: {error}"
        )
        return True
