"""ROLL: reinforcement-learning post-training of language models, from a laptop to a cluster.

    import roll

    config = roll.load_config("examples/quickstart.yaml", ["training.num_steps=20"])
    summary = roll.train(config)
    summary = roll.train(config, {"name": "own"}, data=[{"prompt": "3 + 4 =", "answer": "7"}, …], reward=my_function)

Importing `roll` imports nothing else; each name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.api import check, evaluate, export, load_config, replay, resume, train
    from roll.rewards.base import Judgement
    from roll.version import __version__

__all__ = [
    "Judgement",
    "__version__",
    "check",
    "evaluate",
    "export",
    "load_config",
    "replay",
    "resume",
    "train",
]

_MODULES = {
    "Judgement": "roll.rewards.base",
    "__version__": "roll.version",
    "check": "roll.api",
    "evaluate": "roll.api",
    "export": "roll.api",
    "load_config": "roll.api",
    "replay": "roll.api",
    "resume": "roll.api",
    "train": "roll.api",
}


def __getattr__(name: str) -> Any:
    try:
        module = _MODULES[name]
    except KeyError:
        raise AttributeError(f"module 'roll' has no attribute '{name}'") from None
    import importlib

    import roll_rl

    problem = roll_rl.namesake()
    if problem is not None:
        raise ImportError(problem)

    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
