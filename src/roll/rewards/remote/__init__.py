"""Rewards over HTTP: the client of a reward service, and the service itself."""

from __future__ import annotations

from roll.config.rewards import RemoteReward
from roll.protocols import WorkerPool
from roll.rewards.base import Verifier
from roll.rewards.remote.client import RemoteScorer

__all__ = ["RemoteScorer", "build_remote_verifier"]


def build_remote_verifier(config: RemoteReward, pool: WorkerPool) -> Verifier:
    """Build the verifier of the reward `remote`, which sends requests from the event loop of the controller.

    Raises:
        ConfigError: The environment variable for the token is not set.
    """
    scorer = RemoteScorer(config)
    return Verifier(judge=scorer.judge, decides_correctness=config.decides, close=scorer.close)
