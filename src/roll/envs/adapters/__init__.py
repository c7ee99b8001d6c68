"""Adapters for environments of other libraries. Each adapter has its own prefix, and imports its library on first use.

`ADAPTERS` maps a prefix to the function that builds an environment from the name after it, as in `gym:FrozenLake-v1`.
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
