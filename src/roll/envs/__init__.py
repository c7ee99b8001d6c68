"""Environments: what a model acts in over several turns."""

from roll.envs.base import ENVS, Env, make

__all__ = ["ENVS", "Env", "make"]
