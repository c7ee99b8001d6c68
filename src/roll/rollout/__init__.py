"""Rollout scheduling: asynchronous and partial rollouts, staleness, queues, and the fleet of engines.

The package uses only asyncio with the event loop's clock, and does not import torch, ray or vLLM. So `roll simulate`
can run it in virtual time.
"""

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
