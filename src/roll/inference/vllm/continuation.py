"""Random numbers of continued requests in vLLM, so that a continuation samples the same tokens as an uninterrupted
request.

vLLM creates a random generator for each request with a seed. A request that continues an answer of `position` tokens
would therefore repeat the random numbers of the first tokens. This module makes the worker skip the random numbers of
these tokens when the request arrives.

vLLM's newer model runner (V2), which needs Triton, derives each number from the seed and the token's position itself.
Remove this module when vLLM does so everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["POSITION_KEY", "register", "skip_random_numbers"]

POSITION_KEY = "roll_position"
"""Key in `extra_args` of vLLM's sampling parameters: `roll.types.SamplingParams.position`."""

_registered = False


def skip_random_numbers(generator: torch.Generator, count: int, vocab_size: int) -> None:
    """Advance a request's generator past the random numbers of `count` sampled tokens, in place.

    Args:
        generator: The generator of the request.
        count: Number of tokens.
        vocab_size: Number of logits per token.
    """
    import torch

    if generator.device.type == "cpu":  # one number per token, see `kernels.TokenSampler`
        torch.rand(count, dtype=torch.float64, generator=generator)
        return
    # On GPUs, vLLM draws one number per logit (`random_sample`). The generator counts its numbers, so they need not be
    # drawn: the increase of the counter per token is measured with another generator.
    probe = torch.Generator(generator.device).manual_seed(0)
    torch.empty(vocab_size, device=generator.device).exponential_(generator=probe)
    generator.set_offset(generator.get_offset() + count * probe.get_offset())


def register() -> None:
    """Patch vLLM's workers to skip the random numbers of tokens that a continued request generated earlier.

    Affects workers that are built later in this process.
    """
    global _registered
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    if _registered:
        return
    _registered = True
    add_request = InputBatch.add_request

    def add_after_skipping(self: InputBatch, request: CachedRequestState) -> int:
        arguments = request.sampling_params.extra_args if request.sampling_params is not None else None
        # Removed, because a preempted request is added again and keeps its generator.
        position = arguments.pop(POSITION_KEY, 0) if arguments else 0
        if position and request.generator is not None:
            skip_random_numbers(request.generator, position, self.vocab_size)
        return add_request(self, request)

    InputBatch.add_request = add_after_skipping
