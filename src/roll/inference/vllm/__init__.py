"""The `vllm` engine. Importing this package does not import vLLM; starting an engine does."""

from roll.inference.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
