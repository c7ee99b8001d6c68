"""Named algorithms: each is a module with its paper, formula and assumptions, and the keys that it sets.

A preset is only a starting point: the user's keys take precedence, key by key. If the user selects another type of
gate, all of the preset's gate settings are dropped.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

__all__ = [
    "DEFAULT_PRESET",
    "PRESET_NAMES",
    "PresetName",
    "PresetNote",
    "describe_preset",
    "expand_preset",
    "load_preset",
    "load_preset_note",
]

PresetName: TypeAlias = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "opo",
    "raft_pp",
    "dapo",
    "lite_ppo",
    "gspo",
    "gspo_token",
    "gmpo",
    "cispo",
    "tis",
    "topr",
    "weighted_topr",
    "decoupled_ppo",
    "dual_clip",
    "sapo",
    "kimi15",
    "ppo",
    "asy_ppo",
    "star_po",
    "gi_gpo",
    "rebn",
    "ipa",
    "attention_credit",
]
PRESET_NAMES: tuple[str, ...] = get_args(PresetName)
DEFAULT_PRESET = "grpo"
_BASE_PRESET: dict[str, Any] = {"gate": {"type": "min_clip"}}


def load_preset(name: str) -> dict[str, Any]:
    """Return the keys below `algorithm` that are set by the preset `name`."""
    return deepcopy(importlib.import_module(f"{__name__}.{name}").PRESET)


def describe_preset(name: str) -> str:
    """Return the description of a preset: paper, formula and assumptions."""
    return inspect.cleandoc(importlib.import_module(f"{__name__}.{name}").__doc__ or "")


def format_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield every key that a preset sets, formatted as an override `key=value`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from format_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={value if isinstance(value, str) else json.dumps(value)}"


@dataclass(frozen=True, slots=True)
class PresetNote:
    """The use case, the cost and the stability of a preset."""

    use_case: str
    cost: str
    stability: str


def load_preset_note(name: str) -> PresetNote:
    """Return the use case of a preset, its cost in addition to generation and training, and its stability."""
    module = importlib.import_module(f"{__name__}.{name}")
    return PresetNote(module.USE_CASE, module.COST, module.STABILITY)


def expand_preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the user's keys over the keys of the preset that `type` selects; an unknown preset adds no keys."""
    name = settings.get("type", DEFAULT_PRESET)
    return _merge(_merge(_BASE_PRESET, load_preset(name)), settings) if name in PRESET_NAMES else dict(settings)


def _merge(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    if "type" in base and top.get("type", base["type"]) != base["type"]:
        return dict(top)
    merged = dict(base)
    for key, value in top.items():
        below = base.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged
