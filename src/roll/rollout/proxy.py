"""LLMProxy: one door to all inference engines.

    generate(request) ──► queue ──(room)──► the least loaded engine ──► Generation
                            ▲                        │ EngineDiedError, or taken off by a pause
                            └──── again, at its place in the queue ◄── replace the engine, sync its weights

    suspend(mode) ──► engines pause ──► weight sync ──► resume() ──► engines go on, the queue moves

Invariants:
    - every request gets exactly one `Generation` or one error;
    - a request whose engine died is issued again, with the same seed, on a live engine; a dead engine is replaced once,
      however many requests notice its death, and takes requests only after its weights were synced;
    - a request that a pause took off its engine goes on from its partial tokens: its caller sees one `Generation`, in
      which every token knows its policy version;
    - requests leave the queue by priority, then in the order in which they came; none does while it is suspended.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from roll.errors import EngineDiedError
from roll.protocols import EngineGroup, InferenceEngine, PauseMode
from roll.rollout.routing import Router
from roll.types import Generation, GenerationRequest

__all__ = ["LLMProxy", "OnStart"]

logger = logging.getLogger(__name__)

OnStart = Callable[[str], None]
"""Told the engine's id when it gets the request."""


@dataclass(slots=True)
class _Waiting:
    """A request in the queue."""

    place: asyncio.Future[InferenceEngine]
    session: str
    pinned: bool


class LLMProxy:
    """Routes requests, and replaces engines that die.

    Args:
        engines: the engines of the run.
        prepare: brings a fresh engine to the current weights before it serves.
        max_attempts: how often one request is issued before its engine's death is passed on.
        router: chooses engines.
    """

    def __init__(
        self,
        engines: EngineGroup,
        prepare: Callable[[InferenceEngine], Awaitable[object]],
        *,
        max_attempts: int = 3,
        router: Router | None = None,
    ) -> None:
        self._engines = engines
        self._prepare = prepare
        self._max_attempts = max_attempts
        self._router = router or Router()
        for engine in engines.engines:
            self._router.add(engine)
        self._queue: list[tuple[int, int, _Waiting]] = []
        self._num_requests = 0
        self._replacements: dict[str, asyncio.Task[None]] = {}
        self._suspended: PauseMode | None = None
        self._unwanted: set[str] = set()
        """Requests that `abort` ended, until their callers have heard it."""
        self._at_engines: dict[str, InferenceEngine] = {}
        self._orphans: dict[str, InferenceEngine] = {}
        """Requests whose callers were cancelled, and where they may still run."""
        self.num_replaced = 0
        self.num_reissued = 0
        self.num_continued = 0

    @property
    def engines(self) -> Sequence[InferenceEngine]:
        """All of them, in their order."""
        return self._engines.engines

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return sum(not entry.place.done() for _, _, entry in self._queue)

    @property
    def num_running(self) -> int:
        """Requests at engines."""
        return len(self._at_engines)

    # ---- requests

    async def generate(
        self,
        request: GenerationRequest,
        *,
        session: str = "",
        pinned: bool = False,
        on_start: OnStart | None = None,
    ) -> Generation:
        """Run a request on the least busy engine; one that `abort` ended returns its partial tokens.

        Args:
            request: its id is unique among those under way.
            session: see `Router.take`.
            pinned: see `Router.take`.
            on_start: called each time an engine gets it.

        Raises:
            EngineDiedError: engines died under it `max_attempts` times.
        """
        order = self._num_requests
        self._num_requests += 1
        pieces: list[Generation] = []
        current, attempt = request, 1
        while True:
            engine = await self._admitted(request.priority, order, session, pinned)
            if on_start is not None:
                on_start(engine.engine_id)
            self._at_engines[request.request_id] = engine
            try:
                generation = await engine.generate(current)
            except EngineDiedError as error:
                logger.warning("request %s, attempt %d: %s", request.request_id, attempt, error)
                self.replace(engine)
                if attempt == self._max_attempts:
                    raise
                attempt += 1
                self.num_reissued += 1
                continue
            except asyncio.CancelledError:
                self._orphans[request.request_id] = engine
                raise
            finally:
                del self._at_engines[request.request_id]
                self._router.give_back(engine.engine_id)
                self._dispatch()
            unwanted = request.request_id in self._unwanted
            self._unwanted.discard(request.request_id)
            pieces.append(generation)
            if generation.finish_reason != "abort" or unwanted:
                return _joined(request, pieces)
            self.num_continued += 1
            following = _continued(request, pieces)
            if following is None:
                return replace(_joined(request, pieces), finish_reason="length")
            current = following

    async def _admitted(self, priority: int, order: int, session: str, pinned: bool) -> InferenceEngine:
        """Wait for a place at an engine, which then counts this request."""
        self._collect_replacements()
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
                if place.done() and not place.cancelled() and place.exception() is None:  # given a place, and gone
                    self._router.give_back(place.result().engine_id)
                    self._dispatch()
                raise
            if self._suspended is None:
                return engine
            self._router.give_back(engine.engine_id)  # suspended between the choice and this turn of the loop

    def _dispatch(self) -> None:
        """Let requests at the head of the queue go, as far as there is room."""
        if self._suspended is not None:
            return
        held: list[tuple[int, int, _Waiting]] = []
        while self._queue:
            entry = self._queue[0][2]
            if entry.place.done():  # its caller is gone
                heapq.heappop(self._queue)
                continue
            engine = self._router.take(entry.session, entry.pinned)
            if engine is None:
                if not entry.pinned:
                    break
                held.append(heapq.heappop(self._queue))  # others may pass one that waits for its own engine
                continue
            heapq.heappop(self._queue)
            entry.place.set_result(engine)
        for item in held:
            heapq.heappush(self._queue, item)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests that are at engines: their callers get the partial tokens. Unknown ids are ignored."""
        by_engine: dict[str, tuple[InferenceEngine, list[str]]] = {}
        for request_id in request_ids:
            engine = self._at_engines.get(request_id)
            if engine is not None:
                self._unwanted.add(request_id)
                by_engine.setdefault(engine.engine_id, (engine, []))[1].append(request_id)
        await asyncio.gather(*(self._abort_at(engine, ids) for engine, ids in by_engine.values()))

    async def end_orphans(self) -> None:
        """Make sure that no engine works on a request whose caller was cancelled."""
        orphans, self._orphans = self._orphans, {}
        by_engine: dict[str, tuple[InferenceEngine, list[str]]] = {}
        for request_id, engine in orphans.items():
            by_engine.setdefault(engine.engine_id, (engine, []))[1].append(request_id)
        await asyncio.gather(*(self._abort_at(engine, ids) for engine, ids in by_engine.values()))

    async def _abort_at(self, engine: InferenceEngine, request_ids: Sequence[str]) -> None:
        try:
            await engine.abort(request_ids)
        except EngineDiedError:
            self.replace(engine)

    # ---- weights

    async def suspend(self, mode: PauseMode) -> None:
        """Stop all decoding; requests wait until `resume`. With `drain`, what runs is finished first."""
        assert self._suspended is None, "the proxy is suspended already"
        self._suspended = mode
        await asyncio.gather(*(self._pause(engine, mode) for engine in self._router.serving))

    async def resume(self) -> None:
        """Decode again, and let the queue move."""
        assert self._suspended is not None, "the proxy is not suspended"
        await asyncio.gather(*map(self._resume, self._router.serving))
        self._suspended = None
        self._dispatch()

    async def _pause(self, engine: InferenceEngine, mode: PauseMode) -> None:
        try:
            await engine.pause(mode)
        except EngineDiedError:
            self.replace(engine)

    async def _resume(self, engine: InferenceEngine) -> None:
        try:
            await engine.resume()
        except EngineDiedError:
            self.replace(engine)

    # ---- engines that die

    def replace(self, dead: InferenceEngine) -> None:
        """Start replacing an engine, unless that is under way or done."""
        engine_id = dead.engine_id
        self._collect_replacements()  # this may be the fresh one, which died at once
        if engine_id in self._replacements or not any(engine is dead for engine in self._engines.engines):
            return
        self._router.remove(engine_id)
        task = asyncio.create_task(self._replace(engine_id), name=f"replace-{engine_id}")
        task.add_done_callback(lambda _: self._on_replaced())
        self._replacements[engine_id] = task

    async def _replace(self, engine_id: str) -> None:
        fresh = await self._engines.replace(engine_id)
        await self._prepare(fresh)
        self.num_replaced += 1
        self._router.add(fresh)

    def _on_replaced(self) -> None:
        """Somebody waits for it: let the queue move, or tell it that no engine can be had."""
        done = [task for task in self._replacements.values() if task.done() and not task.cancelled()]
        error = next((failure for task in done if (failure := task.exception()) is not None), None)
        if error is not None:
            waiting, self._queue = self._queue, []
            for _, _, entry in waiting:
                if not entry.place.done():
                    entry.place.set_exception(error)
        self._dispatch()

    def _collect_replacements(self) -> None:
        """An engine that cannot be replaced ends the run: its error is raised here."""
        for engine_id, task in list(self._replacements.items()):
            if task.done():
                del self._replacements[engine_id]
                task.result()

    async def settle(self) -> None:
        """Wait for replacements under way, so that the next weight sync reaches every engine."""
        while self._replacements:
            engine_id, task = next(iter(self._replacements.items()))
            await task
            self._replacements.pop(engine_id, None)

    async def restore(self, engine_ids: Collection[str]) -> None:
        """Replace engines that others found dead, and wait until they serve."""
        for engine in self._engines.engines:
            if engine.engine_id in engine_ids:
                self.replace(engine)
        await self.settle()


def _continued(request: GenerationRequest, pieces: Sequence[Generation]) -> GenerationRequest | None:
    """What is still to be written; `None` where nothing is."""
    written = np.concatenate([piece.token_ids for piece in pieces])
    left = request.sampling.max_new_tokens - len(written)
    if left <= 0:
        return None
    seed = request.sampling.seed
    seed = None if seed is None else (seed + 0x85EBCA6B * len(written)) % 2**31  # fresh randomness, still the request's
    return replace(
        request,
        token_ids=np.concatenate([request.token_ids, written]).astype(np.int32),
        sampling=replace(request.sampling, max_new_tokens=left, seed=seed),
    )


def _joined(request: GenerationRequest, pieces: Sequence[Generation]) -> Generation:
    """One generation of a request that was continued."""
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    return replace(
        last,
        request_id=request.request_id,
        token_ids=np.concatenate([piece.token_ids for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        policy_versions=np.concatenate([piece.policy_versions for piece in pieces]),
    )
