"""Continuous batching in closed form: all steps between two changes of the batch are computed at once.

    waiting ──admit──► prefilling ──last chunk: first token──► decoding ──last token──► finished
       ▲                                                          │
       └──────────────── preempted: cache too full ◄──────────────┘

The rules of each step are those of vLLM's scheduler (V1):

    1. At the boundary between two steps, aborted requests leave.
    2. Each resident request needs room for one more token; while there is not enough, the newest request is preempted:
    its KV cache is freed, its tokens are kept, and it returns to its previous position in the queue.
    3. The step decodes one token of every decoding request. The rest of `max_batched_tokens` is used for prefill: first
       by requests in prefill, then by waiting ones (lowest priority number first, then first come), as long as there is
       a slot, and room for their whole context, their first token, and a token of every other request. No request is
       admitted at a boundary at which one was preempted.
    4. A prefill's last chunk yields the request's first token (for a preempted one: its next).

A step that prefills is one event; consecutive steps that only decode are also a single event: this `StepSpan` ends at
the next finished request or when the KV cache is full, and its duration is a quadratic polynomial (`costs`). Therefore
the simulation of a request takes O(log n) time, independent of its number of tokens.

Invariants:
    - the state is a function of the calls and their times; no clock is read;
    - `begin` is only called between steps, `complete` only at the end of the current span;
    - tokens of resident requests never exceed the capacity.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from roll.simulation.costs import EngineCosts
from roll.simulation.requests import RequestState, SimulatedRequest
from roll.simulation.step_span import StepSpan

__all__ = ["BatchLimits", "BatchTotals", "ContinuousBatch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """Limits of an engine's running batch, as in vLLM."""

    max_num_seqs: int
    """Maximum number of requests."""
    max_batched_tokens: int
    """Maximum number of tokens of one step, decoded and prefilled."""
    kv_capacity: int
    """Maximum number of tokens of resident requests."""

    def __post_init__(self) -> None:
        assert self.max_num_seqs < self.max_batched_tokens, "max_num_seqs must be less than max_batched_tokens"


@dataclass(slots=True)
class BatchTotals:
    """Totals of the work that an engine has done so far."""

    num_steps: int = 0
    busy_s: float = 0.0
    num_generated: int = 0
    num_prefilled: int = 0
    num_preempted: int = 0


class ContinuousBatch:
    """The batch of one engine, scheduled by vLLM's rules (see the module docstring)."""

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
        """Heap of requests by the step of their last token; entries of removed requests remain until that step."""
        self._leaving: list[SimulatedRequest] = []
        self._kv = 0
        """Tokens of resident requests after `totals.num_steps` steps."""
        self._context = 0
        """Tokens of decoding requests."""
        self._span: StepSpan | None = None
        self._held_until = 0.0

    # ---- queries

    @property
    def is_running(self) -> bool:
        """True if a step is in progress."""
        return self._span is not None

    @property
    def num_running(self) -> int:
        """Number of requests that have a slot of the batch."""
        return len(self._resident)

    def iterate_requests(self) -> Iterator[SimulatedRequest]:
        """Yield all requests: first the resident requests, then the others."""
        yield from self._resident
        yield from (request for _, _, request in sorted(self._waiting) if request.state is RequestState.WAITING)

    def count_kv_tokens(self, now: float) -> int:
        """Return the number of tokens in the KV cache at time `now`, over all resident requests."""
        return self._kv + self._num_decoding * self._count_done_steps(now)

    def count_generated(self, request: SimulatedRequest, now: float) -> int:
        """Return the number of tokens that a request has generated in the steps completed by time `now`."""
        if request.state is not RequestState.DECODING:
            return request.num_generated
        return request.num_generated + self.totals.num_steps - request.num_counted_steps + self._count_done_steps(now)

    def count_steps(self, now: float) -> int:
        """Return the number of completed steps, including the completed steps of the current span."""
        return self.totals.num_steps + self._count_done_steps(now)

    def _count_done_steps(self, now: float) -> int:
        """Return the number of steps of the current span that are completed at time `now`.

        A step that prefills is counted, with its tokens, only when it is completed.
        """
        span = self._span
        return 0 if span is None or span.chunks else span.count_done_steps(now)

    def would_admit(self, request: SimulatedRequest) -> bool:
        """Return whether `request` could be admitted at a step boundary now, because it is next in the queue and a slot
        is free.
        """
        head = self._get_next_waiting()
        return head is request and len(self._resident) < self.limits.max_num_seqs

    # ---- requests

    def submit(self, request: SimulatedRequest) -> None:
        """Add a request to the queue; its tokens (`num_prompt + num_output`) must fit into an empty KV cache."""
        assert request.num_prompt + request.num_output <= self.limits.kv_capacity, f"{request} can never fit the cache"
        request.order = self._num_arrived
        self._num_arrived += 1
        self._enqueue(request)

    def remove(self, request: SimulatedRequest, now: float) -> int:
        """Abort a request; it keeps its slot until the current step is done.

        Returns:
            The number of tokens that the request has generated.
        """
        generated = self.count_generated(request, now)
        if request.state is RequestState.WAITING:
            request.state = RequestState.REMOVED
            self.num_waiting -= 1
        elif self._span is None:
            self._release(request)
        else:
            self._leaving.append(request)
        return generated

    def preempt_all(self) -> None:
        """Preempt all resident requests between two steps; they lose their KV cache and are queued by arrival."""
        assert self._span is None, "a step is in progress"
        for request in reversed(list(self._resident)):
            self._preempt(request)

    def pause_until(self, until: float) -> None:
        """Start no step before time `until`."""
        self._held_until = max(self._held_until, until)

    # ---- steps

    def begin(self, now: float) -> float | None:
        """Begin the next span of steps at time `now`; no step may be in progress.

        Returns:
            The time at which the span ends; `None` if there is nothing to do.
        """
        assert self._span is None, "a step is in progress"
        preempted = self._make_room()
        chunks, num_prefilled, pairs = self._compose_prefill(may_admit=not preempted)
        start = max(now, self._held_until)
        if chunks:
            seconds = self.costs.compute_step_s(self._num_decoding, num_prefilled, self._context, pairs, len(chunks))
            self._span = StepSpan(start, seconds, 0.0, 1, chunks)
        elif self._num_decoding:
            first = self.costs.compute_decode_s(self._num_decoding) + self._context * self.costs.context_s
            growth = self._num_decoding * self.costs.context_s
            # after a preemption no request could be admitted at this boundary, but one may be at the next
            num_steps = 1 if preempted else self._count_decode_steps()
            self._span = StepSpan(start, first, growth, num_steps)
        else:
            return None
        return self._span.compute_time(self._span.num_steps)

    def interrupt(self, now: float) -> float:
        """End the current span at the first step boundary at or after time `now`.

        Returns:
            The time of that boundary.
        """
        span = self._span
        assert span is not None, "no step is in progress"
        done = span.count_done_steps(now)
        if done < span.num_steps and span.compute_time(done) < now:
            done += 1
        span.num_steps = min(span.num_steps, done)
        return span.compute_time(span.num_steps)

    def complete(self) -> list[SimulatedRequest]:
        """End the current span: count its work and release finished requests.

        Returns: The requests that have generated all of their tokens, in order of arrival.
        """
        span, self._span = self._span, None
        assert span is not None, "no step is in progress"
        num_steps, totals = span.num_steps, self.totals
        new_tokens = num_steps * self._num_decoding
        self._kv += new_tokens
        self._context += new_tokens
        totals.num_steps += num_steps
        totals.num_generated += new_tokens
        totals.busy_s += span.compute_time(num_steps) - span.start_s
        if num_steps:
            for request, chunk in span.chunks:
                self._complete_chunk(request, chunk)
        for request in self._leaving:
            if request.state is not RequestState.REMOVED:
                self._release(request)
        self._leaving.clear()
        return self._release_finished()

    # ---- internals

    def _release_finished(self) -> list[SimulatedRequest]:
        finished: list[SimulatedRequest] = []
        while self._finish and self._finish[0][0] <= self.totals.num_steps:
            step, _, request = heapq.heappop(self._finish)
            if self._is_due(request, step):
                self._release(request)
                finished.append(request)
        return sorted(finished, key=lambda request: request.order) if len(finished) > 1 else finished

    @staticmethod
    def _is_due(request: SimulatedRequest, step: int) -> bool:
        """Return whether `request` still generates its last token in step `step`; if not, its heap entry is stale."""
        return (
            request.state is RequestState.DECODING
            and request.num_counted_steps + request.num_output - request.num_generated == step
        )

    def _count_decode_steps(self) -> int:
        """Return the number of decoding steps until the first request finishes, or the KV cache is full."""
        while not self._is_due(self._finish[0][2], self._finish[0][0]):
            heapq.heappop(self._finish)
        to_finish = self._finish[0][0] - self.totals.num_steps
        to_full = (self.limits.kv_capacity - self._kv) // self._num_decoding
        return min(to_finish, to_full)

    def _make_room(self) -> bool:
        """Preempt the newest requests until the others have room for a token; return whether any was preempted."""
        preempted = False
        while self._resident and self._kv + len(self._resident) > self.limits.kv_capacity:
            self._preempt(next(reversed(self._resident)))
            self.totals.num_preempted += 1
            preempted = True
        return preempted

    def _compose_prefill(self, *, may_admit: bool) -> tuple[list[tuple[SimulatedRequest, int]], int, float]:
        """Choose the prompt tokens that the next step prefills; with `may_admit`, admit waiting requests to fill the
        step.

        Returns:
            The chunks (requests with numbers of tokens), the number of tokens, and the number of (query, key) pairs.
        """
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
            head = self._get_next_waiting()
            if head is None:
                break
            context = head.num_prompt + head.num_generated
            if self._kv + len(self._resident) + context + 1 > self.limits.kv_capacity:
                break
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            head.state, head.num_to_prefill = RequestState.PREFILLING, context - min(head.num_cached, context - 1)
            self._kv += context
            self._resident[head] = None
            self._prefilling.append(head)
            budget, pairs = self._add_chunk(chunks, head, budget, pairs)
        return chunks, room - budget, pairs

    @staticmethod
    def _add_chunk(
        chunks: list[tuple[SimulatedRequest, int]], request: SimulatedRequest, budget: int, pairs: float
    ) -> tuple[int, float]:
        chunk = min(request.num_to_prefill, budget)
        before = request.num_prompt + request.num_generated - request.num_to_prefill
        chunks.append((request, chunk))
        return budget - chunk, pairs + chunk * (before + chunk / 2)

    def _complete_chunk(self, request: SimulatedRequest, chunk: int) -> None:
        request.num_to_prefill -= chunk
        self.totals.num_prefilled += chunk
        if request.num_to_prefill:
            return
        self._prefilling.remove(request)
        request.state = RequestState.DECODING
        request.num_generated += 1
        request.num_counted_steps = self.totals.num_steps
        self.totals.num_generated += 1
        self._kv += 1
        self._context += request.num_prompt + request.num_generated
        self._num_decoding += 1
        last = request.num_counted_steps + request.num_output - request.num_generated
        heapq.heappush(self._finish, (last, request.order, request))

    def _preempt(self, request: SimulatedRequest) -> None:
        self._release(request)
        self._enqueue(request)

    def _release(self, request: SimulatedRequest) -> None:
        """Remove a resident request from the batch, between two steps, and update the token counts."""
        if request.state is RequestState.DECODING:
            request.num_generated += self.totals.num_steps - request.num_counted_steps
            self._context -= request.num_prompt + request.num_generated
            self._num_decoding -= 1
        else:
            self._prefilling.remove(request)
        self._kv -= request.num_prompt + request.num_generated
        del self._resident[request]
        request.state = RequestState.REMOVED

    def _enqueue(self, request: SimulatedRequest) -> None:
        request.state = RequestState.WAITING
        heapq.heappush(self._waiting, (request.priority, request.order, request))
        self.num_waiting += 1

    def _get_next_waiting(self) -> SimulatedRequest | None:
        while self._waiting and self._waiting[0][2].state is not RequestState.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None
