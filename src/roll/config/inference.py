"""Inference engines."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from roll.config.base import EXTENSION_PATTERN, Section, option, path_option
from roll.config.engines import ENGINES
from roll.config.operations import Quantization, WeightSyncConfig
from roll.config.widths import EngineWidthsSection, TensorParallel

__all__ = ["EngineOptions", "InferenceConfig", "find_quantization_conflict"]


class EngineOptions(Section):
    """Options of the engines of every role."""

    engine: str = path_option(
        "auto",
        "Inference engine: `vllm`, `hf` (embedded and deterministic), `sglang` (a server in another Python "
        "environment), or `auto`, which selects vLLM if it is installed and `hf` otherwise. For your own engine, the "
        "name that an installed package registers (entry points `roll.engines`), or `path/to/file.py:Class`.",
        examples=["hf"],
        pattern=EXTENSION_PATTERN,
    )
    max_num_seqs: int = option(64, "Maximum number of concurrent requests of one engine; further requests wait.", ge=1)
    kv_cache_bytes: int | None = option(
        None,
        "Size of each engine's KV cache. By default, 256 MiB on a CPU, and the engine's default fraction of the memory "
        "on a GPU.",
        unit="bytes",
        ge=1,
    )
    quantization: Quantization = option(
        "none",
        "Format in which linear layers compute (W8A8): weights have one scale per output channel, activations one per "
        "token; `fp8` is e4m3. Weights are quantized when they are loaded, and again for every weight sync. Supported "
        "by vLLM for text models without experts.",
    )
    options: dict[str, Any] = option({}, "Additional arguments that are passed to the engine unchanged.")

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, name: str) -> str:
        return name if name == "auto" else ENGINES.validate_name(name)


class InferenceConfig(EngineWidthsSection, EngineOptions):
    """The engines that generate answers."""

    tensor_parallel: TensorParallel = option(
        1,
        "Number of devices of one engine. A list such as `[1, 2]`: engines of each of these sizes use the same devices "
        "in turns, and the run chooses the size from step to step by preemptions and context lengths.",
        examples=[[1, 2]],
    )
    max_context: int | None = option(
        None,
        "Maximum length of prompt plus answer; by default, it is computed from the prompts and `max_new_tokens`.",
        unit="tokens",
        ge=1,
    )


def find_quantization_conflict(computed: Quantization, sync: WeightSyncConfig) -> str:
    """Return the conflict between `inference.quantization` and the section `weight_sync`; empty if there is none."""
    sent = sync.quantization
    if sync.lora == "adapter" and (computed, sent) != ("none", "none"):
        key = "weight_sync.quantization" if computed == "none" else "inference.quantization"
        value = sent if computed == "none" else computed
        return (
            f"weight_sync.lora is 'adapter', but {key} ({value}) requires that all weights are sent: set {key} to "
            "none, or set weight_sync.lora to merged"
        )
    if "none" not in (computed, sent) and computed != sent:
        return (
            f"weight_sync.quantization {sent} differs from inference.quantization {computed}, in which engines "
            f"receive weights: remove weight_sync.quantization, or set it to {computed}"
        )
    return ""
