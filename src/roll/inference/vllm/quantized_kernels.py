"""8-bit products of vLLM on a CPU: layers that vLLM 0.32 cannot compute, or only very slowly.

int8. vLLM's kernel for AMX accepts neither float32 inputs nor a number of output channels that is not a multiple of 32
(it checks for multiples of 16, and then fails when it packs the weight). Such layers use vLLM's oneDNN kernel, as all
layers do on CPUs without AMX. vLLM passes it the address of the scales only, and frees them at the next weight sync, so
log-probs became NaN. Codes that oneDNN has packed cannot be read back.

fp8. Without AMX-FP8, vLLM calls `torch._scaled_mm`, whose reference implementation takes 0.7 s for 17 tokens and a
weight of 1536 x 576. Every fp8 number is also a number in bfloat16, so a bfloat16 product of the codes has the same
terms, and takes 2 ms. The result is rounded to bfloat16 before it is scaled. The codes are stored twice, in 8 bits and
packed in 16 bits, so this does not save memory: it shows how a policy learns with fp8 engines.

Both classes can be removed when vLLM's kernels accept these layers, or are as fast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["register_quantized_kernels"]

BLOCK_ROWS = 32
"""Number of output channels that vLLM's int8 kernel for AMX packs together."""


def register_quantized_kernels() -> None:
    """Make vLLM models that are built later in this process use these kernels; do nothing on other platforms."""
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.kernels import linear

    linear._POSSIBLE_INT8_KERNELS[PlatformEnum.CPU].insert(0, _build_int8_kernel())
    linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU].insert(0, _build_fp8_kernel())


def _build_int8_kernel() -> Any:
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

    class Int8Kernel(CPUInt8ScaledMMLinearKernel):
        """vLLM's int8 product, which uses the kernel for AMX only for layers that this kernel accepts."""

        def process_weights_after_loading(self, layer: Any) -> None:
            """Pack the weight."""
            # vLLM sets the default dtype to the model's dtype while it builds and loads the model.
            if torch.get_default_dtype() == torch.float32 or len(layer.weight) % BLOCK_ROWS:
                self.linear_method = self._apply_weights_onednn
                self.process_weights_for_onednn(layer)
            else:
                super().process_weights_after_loading(layer)

        def process_weights_for_onednn(self, layer: Any) -> None:
            """Pack the weight for oneDNN, and keep the scales, of which the packed weight has only the address."""
            super().process_weights_for_onednn(layer)
            self._scales = layer.weight_scale.data

    return Int8Kernel


def _build_fp8_kernel() -> Any:
    from vllm import _custom_ops as ops
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    class Fp8Kernel(ChannelWiseTorchFP8ScaledMMLinearKernel):
        """An fp8 product with scales per channel and per token, computed in the model's dtype."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            """Return whether the kernel can be used, and the reason why it cannot."""
            native = ops.cpu_has_amx_fp8()
            return (False, "vLLM has a kernel for AMX-FP8.") if native else (True, None)

        def get_output_padding(self) -> int | None:
            """Return `None`: the number of tokens is not padded."""
            return None

        def process_weights_after_loading(self, layer: Any) -> None:
            """Pack a copy of the codes in the model's dtype. `layer.weight` keeps the codes [inputs, outputs]."""
            codes = layer.weight.data.t().to(self.config.out_dtype).contiguous()
            self._packed = nn.Module()
            self._packed.weight = nn.Parameter(codes, requires_grad=False)
            dispatch_cpu_unquantized_gemm(self._packed, remove_weight=True)

        def apply_scaled_mm(
            self,
            *,
            A: Tensor,
            B: Tensor,
            out_dtype: Any,
            As: Tensor,
            Bs: Tensor,
            bias: Tensor | None,
            output_shape: list[int],
        ) -> Tensor:
            """Return the product of codes `A` [tokens, inputs] and the packed codes, scaled, plus the bias."""
            held: Any = self._packed
            product = held.cpu_linear(A.to(self.config.out_dtype), held.weight, None)
            scaled = product.float().mul_(As).mul_(Bs.t())
            if bias is not None:
                scaled += bias
            return scaled.to(out_dtype).view(*output_shape)

    return Fp8Kernel
