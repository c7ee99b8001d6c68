"""Mixtures of experts in Megatron's layers: the HF model's router, and experts that are sharded over the ep ranks.

Router, dispatch and grouped matmuls are those of the back-end `torch` (`roll.training.parallel.experts`), so recorded
experts can be replayed, and loads are counted. Megatron's own dispatchers need CUDA streams, and its grouped matmuls
need Transformer Engine or a CUDA extension. Megatron sums the experts' gradients over the ranks that have the same
experts, and shards their optimizer states over these ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.training.experts import find_experts, use_grouped_gemm
from roll.training.network.packing_check import make_packable
from roll.training.parallel.experts import build_dispatch_forward

__all__ = ["ExpertBlock"]


class ExpertBlock(nn.Module):
    """The MoE block of one layer, with the interface of Megatron's MLPs.

    Args:
        hf: The layer's MoE block in the HF model.
        hf_config: The configuration of the HF model.
        dtype: The dtype of the weights.
        ep: The ranks over which the experts are sharded.
    """

    def __init__(self, hf: nn.Module, hf_config: Any, dtype: torch.dtype, ep: ProcessGroup | None) -> None:
        super().__init__()
        # A new module, because the HF model's module has hooks of the HF network.
        self.block = type(hf)(hf_config).to(dtype)
        make_packable(self.block)
        use_grouped_gemm(self.block)
        if ep is None:
            return
        for experts in find_experts(self.block).values():
            for name, parameter in experts._parameters.items():
                experts._parameters[name] = nn.Parameter(parameter.detach().chunk(ep.size())[0].clone())
            experts.forward = build_dispatch_forward(experts, ep)

    def forward(self, states: Tensor, padding_mask: None = None) -> tuple[Tensor, None]:
        """Return the outputs [n, 1, H] for hidden states [n, 1, H], and no bias."""
        return self.block(states.transpose(0, 1)).transpose(0, 1), None
