"""Scheduling of rollouts: asyncio alone, with the running loop's clock; no torch, ray, or vLLM."""

from roll.rollout.ledger import DataLedger, Fate
from roll.rollout.proxy import LLMProxy
from roll.rollout.scheduler import RolloutScheduler, SamplingPlan

__all__ = ["DataLedger", "Fate", "LLMProxy", "RolloutScheduler", "SamplingPlan"]
