"""Continuous batching in closed form: the steps between two changes of a batch are computed at once, not one by one.

    waiting ──admit──► prefilling ──last chunk: first token──► decoding ──last token──► finished
       ▲                                                          │
       └──────────────── preempted: cache too full ◄──────────────┘

The rules are those of vLLM's scheduler (V1), one step after the other:

    1. At the boundary between two steps, aborted requests leave.
    2. Each resident request needs room for one more token; while there is not enough, the one admitted last is
       preempted: it loses its KV cache, keeps its tokens, and waits at its old place in the queue.
    3. The step decodes one token of every decoding request. The rest of `max_batched_tokens` is used for prefill: first
       by requests in prefill, then by waiting ones (lowest priority number first, then first come), as long as there is
       a slot, and room for their whole context, their first token, and a token of every other request. No request is
       admitted at a boundary at which one was preempted.
    4. A prefill's last chunk yields the request's first token (for a preempted one: its next).

A step that prefills is one event; a stretch of steps that only decode is also one event, whatever its length: it ends
at the next finished request or when the KV cache is full, and its duration is a quadratic polynomial (`costs`). So the
work for a request is O(log n), whatever its number of tokens.

Invariants:
    - the state is a function of the calls and their times; no clock is read;
    - `begin` is only called between steps, `complete` only at the end of the current stretch;
    - tokens of resident requests never exceed the capacity.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from roll.simulation.costs import EngineCosts
from roll.simulation.requests import Place, SimulatedRequest
from roll.simulation.stretch import StepSpan

__all__ = ["BatchLimits", "BatchTotals", "ContinuousBatch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """Limits of an engine's batch."""

    max_num_seqs: int
    """Maximum number of requests."""
    max_batched_tokens: int
    """Maximum number of tokens of one step, decoded and prefilled."""
    kv_capacity: int
    """Maximum number of tokens of resident requests."""

    def __post_init__(self) -> None:
        assert self.max_num_seqs < self.max_batched_tokens, "decoding would leave no room to prefill"


@dataclass(slots=True)
class BatchTotals:
    """Counts of the work that a batch has done so far."""

    num_steps: int = 0
    busy_s: float = 0.0
    num_generated: int = 0
    num_prefilled: int = 0
    num_preempted: int = 0


class ContinuousBatch:
    """The batch of one engine; see the module's docstring."""

    def __init__(self, costs: EngineCosts, limits: BatchLimits) -> None:
        self.costs = costs
        self.limits = limits
        self.totals = BatchTotals()
        self._num_arrived = 0
        self._waiting: list[tuple[int, int, SimulatedRequest]] = []
        self.num_waiting = 0
        """Number of requests that wait for a slot of the batch."""
        self._resident: dict[SimulatedRequest, None] = {}
        """Resident requests, in order of admission."""
        self._prefilling: list[SimulatedRequest] = []
        self._num_decoding = 0
        self._finish: list[tuple[int, int, SimulatedRequest]] = []
        """Requests by the step of their last token; entries of requests that left remain until that step."""
        self._leaving: list[SimulatedRequest] = []
        self._kv = 0
        """Tokens of resident requests after `totals.num_steps` steps."""
        self._context = 0
        """Tokens of decoding requests."""
        self._stretch: StepSpan | None = None
        self._held_until = 0.0

    # ---- queries

    @property
    def is_running(self) -> bool:
        """Whether a step is in progress."""
        return self._stretch is not None

    @property
    def num_running(self) -> int:
        """Number of requests that have a slot of the batch."""
        return len(self._resident)

    def requests(self) -> Iterator[SimulatedRequest]:
        """Yield all requests, resident ones first."""
        yield from self._resident
        yield from (request for _, _, request in sorted(self._waiting) if request.place is Place.WAITING)

    def kv_used(self, now: float) -> int:
        """Return the number of tokens of resident requests at time `now`."""
        return self._kv + self._num_decoding * self._done_by(now)

    def generated(self, request: SimulatedRequest, now: float) -> int:
        """Return how many tokens a request has at time `now`, counting only completed steps."""
        if request.place is not Place.DECODING:
            return request.generated
        return request.generated + self.totals.num_steps - request.since + self._done_by(now)

    def num_steps(self, now: float) -> int:
        """Return the number of completed steps, including those of the current stretch."""
        return self.totals.num_steps + self._done_by(now)

    def _done_by(self, now: float) -> int:
        """Return how many steps of the current stretch are done.

        A step that prefills is counted, with its tokens, only when it is completed.
        """
        stretch = self._stretch
        return 0 if stretch is None or stretch.chunks else stretch.done_by(now)

    def would_admit(self, request: SimulatedRequest) -> bool:
        """Return whether a step boundary now might admit this waiting request: it is next, and a slot is free."""
        head = self._waiting_head()
        return head is request and len(self._resident) < self.limits.max_num_seqs

    # ---- requests

    def submit(self, request: SimulatedRequest) -> None:
        """Add a request to the queue; it must fit into the KV cache by itself (`num_prompt + num_wanted`)."""
        assert request.num_prompt + request.num_wanted <= self.limits.kv_capacity, f"{request} can never fit the cache"
        request.order = self._num_arrived
        self._num_arrived += 1
        self._enqueue(request)

    def remove(self, request: SimulatedRequest, now: float) -> int:
        """Abort a request; it keeps its slot until the current step is done.

        Returns:
            The number of tokens that the request has.
        """
        generated = self.generated(request, now)
        if request.place is Place.WAITING:
            request.place = Place.GONE
            self.num_waiting -= 1
        elif self._stretch is None:
            self._release(request)
        else:
            self._leaving.append(request)
        return generated

    def preempt_all(self) -> None:
        """Preempt every resident request between two steps; each loses its KV cache and keeps its place in line."""
        assert self._stretch is None, "a step is under way"
        for request in reversed(list(self._resident)):
            self._preempt(request)

    def pause_until(self, until: float) -> None:
        """Start no step before time `until`."""
        self._held_until = max(self._held_until, until)

    # ---- steps

    def begin(self, now: float) -> float | None:
        """Compose the next stretch, between two steps.

        Returns:
            The end of the stretch; `None` if there is nothing to do.
        """
        assert self._stretch is None, "a step is under way"
        preempted = self._make_room()
        chunks, num_prefilled, pairs = self._prefill(may_admit=not preempted)
        start = max(now, self._held_until)
        if chunks:
            seconds = self.costs.step_s(self._num_decoding, num_prefilled, self._context, pairs, len(chunks))
            self._stretch = StepSpan(start, seconds, 0.0, 1, chunks)
        elif self._num_decoding:
            first = self.costs.decode_s(self._num_decoding) + self._context * self.costs.context_s
            growth = self._num_decoding * self.costs.context_s
            # after a preemption no request could be admitted at this boundary, but one may be at the next
            num_steps = 1 if preempted else self._num_decode_steps()
            self._stretch = StepSpan(start, first, growth, num_steps)
        else:
            return None
        return self._stretch.time_of(self._stretch.num_steps)

    def interrupt(self, now: float) -> float:
        """End the stretch at the first boundary from now on.

        Returns:
            The time of that boundary.
        """
        stretch = self._stretch
        assert stretch is not None, "nothing is under way"
        done = stretch.done_by(now)
        if done < stretch.num_steps and stretch.time_of(done) < now:
            done += 1
        stretch.num_steps = min(stretch.num_steps, done)
        return stretch.time_of(stretch.num_steps)

    def complete(self) -> list[SimulatedRequest]:
        """Complete the current stretch.

        Returns:
            The requests that finished with it, in order of arrival.
        """
        stretch, self._stretch = self._stretch, None
        assert stretch is not None, "nothing is under way"
        num_steps, totals = stretch.num_steps, self.totals
        new_tokens = num_steps * self._num_decoding
        self._kv += new_tokens
        self._context += new_tokens
        totals.num_steps += num_steps
        totals.num_generated += new_tokens
        totals.busy_s += stretch.time_of(num_steps) - stretch.start_s
        if num_steps:
            for request, chunk in stretch.chunks:
                self._prefilled(request, chunk)
        for request in self._leaving:
            if request.place is not Place.GONE:
                self._release(request)
        self._leaving.clear()
        return self._finished()

    # ---- internals

    def _finished(self) -> list[SimulatedRequest]:
        finished: list[SimulatedRequest] = []
        while self._finish and self._finish[0][0] <= self.totals.num_steps:
            step, _, request = heapq.heappop(self._finish)
            if self._is_due(request, step):
                self._release(request)
                finished.append(request)
        return sorted(finished, key=lambda request: request.order) if len(finished) > 1 else finished

    @staticmethod
    def _is_due(request: SimulatedRequest, step: int) -> bool:
        """Return whether an entry of `_finish` is still valid."""
        return request.place is Place.DECODING and request.since + request.num_wanted - request.generated == step

    def _num_decode_steps(self) -> int:
        """Return the number of decoding steps until a request finishes or the KV cache is full."""
        while not self._is_due(self._finish[0][2], self._finish[0][0]):
            heapq.heappop(self._finish)
        to_finish = self._finish[0][0] - self.totals.num_steps
        to_full = (self.limits.kv_capacity - self._kv) // self._num_decoding
        return min(to_finish, to_full)

    def _make_room(self) -> bool:
        """Preempt requests until each resident request has room for one token; return whether any was preempted."""
        preempted = False
        while self._resident and self._kv + len(self._resident) > self.limits.kv_capacity:
            self._preempt(next(reversed(self._resident)))
            self.totals.num_preempted += 1
            preempted = True
        return preempted

    def _prefill(self, *, may_admit: bool) -> tuple[list[tuple[SimulatedRequest, int]], int, float]:
        """Admit waiting requests; return the next step's prefill chunks, their tokens and their (query, key) pairs."""
        if not self._prefilling and not (may_admit and self.num_waiting):
            return [], 0, 0.0
        chunks: list[tuple[SimulatedRequest, int]] = []
        pairs = 0.0
        room = self.limits.max_batched_tokens - self._num_decoding
        budget = room
        for request in self._prefilling:
            if budget <= 0:
                break
            budget, pairs = self._add_chunk(chunks, request, budget, pairs)
        while may_admit and budget > 0 and len(self._resident) < self.limits.max_num_seqs:
            head = self._waiting_head()
            if head is None:
                break
            context = head.num_prompt + head.generated
            if self._kv + len(self._resident) + context + 1 > self.limits.kv_capacity:
                break
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            head.place, head.to_prefill = Place.PREFILLING, context - min(head.num_cached, context - 1)
            self._kv += context
            self._resident[head] = None
            self._prefilling.append(head)
            budget, pairs = self._add_chunk(chunks, head, budget, pairs)
        return chunks, room - budget, pairs

    @staticmethod
    def _add_chunk(
        chunks: list[tuple[SimulatedRequest, int]], request: SimulatedRequest, budget: int, pairs: float
    ) -> tuple[int, float]:
        chunk = min(request.to_prefill, budget)
        before = request.num_prompt + request.generated - request.to_prefill
        chunks.append((request, chunk))
        return budget - chunk, pairs + chunk * (before + chunk / 2)

    def _prefilled(self, request: SimulatedRequest, chunk: int) -> None:
        request.to_prefill -= chunk
        self.totals.num_prefilled += chunk
        if request.to_prefill:
            return
        self._prefilling.remove(request)
        request.place = Place.DECODING
        request.generated += 1
        request.since = self.totals.num_steps
        self.totals.num_generated += 1
        self._kv += 1
        self._context += request.num_prompt + request.generated
        self._num_decoding += 1
        last = request.since + request.num_wanted - request.generated
        heapq.heappush(self._finish, (last, request.order, request))

    def _preempt(self, request: SimulatedRequest) -> None:
        self._release(request)
        self._enqueue(request)

    def _release(self, request: SimulatedRequest) -> None:
        """Remove a request between two steps, with its tokens counted."""
        if request.place is Place.DECODING:
            request.generated += self.totals.num_steps - request.since
            self._context -= request.num_prompt + request.generated
            self._num_decoding -= 1
        else:
            self._prefilling.remove(request)
        self._kv -= request.num_prompt + request.generated
        del self._resident[request]
        request.place = Place.GONE

    def _enqueue(self, request: SimulatedRequest) -> None:
        request.place = Place.WAITING
        heapq.heappush(self._waiting, (request.priority, request.order, request))
        self.num_waiting += 1

    def _waiting_head(self) -> SimulatedRequest | None:
        while self._waiting and self._waiting[0][2].place is not Place.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None
