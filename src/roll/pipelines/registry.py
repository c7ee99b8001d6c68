"""The pipelines by name: how each runs, measures a model, and is looked at before it starts.

Their names are those of `roll.config.pipelines`; each has a package here, with a `pipeline` and a `check`. One of the
user's own is a class with all of this and its `config`, which `pipeline: path/to/file.py:Class` names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.config.pipelines import PIPELINES as CONFIGURATIONS
from roll.config.pipelines import PipelineRegistry
from roll.pipelines.state import RunState
from roll.preflight import Report

if TYPE_CHECKING:
    from roll.pipelines.run import Session

__all__ = ["CHECKS", "PIPELINES", "Pipeline", "RunFacts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What is said of a run before its first step."""

    method: str
    """What it learns by."""
    where: str
    """Engines, trainer and machine, in a few words."""
    num_steps: int
    rollouts_per_step: int | None = None
    """`None` for a run that generates nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """One pipeline; each function takes a configuration of its own kind."""

    open: Callable[[Any, Session], AbstractAsyncContextManager[Callable[[], Awaitable[None]]]]
    """Starts what a run needs, and ends it afterwards; inside, what is to be done."""
    facts: Callable[[Any, RunState], RunFacts]
    """Of a run that stands there."""
    evaluate: Callable[[Any], Coroutine[Any, Any, dict[str, float]]]
    """Measures the configuration's model, without training."""
    state: type[RunState] = RunState
    """What its runs remember between steps."""


PIPELINES: PipelineRegistry[Pipeline] = PipelineRegistry(
    {name: f"roll.pipelines.{name}.pipeline:PIPELINE" for name in CONFIGURATIONS.built_in}, part=None
)
CHECKS: PipelineRegistry[Callable[[Any], Report]] = PipelineRegistry(
    {name: f"roll.pipelines.{name}.check:inspect" for name in CONFIGURATIONS.built_in}, part="check"
)
"""What `roll check` finds out; apart from the others, since it needs no torch."""
