"""Environments: what a model acts in over several turns."""

from roll.envs.base import ENVS, Env, make
from roll.envs.rollout_length import longest_rollout

__all__ = ["ENVS", "Env", "longest_rollout", "make"]
