"""Products of LoRA adapters for vLLM on a CPU: two matmuls per adapter instead of a gathered matrix per token.

The CPU build of vLLM 0.32 copies the matrices A and B once for each token of a batch (`bgmv_shrink`, `bgmv_expand`), so
an adapter costs more than the model. Here, the tokens of a batch are grouped by adapter when the batch is set up, and
each layer computes two products per adapter, in the model's dtype as the trainer does. The outputs of
tokens without an adapter do not change. The module can be removed when vLLM groups tokens on a CPU, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from vllm.lora.layers import LoRAMapping

__all__ = ["add_products", "group_tokens", "register_lora_kernels"]

_registered = False


def group_tokens(slots: Tensor) -> list[tuple[int, Tensor | None]]:
    """Return the slots that tokens use, with the indices of their tokens; `None` stands for all tokens.

    Args:
        slots: The slot of each token [N]; -1 for tokens without an adapter.
    """
    used = [slot for slot in torch.unique(slots).tolist() if slot >= 0]
    if len(used) == 1 and bool((slots == used[0]).all()):
        return [(used[0], None)]
    return [(slot, (slots == slot).nonzero()[:, 0]) for slot in used]


def add_products(
    y: Tensor,
    x: Tensor,
    groups: list[tuple[int, Tensor | None]],
    a_stacked: tuple[Tensor, ...],
    b_stacked: tuple[Tensor, ...],
    output_slices: tuple[int, ...],
) -> None:
    """Add the adapters' products to the outputs of a layer, in place.

    Args:
        y: The outputs [N, outputs].
        x: The inputs [N, inputs].
        groups: The result of `group_tokens`.
        a_stacked: For each part of a fused layer, the matrices A of all slots [slots, 1, rank, inputs].
        b_stacked: For each part, the matrices B of all slots [slots, 1, outputs of the part, rank].
        output_slices: The number of outputs of each part.
    """
    for slot, tokens in groups:
        rows = x if tokens is None else x[tokens]
        start = 0
        for a, b, width in zip(a_stacked, b_stacked, output_slices, strict=True):
            product = functional.linear(functional.linear(rows, a[slot, 0]), b[slot, 0])
            part = y[:, start : start + width]
            if tokens is None:
                part += product
            else:
                part.index_add_(0, tokens, product)
            start += width


def register_lora_kernels() -> None:
    """Patch vLLM's CPU workers to compute adapters with `add_products`; do nothing on other platforms."""
    global _registered
    from vllm.platforms import current_platform

    if _registered or not current_platform.is_cpu():
        return
    _registered = True
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    update_metadata = PunicaWrapperCPU.update_metadata

    def update_and_group(self: Any, mapping: LoRAMapping, *args: Any, **kwargs: Any) -> None:
        update_metadata(self, mapping, *args, **kwargs)
        self.roll_groups = group_tokens(self.token_lora_indices)

    def add_lora_linear(
        self: Any,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **unused: Any,
    ) -> None:
        assert scale == 1.0, "vLLM multiplies the matrices B by the scale in advance"
        add_products(
            y.view(-1, y.shape[-1]),
            x.view(-1, x.shape[-1]),
            self.roll_groups,
            lora_a_stacked,
            lora_b_stacked,
            output_slices,
        )

    PunicaWrapperCPU.update_metadata = update_and_group
    PunicaWrapperCPU.add_lora_linear = add_lora_linear
