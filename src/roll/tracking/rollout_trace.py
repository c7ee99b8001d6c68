"""Emit trace events of rollout states, engine load and a judge's requests, in real and simulated runs.

The trace also has the durations of engine steps, which `roll simulate --calibrate` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from roll.types import EngineStepSpan, RolloutId

__all__ = ["ENGINE_STEPS", "RequestTrace", "RolloutTrace", "Transition", "trace_engine_change", "trace_engine_steps"]

ENGINES, ROLLOUTS, JUDGE = 1_000_000_002, 1_000_000_003, 1_000_000_004
"""Process IDs in the trace, above any real process ID."""
PROCESSES = {ENGINES: "engines: requests", ROLLOUTS: "rollouts"}


class Transition(Protocol):
    """A rollout's change from one state to another, with the fields needed for traces."""

    @property
    def rollout_id(self) -> RolloutId: ...
    @property
    def before(self) -> str | None: ...
    @property
    def after(self) -> str: ...
    @property
    def detail(self) -> str: ...


class RolloutTrace:
    """Converts the state changes of rollouts to trace events.

    Args:
        emit: Called with the fields of an event; adds the time to the event.
        final_states: Final states of a rollout.
    """

    def __init__(self, emit: Callable[..., None], final_states: frozenset[str]) -> None:
        self._emit = emit
        self._final = final_states
        self._at_engine: dict[RolloutId, str] = {}
        self._running: dict[str, int] = {}
        for number, name in PROCESSES.items():
            emit(name="process_name", ph="M", pid=number, tid=0, args={"name": name})

    def on_transition(self, event: Transition) -> None:
        """Record a state change; a listener of `LifeCycle`."""
        common: dict[str, Any] = {"pid": ROLLOUTS, "tid": 0, "cat": "rollout", "id": str(event.rollout_id)}
        if event.before is not None:
            self._emit(name=str(event.before), ph="e", **common)
        self._emit(name=str(event.after), ph="n" if event.after in self._final else "b", **common)
        if event.after == "generating" and event.detail:
            self._at_engine[event.rollout_id] = event.detail
            self._count(event.detail, 1)
        elif event.before == "generating" and event.rollout_id in self._at_engine:
            self._count(self._at_engine.pop(event.rollout_id), -1)

    def _count(self, engine_id: str, change: int) -> None:
        self._running[engine_id] = self._running.get(engine_id, 0) + change
        self._emit(name=engine_id, ph="C", pid=ENGINES, tid=0, args={"requests": self._running[engine_id]})


class RequestTrace:
    """Converts a judge's requests to trace events: their durations, and the number of requests in each engine.

    Args:
        emit: Called with the fields of an event; adds the time to the event.
    """

    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit
        self._at_engine: dict[str, str] = {}
        self._running: dict[str, int] = {}
        emit(name="process_name", ph="M", pid=JUDGE, tid=0, args={"name": "judge: requests"})

    def begin(self, request_id: str, engine_id: str) -> None:
        """Record that an engine received a request, possibly again after another engine died."""
        self.end(request_id)
        self._at_engine[request_id] = engine_id
        self._emit_event(request_id, "b", engine_id)
        self._count(engine_id, 1)

    def end(self, request_id: str) -> None:
        """Record that a request left its engine; unknown requests are ignored."""
        engine_id = self._at_engine.pop(request_id, None)
        if engine_id is not None:
            self._emit_event(request_id, "e", engine_id)
            self._count(engine_id, -1)

    def _emit_event(self, request_id: str, phase: str, engine_id: str) -> None:
        args = {"engine": engine_id}
        self._emit(name="judging", ph=phase, pid=JUDGE, tid=0, cat="judge", id=request_id, args=args)

    def _count(self, engine_id: str, change: int) -> None:
        self._running[engine_id] = self._running.get(engine_id, 0) + change
        self._emit(name=engine_id, ph="C", pid=JUDGE, tid=0, args={"requests": self._running[engine_id]})


ENGINE_STEPS = "engine steps"
"""Category of the events of engine steps."""


def trace_engine_steps(engines: Iterable[Any], emit: Callable[..., None]) -> None:
    """Emit trace events for the spans of engine steps that engines have recorded since the last call.

    Args:
        engines: The engines; those that record no steps, which have no method `take_steps`, are skipped.
        emit: Called with the fields of an event.
    """
    for lane, engine in enumerate(engines):
        take = getattr(engine, "take_steps", None)
        for span in take() if take is not None else ():
            _emit(span, lane, emit)


def trace_engine_change(emit: Callable[..., None], text: str) -> None:
    """Emit an instant event with this text, when an engine has joined or left.

    Args:
        emit: Called with the fields of an event; adds the time to the event.
        text: Text of the event.
    """
    emit(name=text, ph="i", s="p", pid=ENGINES, tid=0)


def _emit(span: EngineStepSpan, lane: int, emit: Callable[..., None]) -> None:
    emit(
        name="prefill" if span.num_started else f"decode {span.num_decoding}",
        cat=ENGINE_STEPS,
        ph="X",
        ts=round(span.began_s * 1e6),
        dur=round(span.duration_s * 1e6),
        pid=ENGINES,
        tid=lane + 1,
        args={
            "num_steps": span.num_steps,
            "num_decoding": span.num_decoding,
            "num_started": span.num_started,
            "num_prefilled": span.num_prefilled,
            "context_tokens": round(span.context_tokens, 1),
        },
    )
