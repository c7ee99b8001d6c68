"""A worker extension with vLLM's own products of adapters, for `bench_lora.py`."""

from roll.inference.vllm import lora_kernels

lora_kernels._registered = True  # so that the import below does not replace vLLM's products

from roll.inference.vllm.worker import WeightReceiver  # noqa: E402

__all__ = ["GatherReceiver"]


class GatherReceiver(WeightReceiver):
    """ROLL's extension; vLLM names its class."""
