"""On a CPU: norms and SwiGLU through vLLM's own fused C++ kernels.

vLLM 0.32 has these kernels in its CPU build and leaves them unused when the model is not compiled: a norm is then nine
passes over memory, and together they take a fifth of a decoding step. Compiling the model takes half a minute at every
start instead. Registered through vLLM's seam for out-of-tree operators; this goes when vLLM dispatches to them itself.
"""

from __future__ import annotations

__all__ = ["register"]

_registered = False


def register() -> None:
    """Let layers that are built from now on in this process use them; does nothing on other platforms."""
    global _registered
    from vllm.platforms import current_platform

    if _registered or not current_platform.is_cpu():
        return
    _registered = True
    import torch
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    current_platform.import_kernels()
    kernels = torch.ops._C
    if not all(hasattr(kernels, name) for name in ("rms_norm", "fused_add_rms_norm", "silu_and_mul")):
        return

    @RMSNorm.register_oot
    class FusedRMSNorm(RMSNorm):
        """`RMSNorm` in one pass."""

        def forward_cpu(  # type: ignore[bad-override]  # vLLM types the method it does not have as never returning
            self, x: torch.Tensor, residual: torch.Tensor | None = None
        ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
            """As the native one; a residual is added in place."""
            plain = self.has_weight and self.variance_size_override is None and self.weight.dtype == x.dtype
            if not plain or not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
                return self.forward_native(x, residual)
            if residual is None:
                out = torch.empty_like(x)
                kernels.rms_norm(out, x, self.weight.data, self.variance_epsilon)
                return out
            kernels.fused_add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)
            return x, residual

    @SiluAndMul.register_oot
    class FusedSiluAndMul(SiluAndMul):
        """`SiluAndMul` in one pass."""

        def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
            """silu(x[..., :d]) * x[..., d:]"""
            if not x.is_contiguous():
                return self.forward_native(x)
            out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
            kernels.silu_and_mul(out, x)
            return out
