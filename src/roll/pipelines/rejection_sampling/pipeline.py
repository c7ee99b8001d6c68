"""Rejection sampling as a pipeline: what it opens, says of itself, and measures."""

from __future__ import annotations

from functools import partial

from roll.pipelines.evaluation import measure
from roll.pipelines.learning.state import LearningState
from roll.pipelines.online.opening import facts, open_alone
from roll.pipelines.registry import Pipeline
from roll.pipelines.rejection_sampling.loop import train

__all__ = ["PIPELINE"]

PIPELINE = Pipeline(
    open=partial(open_alone, train=train),
    facts=partial(facts, method="rejection_sampling"),
    evaluate=measure,
    state=LearningState,
)
