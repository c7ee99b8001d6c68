"""A simulated inference engine that implements `InferenceEngine`.

    generate ─► ContinuousBatch ─► timer at the end of its span ─► finished ─► futures
                    ▲
     abort, pause, update_weights, stall, death: the span of steps ends at the next boundary between two steps

All changes at the same time are handled together, when no other callback is ready (`call_when_idle`), so a batch
contains all requests that arrived by then, in order.

Invariants:
    - every `generate` ends with one `Generation` or one error;
    - a request's tokens depend only on the request: id 0 for every generated token, as many as `answer_tokens` returns;
    - each token has the policy version of the weights that generated it; weights change between two steps;
    - a paused engine begins no step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import cast

from roll.errors import EngineDiedError, UserError, WeightSyncError
from roll.protocols import PauseMode
from roll.simulation.arrays import build_generation, build_zero_logprobs
from roll.simulation.batch import BatchLimits, BatchTotals, ContinuousBatch
from roll.simulation.clock import VirtualTimeLoop
from roll.simulation.costs import EngineCosts
from roll.simulation.prefixes import PrefixCache
from roll.simulation.requests import SimulatedRequest
from roll.types import (
    EngineLoad,
    FinishReason,
    FloatArray,
    Generation,
    GenerationRequest,
    IntArray,
    SequenceMedia,
    WeightReceipt,
    WeightUpdate,
)

__all__ = ["AnswerTokens", "EngineSettings", "SimulatedEngine"]

AnswerTokens = Callable[[GenerationRequest], int]
"""Returns how many tokens an engine would generate for a request without interruption: at least 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Settings that all engines of a simulation share."""

    costs: EngineCosts
    limits: BatchLimits
    update_s: float = 0.0
    """Duration of a weight update, in seconds."""
    recompute_on_update: bool = True
    """True if running requests are prefilled again after a weight update (as in ROLL's vLLM engine)."""
    prefix_block: int = 0
    """Tokens of a prefix cache block; 0 disables the prefix cache."""
    start_s: float = 0.0
    """Time to start an engine, the first one or a replacement."""


@dataclass(slots=True, eq=False)
class _LiveRequest:
    """A request of an engine, with its future and the policy versions of its tokens."""

    simulated: SimulatedRequest
    future: asyncio.Future[Generation]
    finish_reason: FinishReason
    runs: list[tuple[int, int]] = field(default_factory=list)
    """(policy version, number of tokens), for versions before the current one."""

    @property
    def num_old_tokens(self) -> int:
        """Number of tokens that earlier policy versions generated."""
        return sum(count for _, count in self.runs)

    def build_generation(self, num_tokens: int, reason: FinishReason, engine: SimulatedEngine) -> Generation:
        """Return the generation of the first `num_tokens` tokens by an engine, with its current policy version."""
        fresh = num_tokens - self.num_old_tokens
        runs = [*self.runs, (engine.policy_version, fresh)] if fresh or not self.runs else self.runs
        return build_generation(self.simulated.request_id, runs, reason, engine.engine_id)


class SimulatedEngine:
    """A simulated `roll.protocols.InferenceEngine`; the module docstring lists its guarantees.

    Args:
        engine_id: Id of the engine.
        settings: Costs and limits of the engine.
        answer_tokens: Returns the number of tokens of an answer.
    """

    def __init__(self, engine_id: str, settings: EngineSettings, answer_tokens: AnswerTokens) -> None:
        self.engine_id = engine_id
        self.settings = settings
        self.policy_version = 0
        self._count_answer_tokens = answer_tokens
        self._batch = ContinuousBatch(settings.costs, settings.limits)
        self._prefixes = PrefixCache(settings.prefix_block)
        self._live: dict[str, _LiveRequest] = {}
        self._held: list[_LiveRequest] = []
        """Requests that arrived while the engine was draining."""
        self._timer: asyncio.TimerHandle | None = None
        self._plan_is_due = self._paused = self._draining = False
        self._unsynced = ""
        """Reason why the engine has no current weights; empty if it has them."""
        self._at_rest: list[asyncio.Future[None]] = []
        self._update_lock = asyncio.Lock()
        self._death = ""

    # ---- life cycle

    async def start(self) -> None:
        """Start the engine, which takes simulated time."""
        await asyncio.sleep(self.settings.start_s)

    async def close(self) -> None:
        """Stop the engine; waiting requests get `EngineDiedError`."""
        self.die("it was closed")

    def die(self, cause: str) -> None:
        """Stop immediately, like a crash: every request gets `EngineDiedError`. Calling it twice is safe."""
        if self._death:
            return
        self._death = cause
        if self._timer is not None:
            self._timer.cancel()
        error = EngineDiedError(self.engine_id, cause)
        for future in [*(live.future for live in self._live.values()), *self._at_rest]:
            if not future.done():
                future.set_exception(error)
        self._live.clear()
        self._held.clear()
        self._at_rest.clear()

    def stall(self, duration_s: float) -> None:
        """Start no new step for `duration_s` seconds; the current step ends normally."""
        if not self._death:
            self._batch.pause_until(self._loop.time() + duration_s)
            self._schedule_advance()

    def slow_down(self, factor: float) -> None:
        """Multiply the duration of all further steps by `factor`; 1 restores the original speed."""
        self._batch.costs = self.settings.costs.scale(factor)
        self._schedule_advance()

    @property
    def totals(self) -> BatchTotals:
        """Totals of the engine's work so far; steps are counted at the end of their span."""
        return self._batch.totals

    def load(self) -> EngineLoad:
        """Return the engine's current load."""
        batch = self._batch
        return EngineLoad(
            num_running=batch.num_running,
            num_waiting=batch.num_waiting + len(self._held),
            kv_used=batch.count_kv_tokens(self._loop.time()) / batch.limits.kv_capacity,
            capacity=batch.limits.max_num_seqs,
            kv_capacity=batch.limits.kv_capacity,
            num_steps=batch.count_steps(self._loop.time()),
        )

    # ---- requests

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate the answer to a request in simulated time.

        Raises:
            UserError: The request can never fit into the KV cache, or its id is in use.
            EngineDiedError: The engine has died.
            WeightSyncError: The engine woke up and has not received weights since.
        """
        self._check_alive()
        if self._unsynced:
            raise WeightSyncError(f"engine '{self.engine_id}' {self._unsynced}: sync weights first.")
        live = self._create_request(request)
        if self._draining:
            self._held.append(live)
        else:
            self._submit(live)
        try:
            return await live.future
        except asyncio.CancelledError:
            self._remove(live)
            raise

    async def logprobs(self, sequences: Sequence[IntArray], media: SequenceMedia = ()) -> list[FloatArray]:
        """Return zeros, after the simulated time of prefilling the sequences."""
        self._check_alive()
        costs = self.settings.costs
        await asyncio.sleep(sum(costs.compute_step_s(0, len(seq), 0, len(seq) ** 2 / 2) for seq in sequences))
        self._check_alive()
        return [build_zero_logprobs(len(sequence)) for sequence in sequences]

    async def abort(self, request_ids: Collection[str]) -> None:
        """Abort requests immediately, with the tokens of all completed steps; unknown ids are ignored."""
        self._check_alive()
        for request_id in request_ids:
            live = self._live.get(request_id)
            if live is not None:
                self._abort(live)

    # ---- control

    async def pause(self, mode: PauseMode) -> None:
        """Pause after the current step; `drain` first completes all requests, `abort` ends them, `keep` suspends
        them.
        """
        self._check_alive()
        if mode == "drain":
            self._paused, self._draining = False, True
            self._schedule_advance()
            held = set(self._held)
            futures = [live.future for live in self._live.values() if live not in held]
            if futures:
                await asyncio.wait(futures)
            self._check_alive()
            if not self._draining:  # it was resumed in the meantime
                return
        self._paused = True
        if mode == "abort":
            for live in list(self._live.values()):
                self._abort(live)
        await self._wait_until_idle()

    async def resume(self) -> None:
        """Resume decoding."""
        self._check_alive()
        self._paused = self._draining = False
        held, self._held = self._held, []
        for live in held:
            self._submit(live)
        self._schedule_advance()

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Load new weights; running requests are suspended during the update."""
        async with self._update_lock:
            self._check_alive()
            began = self._loop.time()
            own_pause = not self._paused
            if own_pause:
                await self.pause("keep")
            await asyncio.sleep(self.settings.update_s)
            self._check_alive()
            self._record_versions()
            self.policy_version = update.policy_version
            self._unsynced = ""
            if self.settings.recompute_on_update:
                self._batch.preempt_all()
            self._prefixes.clear()
            if own_pause:
                await self.resume()
            return WeightReceipt(
                engine_id=self.engine_id,
                policy_version=update.policy_version,
                checksums={},
                duration_s=self._loop.time() - began,
            )

    async def sleep(self) -> None:
        """Release the device's memory; running requests are aborted."""
        await self.pause("abort")
        self._unsynced = "sleeps"

    async def wake(self) -> None:
        """Allocate the device's memory again; weights must be synced before the next request."""
        self._check_alive()
        self._unsynced = "has received no weights since it woke up"
        await self.resume()

    # ---- internals

    @property
    def _loop(self) -> VirtualTimeLoop:
        return cast(VirtualTimeLoop, asyncio.get_running_loop())

    def _check_alive(self) -> None:
        if self._death:
            raise EngineDiedError(self.engine_id, self._death)

    def _create_request(self, request: GenerationRequest) -> _LiveRequest:
        request_id, limit = request.request_id, request.sampling.max_new_tokens
        if request_id in self._live:
            raise UserError(f"request id {request_id} is already in use: use a unique id for every request.")
        wanted, num_prompt = max(1, self._count_answer_tokens(request)), len(request.token_ids)
        simulated = SimulatedRequest(request_id, num_prompt, min(wanted, limit), request.priority)
        if num_prompt + simulated.num_output > self.settings.limits.kv_capacity:
            raise UserError(
                f"request {request_id} requires {num_prompt + simulated.num_output:,} tokens of KV cache, but engine "
                f"{self.engine_id} has {self.settings.limits.kv_capacity:,}: raise inference.tensor_parallel, or "
                "lower rollout.max_new_tokens."
            )
        simulated.num_cached = self._prefixes.add_prompt(request.token_ids)
        live = _LiveRequest(simulated, self._loop.create_future(), "stop" if wanted <= limit else "length")
        self._live[request_id] = live
        return live

    def _submit(self, live: _LiveRequest) -> None:
        self._batch.submit(live.simulated)
        if not self._batch.is_running or self._batch.would_admit(live.simulated):
            self._schedule_advance()

    def _abort(self, live: _LiveRequest) -> None:
        """End a request with the tokens that it has generated."""
        num_tokens = self._remove(live)
        if not live.future.done():
            live.future.set_result(live.build_generation(num_tokens, "abort", self))

    def _remove(self, live: _LiveRequest) -> int:
        """Remove a request from the engine, and return the number of tokens that it has generated."""
        if self._live.get(live.simulated.request_id) is not live:
            return live.simulated.num_generated
        del self._live[live.simulated.request_id]
        if live in self._held:
            self._held.remove(live)
            return 0
        num_tokens = self._batch.remove(live.simulated, self._loop.time())
        self._schedule_advance()
        return num_tokens

    def _record_versions(self) -> None:
        """Record how many tokens of each running request the current policy version has generated, before an update."""
        now = self._loop.time()
        for live in self._live.values():
            fresh = self._batch.count_generated(live.simulated, now) - live.num_old_tokens
            if fresh:
                live.runs.append((self.policy_version, fresh))

    def _schedule_advance(self) -> None:
        """Call `_advance_batch` after all other callbacks at the current time; used after a request or a pause."""
        if not self._plan_is_due:
            self._plan_is_due = True
            self._loop.call_when_idle(self._advance_batch)

    def _advance_batch(self) -> None:
        """End the current span at the next step boundary; at a boundary, begin the next span unless paused."""
        self._plan_is_due = False
        if self._death:
            return
        batch, now = self._batch, self._loop.time()
        if batch.is_running:
            if (end := batch.interrupt(now)) > now:
                return self._set_timer(end)
            self._complete()
        if self._paused:
            for future in self._at_rest:
                if not future.done():
                    future.set_result(None)
            self._at_rest.clear()
            return
        end = batch.begin(now)
        if end is not None:
            self._set_timer(end)

    def _complete(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for simulated in self._batch.complete():
            live = self._live.pop(simulated.request_id)
            if not live.future.done():
                live.future.set_result(live.build_generation(simulated.num_generated, live.finish_reason, self))

    def _on_boundary(self) -> None:
        self._timer = None
        self._complete()
        self._schedule_advance()

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            if self._timer.when() == when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._on_boundary)

    async def _wait_until_idle(self) -> None:
        """Wait until no step is in progress."""
        if self._batch.is_running:
            future: asyncio.Future[None] = self._loop.create_future()
            self._at_rest.append(future)
            self._schedule_advance()
            await future
