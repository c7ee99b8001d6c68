"""Environments of other libraries: a family of names each. A library is imported when its first environment is made.

`ADAPTERS` maps a family to the function that builds an environment from the name behind the colon: `gym:FrozenLake-v1`.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ADAPTERS"]

ADAPTERS: Mapping[str, str] = {
    "gem": "roll.envs.adapters.gem:make",
    "gym": "roll.envs.adapters.gymnasium:make",
    "rg": "roll.envs.adapters.reasoning_gym:make",
    "textarena": "roll.envs.adapters.textarena:make",
    "verifiers": "roll.envs.adapters.verifiers:make",
}
