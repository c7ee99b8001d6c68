"""The size of the `hf` engine's KV cache."""

from __future__ import annotations

import torch

from roll.errors import ModelError
from roll.inference.hf_attention import WIDTH_MULTIPLE, round_up
from roll.inference.spec import EngineSpec
from roll.models import describe_model

__all__ = ["plan_cache"]

CPU_CACHE_BYTES = 256 * 2**20


def plan_cache(spec: EngineSpec, dtype: torch.dtype, device: torch.device) -> int:
    """Return the cache capacity over all rows, in tokens.

    Args:
        spec: The spec of the engine.
        dtype: The dtype of keys and values.
        device: The device of a rank.

    Raises:
        ModelError: one request of maximum length does not fit.
    """
    token_bytes = describe_model(spec.model_path).compute_kv_bytes_per_token(torch.finfo(dtype).bits // 8)
    # The bytes are those of each device, and each device has the keys and values of its own heads.
    budget = (spec.kv_cache_bytes or _get_default_cache_bytes(device)) * spec.tensor_parallel
    needed = round_up(spec.max_context, WIDTH_MULTIPLE) * token_bytes
    if needed > budget:
        raise ModelError(
            f"a request of max_context={spec.max_context} tokens requires {needed} bytes of KV cache, but the "
            f"cache has {budget}: raise inference.kv_cache_bytes or lower inference.max_context."
        )
    return budget // token_bytes


def _get_default_cache_bytes(device: torch.device) -> int:
    """Return the default cache size: 256 MiB on a CPU, a third of the free memory elsewhere."""
    if device.type == "cpu":
        return CPU_CACHE_BYTES
    free, _ = torch.accelerator.get_memory_info(device)
    return free // 3
