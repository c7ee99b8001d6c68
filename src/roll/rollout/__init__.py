"""Scheduling of rollouts: asyncio only, with the running loop's clock; no torch, ray, or vLLM."""

from roll.rollout.attempts import SamplingPlan
from roll.rollout.batch import Batch, BatchSpec
from roll.rollout.controller import AsyncController
from roll.rollout.ledger import DataLedger
from roll.rollout.lifecycle import LifeCycle, RolloutState, Transition
from roll.rollout.proxy import LLMProxy
from roll.rollout.routing import Router
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.selection_bias import SelectionBias

__all__ = [
    "AsyncController",
    "Batch",
    "BatchSpec",
    "DataLedger",
    "LLMProxy",
    "LifeCycle",
    "RolloutScheduler",
    "RolloutState",
    "Router",
    "SamplingPlan",
    "SelectionBias",
    "Transition",
]
