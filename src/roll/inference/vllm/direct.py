"""Direct loading of new weights into vLLM's packed layers on a CPU.

    checkpoint tensors ─► parts of a fused projection, until it is complete ─► packed by vLLM's own function
                       ─► everything else: copied into the live parameter

vLLM's reload rebuilds every layer: it allocates each parameter twice, copies the tensors into it, packs it, and copies
the rest back. Here each tensor is read once. This is used if every tensor of the checkpoint has a known place (plain
linear layers, embeddings, norms); other models use the reload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DirectLoad", "TensorPlacement", "plan_direct"]


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """The place of a checkpoint tensor in vLLM's model."""

    module: Any
    """vLLM's layer."""
    parameter: str
    """`weight` or `bias`."""
    part: int
    """The index of the part of a fused projection; 0 for anything else."""
    parts: tuple[tuple[int, ...], ...]
    """The shapes of all parts, in order."""
    packed: bool
    """Whether it is a projection, which keeps only a packed copy."""
    output: bool = False
    """Whether it is a separate output layer, which keeps its weight in addition to the packed copy."""


def plan_direct(
    model: Any, expected: Mapping[str, tuple[int, ...]], *, tied: bool
) -> dict[str, TensorPlacement] | None:
    """Return the place of each tensor of the checkpoint; `None` where one has no known place.

    Args:
        model: vLLM's model, after loading, on one CPU worker.
        expected: The shapes of the checkpoint's tensors, by name.
        tied: Whether input and output embeddings are one tensor.
    """
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    places: dict[str, TensorPlacement] = {}
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        parent, _, name = path.rpartition(".")
        linear = isinstance(module, LinearBase)
        if linear and not (isinstance(module.quant_method, UnquantizedLinearMethod) and hasattr(module, "cpu_linear")):
            return None
        for parameter, held in own.items():
            names = [f"{parent}.{part}.{parameter}".lstrip(".") for part in fused.get(name, [name])]
            if tied and isinstance(module, ParallelLMHead):
                continue  # follows the input embedding
            if any(found not in expected for found in names):
                return None
            shapes = tuple(tuple(expected[found]) for found in names)
            packed = linear and parameter == "weight"
            rows, rest = sum(shape[0] for shape in shapes), shapes[0][1:]
            if packed:
                fits = (rows, *rest) == (module.output_size, module.input_size)
            elif isinstance(module, VocabParallelEmbedding):
                fits = rows <= held.shape[0] and rest == tuple(held.shape[1:])  # vLLM pads the vocabulary
            else:
                fits = (rows, *rest) == tuple(held.shape)
            if not fits or any(shape[1:] != rest for shape in shapes):
                return None
            for index, found in enumerate(names):
                places[found] = TensorPlacement(
                    module, parameter, index, shapes, packed, isinstance(module, ParallelLMHead)
                )
    derived = {n for n in expected if n.endswith("rotary_emb.inv_freq") or (tied and n.endswith("lm_head.weight"))}
    return places if set(expected) - derived <= set(places) else None


@dataclass(slots=True)
class DirectLoad:
    """The load of one update.

    Args:
        places: The places of all tensors.
    """

    places: Mapping[str, TensorPlacement]
    _waiting: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    """The parts that have arrived, by fused layer."""

    @torch.no_grad()
    def take(self, name: str, tensor: Tensor) -> None:
        """Load a tensor; a fused projection is packed with its last part.

        Args:
            name: The name in the checkpoint.
            tensor: The tensor, which must not change until its layer is complete.
        """
        place = self.places.get(name)
        if place is None:  # derived from others
            return
        if not place.packed:
            start = sum(shape[0] for shape in place.parts[: place.part])
            held = getattr(place.module, place.parameter).data
            held[start : start + len(tensor)].copy_(tensor)
            if place.output:
                place.module.quant_method.process_weights_after_loading(place.module)
            return
        parts = self._waiting.setdefault(id(place.module), {})
        parts[place.part] = tensor
        if len(parts) == len(place.parts):
            del self._waiting[id(place.module)]
            _pack(place.module, [parts[index] for index in range(len(parts))])

    def finish(self) -> set[str]:
        """Return the checkpoint's names whose layer lacks a part; empty after a complete update."""
        return {name for name, place in self.places.items() if id(place.module) in self._waiting}


def _pack(module: Any, parts: list[Tensor]) -> None:
    """Pack a layer's weight with vLLM's own function, which then drops the weight, as after loading."""
    weight = parts[0] if len(parts) == 1 else torch.cat(parts)
    module.weight = nn.Parameter(weight, requires_grad=False)
    module.quant_method.process_weights_after_loading(module)
