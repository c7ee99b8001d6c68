"""Routing of requests to the least loaded engine that has room.

Load is the share of an engine's slots that hold outstanding requests (counted here, hence exact), then the KV cache use
that the engine reports. Engines may have different numbers of slots. An engine has room while it runs fewer requests
than its capacity and its KV cache is not too full; so requests wait here, where any engine that becomes free takes
them, and not in the queue of a busy engine.

Choosing costs O(log engines): engines are in a heap by load, in which outdated entries are skipped.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, TypeAlias

from roll.protocols import InferenceEngine

__all__ = ["Router", "RoutingPolicy"]

RoutingPolicy: TypeAlias = Literal["least_loaded", "round_robin"]

REMEMBERED = 65_536
"""Number of sessions whose engine is remembered."""
CANDIDATES = 2
"""Number of least loaded engines whose KV cache use is compared."""


@dataclass(slots=True)
class _Slot:
    engine: InferenceEngine
    order: int
    limit: int
    """Largest number of concurrent requests, the engine's capacity; more would wait while another engine is free."""
    num_requests: int = 0
    serving: bool = True

    @property
    def load(self) -> float:
        """Share of the engine's slots that are taken; correctly rounded, so equal shares are equal numbers."""
        return self.num_requests / self.limit


class Router:
    """Tracks the engines and their loads, and routes requests.

    Args:
        policy: `least_loaded`, or `round_robin`: in turn among engines with room, whatever their load (a baseline).
        max_kv_used: KV cache use above which an engine has no room while it runs any request.
    """

    def __init__(self, policy: RoutingPolicy = "least_loaded", max_kv_used: float = 0.95) -> None:
        self._policy = policy
        self._max_kv_used = max_kv_used
        self._slots: dict[str, _Slot] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._turn = self._num_added = 0
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    def add(self, engine: InferenceEngine) -> None:
        """Add an engine that serves from now on; one with the same id is replaced."""
        known = self._slots.get(engine.engine_id)
        limit = max(1, engine.load().capacity)
        order = known.order if known else self._num_added
        self._num_added += known is None
        self._slots[engine.engine_id] = _Slot(engine, order, limit, known.num_requests if known else 0)
        self._push(engine.engine_id)

    def remove(self, engine_id: str) -> None:
        """Route no request to an engine until it is added again."""
        self._slots[engine_id].serving = False

    def forget(self, engine_id: str) -> None:
        """Remove an engine permanently; it must not have any requests."""
        assert not self._slots[engine_id].num_requests, f"engine {engine_id} has requests"
        del self._slots[engine_id]

    def when_idle(self, engine_id: str) -> asyncio.Future[None]:
        """Return a future that is done once an engine has no request."""
        idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._slots[engine_id].num_requests:
            self._waiting.setdefault(engine_id, []).append(idle)
        else:
            idle.set_result(None)
        return idle

    def take(self, session: str = "", pinned: bool = False) -> InferenceEngine | None:
        """Choose an engine and count the request; return `None` if no engine has room.

        Args:
            session: Session id; requests of one session prefer the engine that has their prefix in its prefix cache.
            pinned: Whether requests of the session go only to that engine, even if another one is free.
        """
        slot = self._session_engine(session, pinned)
        if slot is None:
            known = self._known(session) if pinned else None
            slot = (
                None if known else (self._pick_round_robin() if self._policy == "round_robin" else self._least_loaded())
            )
        if slot is None:
            return None
        slot.num_requests += 1
        engine_id = slot.engine.engine_id
        self._push(engine_id)
        if session:
            self._sessions[session] = engine_id
            self._sessions.move_to_end(session)
            if len(self._sessions) > REMEMBERED:
                self._sessions.popitem(last=False)
        return slot.engine

    def give_back(self, engine_id: str) -> None:
        """Release the slot of a request that has left an engine."""
        slot = self._slots[engine_id]
        slot.num_requests -= 1
        assert slot.num_requests >= 0, f"engine {engine_id} gave back more requests than it got"
        self._push(engine_id)
        if not slot.num_requests:
            for idle in self._waiting.pop(engine_id, ()):
                if not idle.done():
                    idle.set_result(None)

    def num_requests(self, engine_id: str) -> int:
        """Return the number of requests that an engine has."""
        return self._slots[engine_id].num_requests

    @property
    def serving(self) -> list[InferenceEngine]:
        """Engines that may get requests, in the order in which they were first added."""
        return [slot.engine for slot in sorted(self._slots.values(), key=lambda slot: slot.order) if slot.serving]

    def _push(self, engine_id: str) -> None:
        slot = self._slots[engine_id]
        if slot.serving:
            heapq.heappush(self._heap, (slot.load, slot.order, engine_id))
        if len(self._heap) > 64 + 8 * len(self._slots):
            current = [(s.load, s.order, name) for name, s in self._slots.items() if s.serving]
            heapq.heapify(current)
            self._heap = current

    def _has_room(self, slot: _Slot) -> bool:
        if slot.num_requests == 0:
            return True
        return slot.num_requests < slot.limit and slot.engine.load().kv_used <= self._max_kv_used

    def _known(self, session: str) -> _Slot | None:
        slot = self._slots.get(self._sessions.get(session, "")) if session else None
        return slot if slot is not None and slot.serving else None

    def _session_engine(self, session: str, pinned: bool) -> _Slot | None:
        """Return the session's engine, unless it is full, or so much busier than the least loaded that a cache miss
        costs less.
        """
        slot = self._known(session)
        if slot is None or not self._has_room(slot):
            return None
        least = self._pick_least_loaded()
        if not pinned and least is not None:
            spared = max(1, slot.limit // 8)  # slots
            if (slot.num_requests - spared) * least.limit > least.num_requests * slot.limit:
                return None
        return slot

    def _pick_least_loaded(self) -> _Slot | None:
        """Return the least loaded engine; ties go to the first."""
        while self._heap:
            load, _, engine_id = self._heap[0]
            slot = self._slots.get(engine_id)
            if slot is not None and slot.serving and slot.load == load:
                return slot
            heapq.heappop(self._heap)
        return None

    def _least_loaded(self) -> _Slot | None:
        found: list[_Slot] = []
        popped: list[tuple[float, int, str]] = []
        while len(found) < CANDIDATES and (slot := self._pick_least_loaded()) is not None:
            popped.append(heapq.heappop(self._heap))
            if all(slot is not other for other in found):
                if found and slot.load > found[0].load:
                    break
                found.append(slot)
        for entry in popped:
            heapq.heappush(self._heap, entry)
        with_room = [slot for slot in found if self._has_room(slot)]
        if with_room:
            return min(with_room, key=lambda slot: (slot.engine.load().kv_used, slot.order))
        if found and found[0].num_requests >= found[0].limit:
            return None  # the least loaded engine has no free slot, so no engine has one
        slots = (slot for slot in self._slots.values() if slot.serving and self._has_room(slot))
        return min(slots, key=lambda slot: (slot.load, slot.order), default=None)

    def _pick_round_robin(self) -> _Slot | None:
        """Return the next engine in turn that has room."""
        serving = sorted((slot for slot in self._slots.values() if slot.serving), key=lambda slot: slot.order)
        for passed in range(len(serving)):
            slot = serving[(self._turn + passed) % len(serving)]
            if self._has_room(slot):
                self._turn += passed + 1
                return slot
        return None
