"""EngineFleet: knows which engines serve, and replaces those that do not.

    serving ──died, hangs, or found dead by others──► lost ──► replaced ──► weights are synced ──► serving
                                                       ▲            │ failed, or died again: after a backoff
                                                       └────────────┴── six times in a row ──► given up

Invariants:
    - an engine that does not serve is being brought up by one task of the fleet, or was given up; only the fleet ends
      or awaits a bring-up;
    - the other engines take over the work of an engine that was given up; if no engine is left, `error` is raised for
      every waiting request;
    - an error that a retry cannot fix (any error that is not an `InfraError`) becomes such an `error` at once;
    - between `hold` and `allow_starts`, no engine is being started; an engine that is kept away is not started either.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Literal, TypeAlias

from roll.errors import ConfigError, EngineDiedError, InfraError, NoEngineError
from roll.protocols import InferenceEngine
from roll.rollout.engine_connection import EngineConnection
from roll.rollout.engine_group import EngineGroup
from roll.rollout.routing import Router

__all__ = ["Change", "EngineFleet"]

logger = logging.getLogger(__name__)

Change: TypeAlias = Literal["died", "hung", "replaced", "given up", "came", "left"]

MAX_FAILURES = 6
"""Failures of one engine in a row, without an answer in between, after which it is given up."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""First and longest backoff before an engine that failed twice is tried again; doubles with each failure."""
START_LIMIT_S = 1800.0
"""Timeout of starting a fresh engine. The weight sync that follows has its own timeout."""


class EngineFleet:
    """The engines of a run; lost ones are replaced.

    Args:
        engines: The engines of the run.
        prepare: Syncs the current weights to a fresh engine before it serves.
        router: Router that gets the serving engines.
        on_change: Called on every change of an engine.
    """

    def __init__(
        self,
        engines: EngineGroup,
        prepare: Callable[[InferenceEngine], Awaitable[object]],
        router: Router,
        on_change: Callable[[Change], None],
    ) -> None:
        self.error: Exception | None = None
        """Why no engine is available; `None` while one is."""
        self._engines = engines
        self._prepare = prepare
        self._router = router
        self._on_change = on_change
        self._links: dict[str, EngineConnection] = {}
        self._failures: Counter[str] = Counter()
        """Failures in a row, by engine."""
        self._given_up: dict[str, Exception] = {}
        self._coming: dict[str, asyncio.Task[None]] = {}
        self._starting: dict[str, asyncio.Event] = {}
        self._held = False
        self._away: set[str] = set()
        self.standing: set[str] = set()
        """Engines that are asleep or suspended individually; pausing and resuming all engines skips them."""
        self._may_start, self._none_starts = asyncio.Event(), asyncio.Event()
        self._none_starts.set()
        self._closed = False
        for engine in engines.engines:
            self._serve(engine)

    @property
    def engines(self) -> Sequence[InferenceEngine]:
        """All engines of the run, in the order in which they were added."""
        return self._engines.engines

    @property
    def serving(self) -> list[EngineConnection]:
        """Links to serving engines, in order."""
        return [self._links[engine.engine_id] for engine in self._router.serving]

    def link(self, engine_id: str) -> EngineConnection:
        """Return the link to an engine; while the engine is being replaced, the link to the lost one.

        Raises:
            ConfigError: The group has no engine of this id.
        """
        if engine_id not in self._links:
            raise ConfigError(f"there is no engine '{engine_id}': the group has {', '.join(self._links) or 'none'}.")
        return self._links[engine_id]

    def replace(self, engine: InferenceEngine, cause: str) -> None:
        """Replace an engine that a caller found dead; an engine that was given up is tried once more."""
        engine_id = engine.engine_id
        link = self._links.get(engine_id)
        if link is None:  # it has not served yet, or has been retired
            return
        if link.engine is engine and link.lost is None:
            link.lose(EngineDiedError(engine_id, cause))
        elif engine_id in self._given_up and not self._closed:
            del self._given_up[engine_id]
            self._failures[engine_id] = MAX_FAILURES - 1
            self.error = None
            self._start(engine_id)

    async def end_orphans(self) -> None:
        """Wait until no engine works on a request whose caller was canceled so far."""
        await asyncio.gather(*(link.end_orphans() for link in list(self._links.values())))

    async def settle(self) -> None:
        """Wait until every engine serves or was given up."""
        while self._coming:
            await asyncio.wait(self._coming.values())

    async def hold(self) -> None:
        """Block engine starts until `allow_starts`; return once every start in progress has succeeded or failed."""
        self._held = True
        await self._none_starts.wait()

    def allow_starts(self) -> None:
        """Allow engine starts again."""
        self._held = False
        self._may_start.set()

    # ---- engines that join and leave (`transitions`)

    async def start(self, engine_id: str) -> None:
        """Start a new member of the group, as soon as starts are allowed; then it serves. There is no retry.

        Raises:
            Exception: The start failed.
        """
        await self._serve_fresh(engine_id)
        if isinstance(self.error, NoEngineError):
            self.error = None
        self._on_change("came")

    async def quarantine(self, engine_id: str) -> None:
        """Stop routing to an engine and starting replacements of it; return once no start of it is in progress."""
        self._router.remove(self.link(engine_id).engine.engine_id)
        self._away.add(engine_id)
        if engine_id in self._starting:
            await self._starting[engine_id].wait()

    def readmit(self, engine_id: str) -> None:
        """Let an engine that was kept away serve, or be replaced, like any other engine."""
        self._away.discard(engine_id)
        self._may_start.set()
        if self._links[engine_id].lost is None:
            self._router.add(self._links[engine_id].engine)
            self._on_change("came")

    async def forget(self, engine_id: str) -> None:
        """Remove an engine that is kept away, permanently."""
        if (task := self._coming.get(engine_id)) is not None:
            task.cancel()
            await asyncio.wait({task})
        self._links.pop(engine_id).close()
        del self._failures[engine_id]
        self._given_up.pop(engine_id, None)
        self._away.discard(engine_id)
        self.standing.discard(engine_id)
        self._router.forget(engine_id)
        self._find_none_left()
        self._on_change("left")

    def is_serving(self, link: EngineConnection) -> bool:
        """Return whether the engine of this link may get requests."""
        return link.lost is None and link.engine.engine_id not in self._away

    @property
    def working(self) -> list[EngineConnection]:
        """Links to engines that may decode, including those that are about to leave, in order."""
        return self.links(without=self.standing)

    def links(self, *, without: Collection[str]) -> list[EngineConnection]:
        """Return the links to engines that are not lost, except those in `without`, in order."""
        return [link for name, link in self._links.items() if link.lost is None and name not in without]

    async def wait_until_starts_allowed(self) -> None:
        """Wait until engine starts are allowed."""
        while self._held:
            self._may_start.clear()
            await self._may_start.wait()

    async def close(self) -> None:
        """Stop replacing engines, and cancel the starts in progress."""
        self._closed = True
        for link in self._links.values():
            link.close()
        tasks = list(self._coming.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- bringing up

    def _serve(self, engine: InferenceEngine) -> None:
        self._links[engine.engine_id] = EngineConnection(engine, self._on_lost)
        self._router.add(engine)
        if engine.engine_id in self._away:
            self._router.remove(engine.engine_id)

    def _on_lost(self, link: EngineConnection) -> None:
        engine_id = link.engine.engine_id
        assert link.lost is not None, "it was lost"
        if self._links.get(engine_id) is not link:  # a last call to an engine that was retired
            return
        self._router.remove(engine_id)
        if self._closed:
            return
        logger.warning("%s; it is replaced, and its requests are issued again", link.lost)
        self._failures[engine_id] = 1 if link.has_answered else self._failures[engine_id] + 1
        if self._failures[engine_id] >= MAX_FAILURES:
            self._give_up(engine_id, link.lost)
        else:
            self._start(engine_id)
        self._on_change("hung" if link.hangs else "died")

    def _start(self, engine_id: str) -> None:
        task = asyncio.create_task(self._bring_up(engine_id), name=f"bring-up-{engine_id}")
        self._coming[engine_id] = task
        task.add_done_callback(lambda task: self._came(engine_id, task))

    def _came(self, engine_id: str, task: asyncio.Task[None]) -> None:
        if self._coming.get(engine_id) is task:  # the fresh engine may have died, and another be starting
            del self._coming[engine_id]

    async def _bring_up(self, engine_id: str) -> None:
        """Replace an engine, with retries, until one serves or too many have failed."""
        while True:
            repeated = self._failures[engine_id] - 2
            if repeated >= 0:
                await asyncio.sleep(min(LONGEST_PAUSE_S, PAUSE_S * 2**repeated))
            try:
                await self._serve_fresh(engine_id)
            except InfraError as error:
                self._failures[engine_id] += 1
                logger.warning("engine %s could not be replaced: %s", engine_id, error)
                if self._failures[engine_id] >= MAX_FAILURES:
                    self._give_up(engine_id, error)
                    break
            except Exception as error:  # not an infrastructure error: a retry would fail again
                self._give_up(engine_id, error, final=True)
                break
            else:
                logger.warning("engine %s was replaced and serves again", engine_id)
                self._on_change("replaced")
                return
        self._on_change("given up")

    async def _serve_fresh(self, engine_id: str) -> None:
        """Start a fresh engine, as soon as starts are allowed."""
        while self._held or engine_id in self._away:
            self._may_start.clear()
            await self._may_start.wait()
        self._starting[engine_id] = asyncio.Event()
        self._none_starts.clear()
        try:
            self._serve(await self._fresh(engine_id))
        finally:
            self._starting.pop(engine_id).set()
            if not self._starting:
                self._none_starts.set()

    async def _fresh(self, engine_id: str) -> InferenceEngine:
        start = asyncio.ensure_future(self._engines.replace(engine_id))
        try:
            if not (await asyncio.wait({start}, timeout=START_LIMIT_S))[0]:
                raise EngineDiedError(engine_id, f"a fresh one did not start within {START_LIMIT_S:g} s")
        finally:
            start.cancel()  # a start that hangs is not awaited
        fresh = start.result()
        await self._prepare(fresh)
        return fresh

    def _give_up(self, engine_id: str, error: Exception, *, final: bool = False) -> None:
        self._given_up[engine_id] = error
        if final:
            self.error = error
        elif not self._find_none_left():
            left = len(self._links) - len(self._given_up)
            logger.error(
                "engine %s failed %d times in a row and is given up; %d go on without it", engine_id, MAX_FAILURES, left
            )

    def _find_none_left(self) -> bool:
        """Set `error` if all engines were given up; a group without engines waits for one."""
        if not self._links or not self._given_up.keys() >= self._links.keys():
            return False
        engine_id, error = list(self._given_up.items())[-1]
        self.error = NoEngineError(
            f"no inference engine is left: {engine_id} failed {MAX_FAILURES} times in a row, the last time because: "
            f"{error}"
        )
        return True
