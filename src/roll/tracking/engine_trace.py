"""What engines' steps took, as trace events: what `roll simulate --calibrate` reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from roll.tracking.rollout_trace import ENGINES
from roll.types import EngineStretch

__all__ = ["ENGINE_STEPS", "trace_engine_steps"]

ENGINE_STEPS = "engine steps"
"""Category of the events."""


def trace_engine_steps(engines: Iterable[Any], emit: Callable[..., None]) -> None:
    """Put the stretches that engines have collected since the last call into a trace.

    Args:
        engines: those with a method `take_steps` are asked; others (in other processes) are left out.
        emit: takes the fields of an event.
    """
    for lane, engine in enumerate(engines):
        take = getattr(engine, "take_steps", None)
        for stretch in take() if take is not None else ():
            _emit(stretch, lane, emit)


def _emit(stretch: EngineStretch, lane: int, emit: Callable[..., None]) -> None:
    emit(
        name="prefill" if stretch.num_started else f"decode {stretch.num_decoding}",
        cat=ENGINE_STEPS,
        ph="X",
        ts=round(stretch.began_s * 1e6),
        dur=round(stretch.duration_s * 1e6),
        pid=ENGINES,
        tid=lane + 1,
        args={
            "num_steps": stretch.num_steps,
            "num_decoding": stretch.num_decoding,
            "num_started": stretch.num_started,
            "num_prefilled": stretch.num_prefilled,
            "context_tokens": round(stretch.context_tokens, 1),
        },
    )
