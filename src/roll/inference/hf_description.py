"""The description of the `hf` engine: its capabilities. Imports nothing of it."""

from __future__ import annotations

from roll.config.engines import EngineCapabilities, LazyEngine

__all__ = ["HF"]

HF = LazyEngine(
    path="roll.inference.hf:HFEngine",
    capabilities=EngineCapabilities(
        shares_process=True,
        restricts_choices=True,
        records_experts=True,
        can_sleep=True,
        trickling_options={"admission": "continuous"},
    ),
)
