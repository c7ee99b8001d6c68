"""Registry of pipelines: how each one runs, evaluates a model, and is checked before it starts.

The names are those of `roll.config.pipelines`; each pipeline has a package here, with a `pipeline` and a `check`. A
user-defined pipeline is a class with `pipeline`, `check` and `config`; users select it with `pipeline:
path/to/file.py:Class`."""

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
    """Facts about a run that are shown before its first step."""

    method: str
    """Name of the method."""
    setup: str
    """Short description of engines, trainer and machine."""
    num_steps: int
    rollouts_per_step: int | None = None
    """Number of rollouts that a step generates; `None` for a run without generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """The functions of a pipeline; each takes an instance of the pipeline's configuration class."""

    open: Callable[[Any, Session], AbstractAsyncContextManager[Callable[[], Awaitable[None]]]]
    """Context manager that starts the roles of a run, yields the function to run, and shuts the roles down."""
    facts: Callable[[Any, RunState], RunFacts]
    """Returns the facts of a run in a given state."""
    evaluate: Callable[[Any], Coroutine[Any, Any, dict[str, float]]]
    """Evaluates the configuration's model, without training."""
    state: type[RunState] = RunState
    """Class of a run's state between steps."""


PIPELINES: PipelineRegistry[Pipeline] = PipelineRegistry(
    {name: f"roll.pipelines.{name}.pipeline:PIPELINE" for name in CONFIGURATIONS.built_in_names}, part=None
)
CHECKS: PipelineRegistry[Callable[[Any], Report]] = PipelineRegistry(
    {name: f"roll.pipelines.{name}.check:inspect" for name in CONFIGURATIONS.built_in_names}, part="check"
)
"""Checks of `roll check`; separate from the pipelines, since they do not import torch."""
