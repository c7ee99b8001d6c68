"""Faster norms and sampling for vLLM on a CPU: vLLM's fused C++ norm kernels, and one random number per sampled token.

The CPU build of vLLM 0.32 has norm kernels, but does not use them if the model is not compiled. A norm then needs nine
passes over memory, and the norms take a sixth of a decoding step. Compiling the model would take half a minute at every
start. The kernels are registered through vLLM's interface for out-of-tree operators.

vLLM samples with the Gumbel-max trick, which needs a random number for every vocabulary entry: 8.3 ms for 64 sequences
and 49,152 tokens, in a decoding step of 59 ms. Here, the cumulative sums, which log-probs need anyway, are inverted at
one random number.

Both can be removed when vLLM does the same. SwiGLU still uses two PyTorch operations, which take 0.4 of the time of
vLLM's kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from roll.inference.inversion import BLOCK_SIZE, compute_running_totals, sample_by_inversion

__all__ = ["TokenSampler", "register_cpu_kernels"]

_registered = False


class TokenSampler:
    """Samples tokens. Its buffer is reused in every step, because allocating memory costs more than the arithmetic."""

    def __init__(self) -> None:
        self._vocab = 0
        self._weights = torch.zeros(0, 0)

    def draw(self, logits: Tensor, generators: Mapping[int, torch.Generator]) -> tuple[Tensor, Tensor]:
        """Sample a token for each row, and return the log-probs of all tokens.

        Args:
            logits: Logits divided by temperature, float32 [R, V]; -inf for tokens to exclude. The tensor is
                overwritten.
            generators: The random generators of rows with a separate generator, by row.

        Returns:
            Tokens int64 [R], and log-probs float32 [R, V]. If a row's logits are not finite, its log-probs are not
            finite either, and its token is arbitrary.
        """
        rows, vocab = logits.shape
        if len(self._weights) < rows or self._vocab != vocab:
            self._vocab = vocab
            self._weights = torch.zeros(rows, -(-vocab // BLOCK_SIZE) * BLOCK_SIZE)
        weights = self._weights[:rows]
        logits -= logits.amax(-1, keepdim=True)
        torch.exp(logits, out=weights[:, :vocab])
        totals = compute_running_totals(weights)
        uniforms = torch.rand(rows, dtype=torch.float64)
        for row, generator in generators.items():
            uniforms[row] = torch.rand((), dtype=torch.float64, generator=generator)
        logits -= totals[:, -1:].log().float()
        return sample_by_inversion(weights, totals, uniforms).clamp_max(vocab - 1), logits


def register_cpu_kernels() -> None:
    """Make vLLM models that are built later in this process use ROLL's CPU kernels; do nothing on other platforms."""
    global _registered
    from vllm.platforms import current_platform

    if _registered or not current_platform.is_cpu():
        return
    _registered = True
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

    drawn_by_vllm, drawing = TopKTopPSampler.forward_cpu, TokenSampler()

    def forward_cpu(
        self: TopKTopPSampler,
        logits: Tensor,
        generators: dict[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Sample tokens [R], and return them with the log-probs [R, V] of all tokens."""
        if self.use_fp64_gumbel or self.logprobs_mode != "processed_logprobs":
            return drawn_by_vllm(self, logits, generators, k, p)
        return drawing.draw(apply_top_k_top_p(logits, k, p).float(), generators)

    TopKTopPSampler.forward_cpu = forward_cpu

    current_platform.import_kernels()
    kernels = torch.ops._C
    if not all(hasattr(kernels, name) for name in ("rms_norm", "fused_add_rms_norm")):
        return

    @RMSNorm.register_oot
    class FusedRMSNorm(RMSNorm):
        """vLLM's `RMSNorm`, computed in one pass over the input by vLLM's fused CPU kernels."""

        def forward_cpu(  # type: ignore[bad-override]  # vLLM annotates the missing method as never returning
            self, x: Tensor, residual: Tensor | None = None
        ) -> Tensor | tuple[Tensor, Tensor]:
            """Return `x` normalized; with a residual, return the sum of both normalized, and the sum. May overwrite
            inputs.
            """
            plain = self.has_weight and self.variance_size_override is None and self.weight.dtype == x.dtype
            if not plain or not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
                return self.forward_native(x, residual)
            if residual is None:
                out = torch.empty_like(x)
                kernels.rms_norm(out, x, self.weight.data, self.variance_epsilon)
                return out
            kernels.fused_add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)
            return x, residual
