"""LLMProxy: the single entry point to all inference engines; it continues partial rollouts after an abort.

    generate(request) ──► queue ──(room)──► link to the least loaded engine ──► Generation
                            ▲                        │ the engine died or hangs, or a pause aborted the request
                            └──── again, at its place in the queue

    suspend(mode) ──► engines pause ──► weight sync ──► resume() ──► engines continue, the queue moves

Invariants:
    - every request gets exactly one `Generation` or one error;
    - a request whose engine died or hangs is issued again, with the same seed, on a live engine; the fleet (`fleet`)
      replaces the engine, and no request waits for that;
    - a request's slot at an engine is free when the engine has released the request (`link`), not when its caller has;
    - a request that a pause aborted continues from its partial tokens, or restarts if so configured: its caller gets
      one `Generation`, in which every token has its policy version;
    - requests leave the queue by priority, then in order of arrival; none does while the proxy is suspended.
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

from roll.data.expert_choices import first_known
from roll.errors import EngineDiedError
from roll.protocols import InferenceEngine, PauseMode
from roll.rollout.engine_connection import EngineConnection
from roll.rollout.engine_group import EngineGroup
from roll.rollout.fleet import Change, EngineFleet
from roll.rollout.routing import Router
from roll.rollout.transitions import EngineTransitions
from roll.types import Generation, GenerationRequest

__all__ = ["LLMProxy", "OnStart"]

logger = logging.getLogger(__name__)

OnStart = Callable[[str], None]
"""Called with the engine's id when the engine gets the request."""


@dataclass(slots=True)
class _Waiting:
    """A request in the queue."""

    place: asyncio.Future[InferenceEngine]
    session: str
    pinned: bool


class LLMProxy:
    """Routes requests to a fleet of engines.

    Args:
        engines: The engines of the run.
        prepare: Syncs the current weights to a fresh engine before it serves; not needed if the engine loads them.
        max_attempts: Number of attempts at a request before the engine's error is raised.
        router: Chooses engines.
        restarts: Whether a request that a pause aborted restarts instead of continuing from its partial tokens.
    """

    def __init__(
        self,
        engines: EngineGroup,
        prepare: Callable[[InferenceEngine], Awaitable[object]] | None = None,
        *,
        max_attempts: int = 3,
        router: Router | None = None,
        restarts: bool = False,
    ) -> None:
        self._max_attempts = max_attempts
        self._restarts = restarts
        self._router = router or Router()
        self._queue: list[tuple[int, int, _Waiting]] = []
        self._num_requests = 0
        self._suspended: PauseMode | None = None
        self._in_step = asyncio.Lock()
        """Held while all engines pause or resume, and while a single engine is brought to the same state."""
        self._unwanted: set[str] = set()
        """Ids of requests that `abort` ended, until their callers get the result."""
        self._at_engines: dict[str, EngineConnection] = {}
        self.num_replaced = 0
        self.num_hung = 0
        """Number of engines that hung; once replaced, they also count in `num_replaced`."""
        self.num_reissued = 0
        self.num_continued = 0
        self.num_restarted = 0
        self._fleet = EngineFleet(engines, prepare or _as_loaded, self._router, self._on_change)
        self.transitions = EngineTransitions(
            engines, self._fleet, self._router, prepare or _as_loaded, lambda: self._suspended, self._in_step
        )
        """Adds, removes, puts to sleep and wakes single engines."""

    @property
    def engines(self) -> Sequence[InferenceEngine]:
        """All engines of the run, in the order in which they were added."""
        return self._fleet.engines

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return sum(not entry.place.done() for _, _, entry in self._queue)

    @property
    def num_running(self) -> int:
        """Number of requests at engines, without orphans."""
        return len(self._at_engines)

    @property
    def num_serving(self) -> int:
        """Number of engines that may get requests."""
        return len(self._router.serving)

    # ---- requests

    def counts(self) -> dict[str, int]:
        """Return the number of engine replacements and of requests that were issued again so far, by kind."""
        return {
            "replaced": self.num_replaced,
            "hung": self.num_hung,
            "reissued": self.num_reissued,
            **({"restarted": self.num_restarted} if self._restarts else {"continued": self.num_continued}),
        }

    async def generate(
        self,
        request: GenerationRequest,
        *,
        session: str = "",
        pinned: bool = False,
        on_start: OnStart | None = None,
    ) -> Generation:
        """Run a request on the least loaded engine; a request that `abort` ended returns its partial tokens.

        Args:
            request: A request with an id that is unique among those in progress.
            session: See `Router.take`.
            pinned: See `Router.take`.
            on_start: Called each time an engine gets the request.

        Raises:
            EngineDiedError: Engines died or hung with the request `max_attempts` times.
            NoEngineError: No engine is left.
        """
        order = self._num_requests
        self._num_requests += 1
        pieces: list[Generation] = []
        current, attempt = request, 1
        while True:
            link, give_back = await self._wait_for_free_engine(request, order, session, pinned)
            if on_start is not None:
                on_start(link.engine.engine_id)
            self._at_engines[request.request_id] = link
            try:
                generation = await link.generate(current, give_back)
            except EngineDiedError as error:
                logger.debug("request %s, attempt %d: %s", request.request_id, attempt, error)
                if attempt == self._max_attempts:
                    raise
                attempt += 1
                self.num_reissued += 1
                continue
            finally:
                del self._at_engines[request.request_id]
                unwanted = request.request_id in self._unwanted
                self._unwanted.discard(request.request_id)
            pieces.append(generation)
            if generation.finish_reason != "abort" or unwanted:
                return _join_generations(request, pieces)
            if self._restarts:
                pieces.clear()
                self.num_restarted += 1
                continue
            self.num_continued += 1
            following = _continue_request(request, pieces)
            if following is None:
                return replace(_join_generations(request, pieces), finish_reason="length")
            current = following

    async def _wait_for_free_engine(
        self, request: GenerationRequest, order: int, session: str, pinned: bool
    ) -> tuple[EngineConnection, Callable[[], None]]:
        """Wait for a slot at an engine that can take the request at once.

        Returns:
            The link to the engine, and a function that releases the slot.
        """
        while True:
            engine = await self._wait_for_slot(request.priority, order, session, pinned)
            link, give_back = self._fleet.link(engine.engine_id), partial(self._give_back, engine.engine_id)
            try:
                await link.end_orphan(request.request_id)
            except BaseException:
                give_back()
                raise
            if self._fleet.is_serving(link) and self._suspended is None:
                return link, give_back
            give_back()  # since the choice, it was lost or is leaving, or the proxy was suspended

    def _give_back(self, engine_id: str) -> None:
        self._router.give_back(engine_id)
        self._dispatch()

    async def _wait_for_slot(self, priority: int, order: int, session: str, pinned: bool) -> InferenceEngine:
        """Wait for a slot at an engine, which then counts this request."""
        if self._fleet.error is not None:
            raise self._fleet.error
        if not self._queue and self._suspended is None:
            engine = self._router.take(session, pinned)
            if engine is not None:
                return engine
        while True:
            place: asyncio.Future[InferenceEngine] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._queue, (priority, order, _Waiting(place, session, pinned)))
            self._dispatch()
            try:
                engine = await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled() and place.exception() is None:  # canceled after it got a slot
                    self._give_back(place.result().engine_id)
                raise
            if self._suspended is None:
                return engine
            self._router.give_back(engine.engine_id)  # suspended between the choice and this loop iteration

    def _dispatch(self) -> None:
        """Send the requests at the head of the queue to engines, as far as there is room."""
        if self._suspended is not None:
            return
        held: list[tuple[int, int, _Waiting]] = []
        while self._queue:
            entry = self._queue[0][2]
            if entry.place.done():  # its caller was canceled
                heapq.heappop(self._queue)
                continue
            engine = self._router.take(entry.session, entry.pinned)
            if engine is None:
                if not entry.pinned:
                    break
                held.append(heapq.heappop(self._queue))  # other requests may pass one that waits for its own engine
                continue
            heapq.heappop(self._queue)
            entry.place.set_result(engine)
        for item in held:
            heapq.heappush(self._queue, item)

    async def abort(self, request_ids: Collection[str]) -> None:
        """Abort requests at engines; their callers get the partial tokens. Unknown ids are ignored."""
        by_link: dict[EngineConnection, list[str]] = {}
        for request_id in request_ids:
            link = self._at_engines.get(request_id)
            if link is not None:
                self._unwanted.add(request_id)
                by_link.setdefault(link, []).append(request_id)
        await asyncio.gather(*(_unless_lost(link.abort(ids)) for link, ids in by_link.items()))

    async def end_orphans(self) -> None:
        """Wait until no engine works on a request whose caller was canceled so far."""
        await self._fleet.end_orphans()

    # ---- weights

    async def suspend(self, mode: PauseMode) -> None:
        """Pause all decoding; requests wait until `resume`. With `drain`, running requests finish first."""
        assert self._suspended is None, "the proxy is suspended already"
        self._suspended = mode
        async with self._in_step:
            await asyncio.gather(*(_unless_lost(link.pause(mode)) for link in self._fleet.working))

    async def resume(self) -> None:
        """Resume decoding, and dispatch the queue."""
        assert self._suspended is not None, "the proxy is not suspended"
        async with self._in_step:
            await asyncio.gather(*(_unless_lost(link.resume()) for link in self._fleet.working))
            self._suspended = None
        self._dispatch()

    # ---- memory

    async def sleep(self) -> None:
        """Put every engine to sleep, which frees device memory until `wake`; engines must not be called meanwhile.

        An engine that is being replaced comes up first. An engine that dies while asleep is replaced after `wake`.
        """
        await self._fleet.hold()
        await self.end_orphans()
        await self.transitions.sleep_all()

    async def wake(self) -> None:
        """Wake every engine; the engines need a weight sync before they answer."""
        await self.transitions.wake_all()
        self._fleet.allow_starts()

    # ---- engines that die

    def replace(self, dead: InferenceEngine, cause: str = "it does not serve") -> None:
        """Replace an engine that a caller found dead, unless that is in progress; an engine that was given up is tried
        again.
        """
        self._fleet.replace(dead, cause)

    def restore(self, dead: Collection[str]) -> None:
        """Replace engines that a weight sync found dead, without waiting: requests go to the other engines."""
        for engine in self._fleet.engines:
            if engine.engine_id in dead:
                self._fleet.replace(engine, "it got no weights")

    async def settle(self) -> None:
        """Wait for replacements in progress, until every engine serves or was given up."""
        await self._fleet.settle()

    async def close(self) -> None:
        """Stop replacing, adding and removing engines; called when the run ends."""
        await self.transitions.close()
        await self._fleet.close()

    def _on_change(self, change: Change) -> None:
        """Dispatch the queue after a change of an engine, or fail all waiting requests if no engine is left."""
        self.num_replaced += change == "replaced"
        self.num_hung += change == "hung"
        if self._fleet.error is not None:
            waiting, self._queue = self._queue, []
            for _, _, entry in waiting:
                if not entry.place.done():
                    entry.place.set_exception(self._fleet.error)
        self._dispatch()


async def _as_loaded(engine: InferenceEngine) -> None:
    """Keep the weights that the engine has loaded."""


async def _unless_lost(call: Awaitable[None]) -> None:
    """Await a call to an engine; the call does nothing if the engine is lost."""
    with suppress(EngineDiedError):
        await call


def _continue_request(request: GenerationRequest, pieces: Sequence[Generation]) -> GenerationRequest | None:
    """Return the request for the rest of the answer; `None` if the token limit is reached."""
    written = np.concatenate([piece.token_ids for piece in pieces])
    left = request.sampling.max_new_tokens - len(written)
    if left <= 0:
        return None
    seed = request.sampling.seed
    seed = None if seed is None else (seed + 0x85EBCA6B * len(written)) % 2**31  # new, but determined by the request
    return replace(
        request,
        token_ids=np.concatenate([request.token_ids, written]).astype(np.int32),
        sampling=replace(request.sampling, max_new_tokens=left, seed=seed),
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
        experts=first_known(
            [piece.experts for piece in pieces if len(piece.token_ids)], len(request.token_ids) + len(written)
        ),
    )
