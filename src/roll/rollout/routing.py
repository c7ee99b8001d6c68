"""Routing of requests to the least loaded engine that has room.

The load of an engine is its predicted time per token, from the share of its slots in use, which the router counts, and
from the pace curve that was measured (`pace`): its requests divided by the tokens per second that it generates for all
of them. Idle engines come first, so even a slow engine gets requests. The KV cache use that the engine reports breaks
ties. Engines may have different numbers of slots. An engine has room while it runs fewer requests than its capacity and
its KV cache is not too full. So requests wait here for any engine that becomes free, instead of in the queue of a busy
engine.

Choosing an engine takes O(log engines): engines are in a heap by load, in which outdated entries are skipped.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from roll.protocols import InferenceEngine
from roll.rollout.device_classes import ClassSelector, DeviceClasses
from roll.rollout.pace import UNMEASURED, AnswerLatency, PaceCurve, PaceMeter

__all__ = ["Route", "Router", "RoutingPolicy"]

RoutingPolicy: TypeAlias = Literal["measured_pace", "least_loaded", "round_robin"]
Load: TypeAlias = tuple[int, float]
"""`IDLE`, `BUSY` or `FULL`, and the predicted time per token; the engine with the smallest load is chosen."""
IDLE, BUSY, FULL = range(3)

MAX_SESSIONS = 65_536
"""Maximum number of sessions whose engines are remembered."""
MAX_CANDIDATES = 2
"""Maximum number of equally loaded engines whose KV cache use is compared."""
MIN_NEW_ANSWERS = 4
"""Minimum number of answers after which pace curves are estimated again; with more engines, one answer per engine."""


class Route(NamedTuple):
    """The properties of a request by which the router chooses an engine; see `Router.acquire_slot`."""

    session: str = ""
    pinned: bool = False
    domain: str = ""


@dataclass(slots=True)
class _EngineEntry:
    """An engine, and the number of its slots in use."""

    engine: InferenceEngine
    order: int
    limit: int
    """The engine's capacity: the maximum number of concurrent requests that are routed to it."""
    device_class: str = ""
    num_requests: int = 0
    is_serving: bool = True
    curve: PaceCurve = UNMEASURED

    @property
    def load(self) -> Load:
        """Load of the engine; with the same curve, equal shares of slots, such as 1/2 and 2/4, are equal loads."""
        return self.compute_load(self.num_requests)

    def compute_load(self, num_requests: int) -> Load:
        """Return the load that the engine would have with this number of requests."""
        state = IDLE if num_requests <= 0 else BUSY if num_requests < self.limit else FULL
        return state, self.curve.compute_token_s(num_requests / self.limit)


class Router:
    """Tracks the engines and their loads, and routes requests.

    Args:
        policy: `measured_pace`; `least_loaded`, which assumes that all engines are equally fast; or the baseline
            `round_robin`, which ignores the load of engines.
        max_kv_used: KV cache use above which an engine gets no further requests while it runs any.
        device_classes: Device classes of the engines; `round_robin` ignores them.
    """

    def __init__(
        self,
        policy: RoutingPolicy = "measured_pace",
        max_kv_used: float = 0.95,
        device_classes: DeviceClasses | None = None,
    ) -> None:
        self._policy = policy
        self._max_kv_used = max_kv_used
        self._entries: dict[str, _EngineEntry] = {}
        self._classes = ClassSelector(device_classes or DeviceClasses())
        self._heaps: dict[str, list[tuple[Load, int, str]]] = {"": []}
        """Engines by load, for each device class."""
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._turn = self._num_added = 0
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._pace_meter = PaceMeter()
        self._num_new_answers = 0

    def add(self, engine: InferenceEngine) -> None:
        """Add an engine, which serves from now on; it replaces an engine with the same id."""
        known = self._entries.get(engine.engine_id)
        limit = max(1, engine.load().capacity)
        order = known.order if known else self._num_added
        self._num_added += known is None
        device_class = self._classes.get_class(engine.engine_id)
        entry = _EngineEntry(engine, order, limit, device_class, known.num_requests if known else 0)
        self._entries[engine.engine_id] = entry
        self._heaps.setdefault(device_class, [])
        self._classes.set_capacity(device_class, limit)
        if known is not None and known.engine is engine:
            entry.curve = known.curve
        else:  # a replacement may run on another device
            self._pace_meter.add(engine.engine_id)
            if self._policy == "measured_pace":
                self._update_curves()
        self._push(engine.engine_id)

    def disable(self, engine_id: str) -> None:
        """Stop routing requests to an engine until it is added again."""
        self._entries[engine_id].is_serving = False

    def remove(self, engine_id: str) -> None:
        """Remove an engine permanently; it must not have any requests."""
        assert not self._entries[engine_id].num_requests, f"engine '{engine_id}' has requests"
        del self._entries[engine_id]
        self._pace_meter.remove(engine_id)

    def record_latency(self, engine_id: str, answer: AnswerLatency) -> None:
        """Record the time that an engine took for an answer, from which its pace is measured."""
        entry = self._entries.get(engine_id)
        if entry is None:
            return
        self._classes.record(entry.device_class, answer)
        self._pace_meter.record(engine_id, answer, entry.limit)
        if self._policy != "measured_pace":
            return
        self._num_new_answers += 1
        if self._num_new_answers >= max(MIN_NEW_ANSWERS, len(self._entries)):
            self._update_curves()

    def estimate_fleet_curve(self) -> PaceCurve | None:
        """Return the pace curve of all engines together; `None` if there are no answers."""
        return self._pace_meter.estimate_fleet_curve()

    def get_idle_future(self, engine_id: str) -> asyncio.Future[None]:
        """Return a future that is done when the engine has no requests."""
        idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._entries[engine_id].num_requests:
            self._waiting.setdefault(engine_id, []).append(idle)
        else:
            idle.set_result(None)
        return idle

    def acquire_slot(self, session: str = "", pinned: bool = False, domain: str = "") -> InferenceEngine | None:
        """Choose an engine for a request, and occupy one of its slots; return `None` if no engine has room.

        Args:
            session: Session id; requests of one session prefer the engine that has their prefix in its prefix cache.
            pinned: Whether requests of the session go only to the engine that it used last, even if others are free.
            domain: Domain of the request's prompt, which may prefer a device class.
        """
        entry = self._find_session_engine(session, pinned)
        if entry is None:
            # A pinned session waits for its engine while that engine serves.
            known = self._find_known_engine(session) if pinned else None
            entry = (
                None
                if known
                else (self._pick_round_robin() if self._policy == "round_robin" else self._find_by_class(domain))
            )
        if entry is None:
            return None
        entry.num_requests += 1
        self._classes.count_request(domain)
        engine_id = entry.engine.engine_id
        self._push(engine_id)
        if session:
            self._sessions[session] = engine_id
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return entry.engine

    def release_slot(self, engine_id: str) -> None:
        """Free the slot of a request that has left an engine."""
        entry = self._entries[engine_id]
        entry.num_requests -= 1
        assert entry.num_requests >= 0, f"engine '{engine_id}' released more slots than were acquired"
        self._push(engine_id)
        if not entry.num_requests:
            for idle in self._waiting.pop(engine_id, ()):
                if not idle.done():
                    idle.set_result(None)

    def count_requests(self, engine_id: str) -> int:
        """Return the number of requests that an engine has."""
        return self._entries[engine_id].num_requests

    @property
    def serving_engines(self) -> list[InferenceEngine]:
        """Engines that may get requests, in the order in which they were first added."""
        return [
            entry.engine for entry in sorted(self._entries.values(), key=lambda entry: entry.order) if entry.is_serving
        ]

    def _push(self, engine_id: str) -> None:
        entry = self._entries[engine_id]
        heap = self._heaps[entry.device_class]
        if entry.is_serving:
            heapq.heappush(heap, (entry.load, entry.order, engine_id))
        if len(heap) > 64 + 8 * len(self._entries):  # outdated entries below the top are never popped
            self._rebuild_heaps()

    def _rebuild_heaps(self) -> None:
        for heap in self._heaps.values():
            heap.clear()
        for name, entry in self._entries.items():
            if entry.is_serving:
                self._heaps[entry.device_class].append((entry.load, entry.order, name))
        for heap in self._heaps.values():
            heapq.heapify(heap)

    def _update_curves(self) -> None:
        """Estimate the pace curves of all engines again."""
        self._num_new_answers = 0
        curves, has_changed = self._pace_meter.estimate_curves(), False
        for name, entry in self._entries.items():
            has_changed |= entry.curve != curves[name]
            entry.curve = curves[name]
        if has_changed:
            self._rebuild_heaps()

    def _has_capacity(self, entry: _EngineEntry) -> bool:
        if entry.num_requests == 0:
            return True
        return entry.num_requests < entry.limit and entry.engine.load().kv_used <= self._max_kv_used

    def _find_known_engine(self, session: str) -> _EngineEntry | None:
        entry = self._entries.get(self._sessions.get(session, "")) if session else None
        return entry if entry is not None and entry.is_serving else None

    def _find_session_engine(self, session: str, pinned: bool) -> _EngineEntry | None:
        """Return the engine that the session used last; `None` if there is none, or if it has no room.

        If `pinned` is False, also return `None` if the engine is much busier than the least loaded engine of its device
        class, because a prefix cache miss then costs less than waiting.
        """
        entry = self._find_known_engine(session)
        if entry is None or not self._has_capacity(entry):
            return None
        least = self._pick_least_loaded([entry.device_class])
        if not pinned and least is not None:
            # A cached prefix outweighs this difference in load, in slots.
            spared = max(1, entry.limit // 8)
            if entry.compute_load(entry.num_requests - spared) > least.load:
                return None
        return entry

    def _pick_least_loaded(self, classes: Collection[str]) -> _EngineEntry | None:
        """Return the least loaded serving engine of some device classes, or the first one if several are equally
        loaded; `None` if none serves.
        """
        found: _EngineEntry | None = None
        for name in classes:
            entry = self._get_top(self._heaps.get(name, []))
            if entry is not None and (found is None or (entry.load, entry.order) < (found.load, found.order)):
                found = entry
        return found

    def _get_top(self, heap: list[tuple[Load, int, str]]) -> _EngineEntry | None:
        """Remove outdated entries from the top of a heap, and return the engine at the top."""
        while heap:
            load, _, engine_id = heap[0]
            entry = self._entries.get(engine_id)
            if entry is not None and entry.is_serving and entry.load == load:
                return entry
            heapq.heappop(heap)
        return None

    def _find_by_class(self, domain: str) -> _EngineEntry | None:
        """Return the least loaded engine with room in the first group of device classes that has one."""
        for classes in self._classes.choose_order(domain) or [self._heaps]:
            entry = self._find_least_loaded(classes)
            if entry is not None:
                return entry
        return None

    def _find_least_loaded(self, classes: Collection[str]) -> _EngineEntry | None:
        """Return the least loaded engine of some device classes with room; `None` if no engine has room.

        Of up to `MAX_CANDIDATES` equally loaded engines, the one with the most free KV cache is chosen.
        """
        found: list[_EngineEntry] = []
        popped: list[tuple[Load, int, str]] = []
        while len(found) < MAX_CANDIDATES and (entry := self._pick_least_loaded(classes)) is not None:
            popped.append(heapq.heappop(self._heaps[entry.device_class]))
            if all(entry is not other for other in found):
                if found and entry.load > found[0].load:
                    break
                found.append(entry)
        for item in popped:
            heapq.heappush(self._heaps[self._entries[item[2]].device_class], item)
        with_room = [entry for entry in found if self._has_capacity(entry)]
        if with_room:
            return min(with_room, key=lambda entry: (entry.engine.load().kv_used, entry.order))
        if found and found[0].load[0] == FULL:
            return None  # the least loaded engine has no free slot, so no other engine has one
        candidates = (
            entry
            for entry in self._entries.values()
            if entry.is_serving and entry.device_class in classes and self._has_capacity(entry)
        )
        return min(candidates, key=lambda entry: (entry.load, entry.order), default=None)

    def _pick_round_robin(self) -> _EngineEntry | None:
        """Return the next engine with room, in round-robin order."""
        is_serving = sorted(
            (entry for entry in self._entries.values() if entry.is_serving), key=lambda entry: entry.order
        )
        for passed in range(len(is_serving)):
            entry = is_serving[(self._turn + passed) % len(is_serving)]
            if self._has_capacity(entry):
                self._turn += passed + 1
                return entry
        return None
