"""The capabilities of the `sglang` engine. Imports neither the engine nor SGLang."""

from __future__ import annotations

from roll.config.engines import EngineCapabilities, LazyEngine

__all__ = ["SGLANG_ENGINE"]

SGLANG_ENGINE = LazyEngine(
    path="roll.inference.sglang.engine:SGLangEngine",
    check_options_path="roll.inference.sglang.installation:check_options",
    capabilities=EngineCapabilities(
        truncates_sampling=False,
        can_sleep=True,
        tensor_parallel=True,
        quantization=True,
        lora=True,
        reserves_kv_cache=True,
        address_option="url",
        test_note="The engine sglang has run on a CPU with placeholder kernels, not on a GPU.",
        missing_reasons={
            "truncates_sampling": "its server returns log-probs of the distribution before truncation",
            "restricts_choices": "its server has no option that restricts sampling to given tokens",
            "records_experts": "ROLL does not read the experts that its server returns",
            "continues_sampling": "its random numbers depend on the batch",
            "multimodal_lora": "ROLL sends it tokens only",
            "moe_lora": "its experts need GPU kernels, so ROLL could not test them with adapters",
            "dora": "its server rejects them",
            "supports_images": "ROLL sends it tokens only",
            "quantized_compute": "ROLL sends it dequantized weights",
        },
    ),
)
