"""Environments, in which a model acts over several turns."""

from roll.envs.base import Env, EnvWrapper, format_observation
from roll.envs.registration import ENVS, EnvSpec, make, make_vec, register
from roll.envs.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

__all__ = [
    "ENVS",
    "AsyncVectorEnv",
    "Env",
    "EnvSpec",
    "EnvWrapper",
    "SyncVectorEnv",
    "VectorEnv",
    "format_observation",
    "make",
    "make_vec",
    "register",
]
