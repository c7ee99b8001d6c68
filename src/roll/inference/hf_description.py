"""The capabilities of the `hf` engine. Does not import the engine."""

from __future__ import annotations

from roll.config.engines import EngineCapabilities, LazyEngine

__all__ = ["HF_ENGINE"]

HF_ENGINE = LazyEngine(
    path="roll.inference.hf:HFEngine",
    capabilities=EngineCapabilities(
        shares_process=True,
        restricts_choices=True,
        records_experts=True,
        continues_sampling=True,
        can_sleep=True,
        tensor_parallel=True,
        only_on_one_device=frozenset({"lora", "records_experts"}),
        lora=True,
        multimodal_lora=True,
        moe_lora=True,
        dora=True,
        sequential_options={"admission": "continuous"},
        missing_reasons={"quantized_compute": "it computes in the model's dtype"},
    ),
)
