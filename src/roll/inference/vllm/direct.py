"""Weight sync on a CPU: loads new weights directly into vLLM's packed layers.

    checkpoint tensors ─► parts of a fused projection, until it is complete ─► packed by vLLM's function
                       ─► all others: copied into the parameter

vLLM's reload rebuilds every layer: it allocates each parameter twice, copies the tensors into it, packs it, and copies
the other parameters back. Here, each tensor is read once. This requires a known parameter for every checkpoint tensor
(plain linear layers, embeddings, norms); other models use vLLM's reload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DirectLoader", "TensorPlacement", "plan_direct_load"]


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """The parameter of vLLM's model into which a checkpoint tensor is loaded."""

    module: Any
    """vLLM's layer."""
    parameter: str
    """`weight` or `bias`."""
    part_index: int
    """The index of the tensor among the parts of a fused projection; 0 for other layers."""
    part_shapes: tuple[tuple[int, ...], ...]
    """The shapes of all parts of the parameter, in order."""
    is_packed: bool
    """True if the layer is a projection that stores only a packed copy of its weight."""
    is_output: bool = False
    """True if the layer is a separate output layer, which stores its weight and a packed copy."""


def plan_direct_load(
    model: Any, expected: Mapping[str, tuple[int, ...]], *, tied: bool
) -> dict[str, TensorPlacement] | None:
    """Return the placement of each checkpoint tensor in the model, by name; `None` if model and files do not match.

    Args:
        model: vLLM's model, after loading, on one CPU worker.
        expected: The shapes of the checkpoint's tensors, by name.
        tied: Whether input and output embeddings are one tensor.
    """
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    placements: dict[str, TensorPlacement] = {}
    for path, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if not parameters:
            continue
        parent, _, name = path.rpartition(".")
        linear = isinstance(module, LinearBase)
        if linear and not (isinstance(module.quant_method, UnquantizedLinearMethod) and hasattr(module, "cpu_linear")):
            return None
        for parameter, held in parameters.items():
            names = [f"{parent}.{part}.{parameter}".lstrip(".") for part in fused.get(name, [name])]
            if tied and isinstance(module, ParallelLMHead):
                continue  # updated with the input embedding
            if any(tensor not in expected for tensor in names):
                return None
            shapes = tuple(tuple(expected[tensor]) for tensor in names)
            packed = linear and parameter == "weight"
            rows, rest = sum(shape[0] for shape in shapes), shapes[0][1:]
            if packed:  # vLLM holds only the packed copy, so the sizes are read from the layer
                fits = (rows, *rest) == (module.output_size, module.input_size)
            elif isinstance(module, VocabParallelEmbedding):
                fits = rows <= held.shape[0] and rest == tuple(held.shape[1:])  # vLLM pads the vocabulary
            else:
                fits = (rows, *rest) == tuple(held.shape)
            if not fits or any(shape[1:] != rest for shape in shapes):
                return None
            for index, tensor in enumerate(names):
                placements[tensor] = TensorPlacement(
                    module, parameter, index, shapes, packed, isinstance(module, ParallelLMHead)
                )
    # vLLM computes the rotary frequencies itself, and a tied output layer has no tensor of its own.
    derived = {n for n in expected if n.endswith("rotary_emb.inv_freq") or (tied and n.endswith("lm_head.weight"))}
    return placements if set(expected) - derived <= set(placements) else None


@dataclass(slots=True)
class DirectLoader:
    """Copies the tensors of one weight update directly into the model's layers, without vLLM's reload.

    Args:
        placements: The placement of each tensor, by name.
    """

    placements: Mapping[str, TensorPlacement]
    _received_parts: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    """The received parts of each incomplete fused layer, by part index."""

    @torch.no_grad()
    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Load a tensor; ignore it if it has no placement. A fused projection is packed when its last part arrives.

        Args:
            name: The name in the checkpoint.
            tensor: The tensor, which must not change until its layer is complete.
        """
        placement = self.placements.get(name)
        if placement is None:  # derived from other tensors
            return
        if not placement.is_packed:
            start = sum(shape[0] for shape in placement.part_shapes[: placement.part_index])
            held = getattr(placement.module, placement.parameter).data
            held[start : start + len(tensor)].copy_(tensor)
            if placement.is_output:  # vLLM computes with the packed copy, which only this call creates
                placement.module.quant_method.process_weights_after_loading(placement.module)
            return
        parts = self._received_parts.setdefault(id(placement.module), {})
        parts[placement.part_index] = tensor
        if len(parts) == len(placement.part_shapes):
            del self._received_parts[id(placement.module)]
            _pack(placement.module, [parts[index] for index in range(len(parts))])

    def finish(self) -> set[str]:
        """Return the checkpoint names of tensors in incomplete fused layers; empty after a complete update."""
        return {name for name, placement in self.placements.items() if id(placement.module) in self._received_parts}


def _pack(module: Any, parts: list[Tensor]) -> None:
    """Concatenate the parts of a layer's weight and pack it with vLLM's function, which frees the unpacked weight."""
    weight = parts[0] if len(parts) == 1 else torch.cat(parts)
    module.weight = nn.Parameter(weight, requires_grad=False)
    module.quant_method.process_weights_after_loading(module)
