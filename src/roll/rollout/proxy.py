"""LLMProxy: the single entry point to all inference engines; it continues partial rollouts after an abort.

    generate(request) ──► queue ──(room)──► the least loaded engine ──► Generation
                            ▲                        │ the engine died or hangs, or a pause aborted the request
                            └──── again, at its position in the queue

    suspend(mode) ──► engines pause ──► weight sync ──► resume() ──► engines continue, the queue moves

Invariants:
    - every request gets exactly one `Generation` or one error;
    - a request whose engine died or hangs is sent to another engine, with the same seed; meanwhile, the fleet (`fleet`)
      replaces the engine;
    - a request's slot at an engine is free when the engine has released the request (`engine_connection`); canceling
      the caller does not free it;
    - a request that a pause aborted, or whose engine leaves, continues from its partial tokens, or restarts if
      configured; the caller gets one `Generation`, in which every token has its policy version, and the same random
      numbers as without the interruption (`SamplingParams.position`);
    - requests leave the queue by priority, then in order of arrival, but not while the proxy is suspended.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from roll.data.router_replay import merge_records
from roll.errors import EngineDiedError
from roll.protocols import InferenceEngine, PauseMode
from roll.rollout.engine_connection import EngineConnection
from roll.rollout.engine_group import EngineGroup
from roll.rollout.fleet import EngineChange, EngineFleet
from roll.rollout.pace import PaceCurve
from roll.rollout.routing import Route, Router
from roll.rollout.transitions import EngineTransitions
from roll.types import Generation, GenerationRequest

__all__ = ["LLMProxy", "OnStart"]

logger = logging.getLogger(__name__)

OnStart = Callable[[str], None]
"""Called with the engine's id when a request is sent to the engine."""


@dataclass(slots=True)
class _QueuedRequest:
    """A request in the queue."""

    future: asyncio.Future[InferenceEngine]
    """Resolves to the engine at which the request has a slot."""
    route: Route


class LLMProxy:
    """Queues requests and routes them to the engines of a run.

    Args:
        engines: The engines of the run.
        prepare: Syncs the current weights to a new engine before it serves; `None` if engines load the weights
            themselves.
        max_attempts: Number of attempts at a request before the engine's error is raised.
        router: Router that chooses engines.
        restart_aborted: Whether to restart requests that a pause aborted; otherwise they continue from their partial
            tokens.
    """

    def __init__(
        self,
        engines: EngineGroup,
        prepare: Callable[[InferenceEngine], Awaitable[object]] | None = None,
        *,
        max_attempts: int = 3,
        router: Router | None = None,
        restart_aborted: bool = False,
    ) -> None:
        self._max_attempts = max_attempts
        self._restart_aborted = restart_aborted
        self._router = router or Router()
        self._queue: list[tuple[int, int, _QueuedRequest]] = []
        self._num_requests = 0
        self._suspended: PauseMode | None = None
        self._pause_lock = asyncio.Lock()
        """Lock that is held while all engines, or a single engine that returns, are paused or resumed."""
        self._unwanted: set[str] = set()
        """Ids of aborted requests whose callers have not received the result yet."""
        self._at_engines: dict[str, EngineConnection] = {}
        self.num_replaced = 0
        self.num_hung_engines = 0
        """Number of engines that hung; once replaced, they are also included in `num_replaced`."""
        self.num_reissued = 0
        self.num_continued = 0
        self.num_restarted = 0
        self._fleet = EngineFleet(engines, prepare or _keep_loaded_weights, self._router, self._on_change)
        self.transitions = EngineTransitions(
            engines,
            self._fleet,
            self._router,
            prepare or _keep_loaded_weights,
            lambda: self._suspended,
            self._pause_lock,
        )
        """Adds and removes engines, puts them to sleep, and releases their devices to trainers."""

    @property
    def engines(self) -> Sequence[InferenceEngine]:
        """All engines of the run, in the order in which they were added."""
        return self._fleet.engines

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return sum(not entry.future.done() for _, _, entry in self._queue)

    @property
    def num_running(self) -> int:
        """Number of requests at engines, without those whose callers were canceled."""
        return len(self._at_engines)

    @property
    def fleet_curve(self) -> PaceCurve | None:
        """Pace curve of all engines together; `None` if there are no answers."""
        return self._router.estimate_fleet_curve()

    @property
    def serving_engines(self) -> list[InferenceEngine]:
        """Engines that may get requests."""
        return self._router.serving_engines

    @property
    def num_serving_engines(self) -> int:
        """Number of engines that may get requests."""
        return len(self._router.serving_engines)

    # ---- requests

    def get_counters(self) -> dict[str, int]:
        """Return counters of engine replacements and of requests that were sent again, by name."""
        return {
            "replaced": self.num_replaced,
            "hung": self.num_hung_engines,
            "reissued": self.num_reissued,
            **({"restarted": self.num_restarted} if self._restart_aborted else {"continued": self.num_continued}),
        }

    async def generate(
        self,
        request: GenerationRequest,
        *,
        session: str = "",
        pinned: bool = False,
        domain: str = "",
        on_start: OnStart | None = None,
    ) -> Generation:
        """Run a request on the least loaded engine; an aborted request returns its partial tokens.

        Args:
            request: A request whose id is unique among the requests in progress.
            session: See `Router.acquire_slot`.
            pinned: See `Router.acquire_slot`.
            domain: See `Router.acquire_slot`.
            on_start: Called each time an engine receives the request.

        Raises:
            EngineDiedError: The engine of the request died or hung `max_attempts` times; engines on nodes that may
                leave at any time are not counted.
            NoEngineError: No engine is left.
        """
        # A request that is sent again keeps its number, and so its position in the queue.
        order = self._num_requests
        self._num_requests += 1
        pieces: list[Generation] = []
        current, attempt, route = request, 1, Route(session, pinned, domain)
        while True:
            connection, give_back = await self._wait_for_free_engine(request, order, route)
            if on_start is not None:
                on_start(connection.engine.engine_id)
            self._at_engines[request.request_id] = connection
            try:
                generation = await connection.generate(current, give_back, domain)
            except EngineDiedError as error:
                logger.debug("request %s, attempt %d: %s", request.request_id, attempt, error)
                if not connection.is_preemptible:  # otherwise, the request is not to blame
                    if attempt == self._max_attempts:
                        raise
                    attempt += 1
                self.num_reissued += 1
                continue  # `current` still has the seed, and the tokens of earlier pieces
            finally:
                del self._at_engines[request.request_id]
                unwanted = request.request_id in self._unwanted
                self._unwanted.discard(request.request_id)
            pieces.append(generation)
            if generation.finish_reason != "abort" or unwanted:
                return _join_generations(request, pieces)
            if self._restart_aborted:
                pieces.clear()
                self.num_restarted += 1
                continue
            self.num_continued += 1
            following = _continue_request(request, pieces)
            if following is None:
                return replace(_join_generations(request, pieces), finish_reason="length")
            current = following

    async def _wait_for_free_engine(
        self, request: GenerationRequest, order: int, route: Route
    ) -> tuple[EngineConnection, Callable[[], None]]:
        """Wait for a slot at an engine that can accept the request immediately.

        Returns:
            The connection to the engine, and a function that releases the slot.
        """
        while True:
            engine = await self._wait_for_slot(request.priority, order, route)
            connection, give_back = (
                self._fleet.get_connection(engine.engine_id),
                partial(self._release_slot, engine.engine_id),
            )
            try:
                await connection.wait_for_orphaned_request(request.request_id)
            except BaseException:
                give_back()
                raise
            if self._fleet.is_serving(connection) and self._suspended is None:
                return connection, give_back
            give_back()  # since it was chosen, the engine was lost or is leaving, or the proxy was suspended

    def _release_slot(self, engine_id: str) -> None:
        self._router.release_slot(engine_id)
        self._dispatch()

    async def _wait_for_slot(self, priority: int, order: int, route: Route) -> InferenceEngine:
        """Wait for a slot at an engine; return the engine, whose load then includes this request."""
        if self._fleet.error is not None:
            raise self._fleet.error
        if not self._queue and self._suspended is None:
            engine = self._router.acquire_slot(*route)
            if engine is not None:
                return engine
        while True:
            future: asyncio.Future[InferenceEngine] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._queue, (priority, order, _QueuedRequest(future, route)))
            self._dispatch()
            try:
                engine = await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled() and future.exception() is None:  # it has a slot
                    self._release_slot(future.result().engine_id)
                raise
            if self._suspended is None:
                return engine
            self._router.release_slot(engine.engine_id)  # suspended between the choice and this loop iteration

    def _dispatch(self) -> None:
        """Send requests from the head of the queue to engines while there is room."""
        if self._suspended is not None:
            return
        held: list[tuple[int, int, _QueuedRequest]] = []
        while self._queue:
            entry = self._queue[0][2]
            if entry.future.done():  # its caller was canceled
                heapq.heappop(self._queue)
                continue
            engine = self._router.acquire_slot(*entry.route)
            if engine is None:
                if not entry.route.pinned:
                    break
                held.append(heapq.heappop(self._queue))  # pinned to a busy engine: later requests may overtake it
                continue
            heapq.heappop(self._queue)
            entry.future.set_result(engine)
        for item in held:
            heapq.heappush(self._queue, item)

    async def abort(self, request_ids: Collection[str]) -> None:
        """Abort requests at engines; their callers get the partial tokens. Unknown ids are ignored."""
        by_connection: dict[EngineConnection, list[str]] = {}
        for request_id in request_ids:
            connection = self._at_engines.get(request_id)
            if connection is not None:
                self._unwanted.add(request_id)
                by_connection.setdefault(connection, []).append(request_id)
        await asyncio.gather(*(_await_unless_lost(connection.abort(ids)) for connection, ids in by_connection.items()))

    async def wait_for_orphaned_requests(self) -> None:
        """Wait until the engines have released all requests whose callers have been canceled."""
        await self._fleet.wait_for_orphaned_requests()

    # ---- weights

    async def suspend(self, mode: PauseMode) -> None:
        """Pause all decoding; requests wait until `resume`. With `drain`, running requests finish first."""
        assert self._suspended is None, "the proxy is suspended already"
        self._suspended = mode
        async with self._pause_lock:
            connections = self._fleet.decoding_connections
            await asyncio.gather(*(_await_unless_lost(connection.pause(mode)) for connection in connections))

    async def resume(self) -> None:
        """Resume decoding, and dispatch the queue."""
        assert self._suspended is not None, "the proxy is not suspended"
        async with self._pause_lock:
            connections = self._fleet.decoding_connections
            await asyncio.gather(*(_await_unless_lost(connection.resume()) for connection in connections))
            self._suspended = None
        self._dispatch()

    # ---- engines that die

    def replace(self, engine: InferenceEngine, cause: str = "it does not respond") -> None:
        """Replace a dead engine; an engine that was given up is started once more."""
        self._fleet.replace(engine, cause)

    def start_replacing(self, engine_ids: Collection[str]) -> None:
        """Start replacing dead engines in the background; meanwhile requests go to the other engines."""
        for engine in self._fleet.engines:
            if engine.engine_id in engine_ids:
                self._fleet.replace(engine, "it did not receive the weights")

    async def wait_for_replacements(self) -> None:
        """Wait until every engine serves or was given up."""
        await self._fleet.wait_for_replacements()

    async def close(self) -> None:
        """Cancel the starts and transitions of engines; called when the run ends."""
        await self.transitions.close()
        await self._fleet.close()

    def _on_change(self, change: EngineChange) -> None:
        """Dispatch the queue after an engine has changed; fail all waiting requests if no engine is left."""
        self.num_replaced += change == "replaced"
        self.num_hung_engines += change == "hung"
        if self._fleet.error is not None:
            waiting, self._queue = self._queue, []
            for _, _, entry in waiting:
                if not entry.future.done():
                    entry.future.set_exception(self._fleet.error)
        self._dispatch()


async def _keep_loaded_weights(engine: InferenceEngine) -> None:
    """Do nothing, since the engine has loaded its weights itself."""


async def _await_unless_lost(call: Awaitable[None]) -> None:
    """Await a call to an engine, and ignore the error if the engine is lost."""
    with suppress(EngineDiedError):
        await call


def _continue_request(request: GenerationRequest, pieces: Sequence[Generation]) -> GenerationRequest | None:
    """Return the request that continues an answer after the pieces; `None` if they reach the token limit."""
    written = np.concatenate([piece.token_ids for piece in pieces])
    left = request.sampling.max_new_tokens - len(written)
    if left <= 0:
        return None
    return replace(
        request,
        token_ids=np.concatenate([request.token_ids, written]).astype(np.int32),
        sampling=replace(request.sampling, max_new_tokens=left, position=request.sampling.position + len(written)),
    )


def _join_generations(request: GenerationRequest, pieces: Sequence[Generation]) -> Generation:
    """Join the pieces of a continued request into one generation."""
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    written = np.concatenate([piece.token_ids for piece in pieces])
    return replace(
        last,
        request_id=request.request_id,
        token_ids=written,
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        policy_versions=np.concatenate([piece.policy_versions for piece in pieces]),
        experts=merge_records(
            [piece.experts for piece in pieces if len(piece.token_ids)], len(request.token_ids) + len(written)
        ),
    )
