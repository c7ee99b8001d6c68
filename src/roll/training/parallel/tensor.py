"""Tensor parallelism: sharding of a model's weights over the `tp` ranks, in place.

The model's own plan (`base_model_tp_plan` of its configuration) decides which projections are sharded by outputs and
which by inputs. Parameters become DTensors under their old names. Modules compute with this rank's part of the
parameters, as plain tensors, so that the trainer's other replacements in a model keep working. Between attention and
MLP, activations are sharded by tokens: norms and residuals are computed once, not by every rank.

    module                    weight        input                      output
    q, k, v, gate, up         Shard(0)      all tokens                 this rank's heads or columns
    o, down                   Shard(1)      heads or columns           summed, this rank's tokens
    embeddings                Shard(0)      all tokens                 summed, this rank's tokens
    adapters                  A of an input projection and B of an output projection are replicated, the others sharded
    anything else             replicated    this rank's tokens, or (modules that mix tokens) all of them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from roll.errors import ModelError
from roll.models.tensor_parallel import COLUMN_STYLES, ROW_STYLES, choose_styles, list_sharded_sizes
from roll.training.parallel.collectives import all_gather, reduce_scatter
from roll.training.parallel.pipeline import PassThrough

__all__ = ["apply_tensor_parallel", "get_local_part", "replicate"]

_POINTWISE_MODULES = ("mlp", "feed_forward", "block_sparse_moe")
"""Parts of a layer that process each token separately."""


def get_local_part(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter as a plain tensor.

    The gradients of a replicated parameter are summed over the ranks.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    # Each rank computes a share of the gradient of a replicated parameter.
    grads = [Partial() if isinstance(p, Replicate) else p for p in parameter.placements]
    return parameter.to_local(grad_placements=grads)


def apply_tensor_parallel(root: nn.Module, decoder: Any, projection: nn.Module | None, mesh: DeviceMesh) -> None:
    """Shard the weights below `root` over a one-dimensional mesh.

    Args:
        root: A whole model, identical on every rank.
        decoder: The backbone, with `layers` and `embed_tokens`.
        projection: The projection to the vocabulary; only its weight is used.
        mesh: The mesh of the `tp` ranks.

    Raises:
        ModelError: The model's sizes cannot be sharded, or transformers has no tensor-parallel plan for it.
    """
    styles = _choose_styles(decoder)
    embeddings = decoder.get_input_embeddings()
    _check_sizes(decoder, embeddings, mesh.size(), styles)
    group = mesh.get_group()
    made: dict[int, nn.Parameter] = {}
    style_of = {inner: style for name, style in styles.items() for inner in decoder.get_submodule(name).modules()}
    towers = _find_towers(root, decoder, projection)
    for name, module in list(root.named_modules()):
        if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            continue  # experts that are sharded already
        style = style_of.get(module)
        is_vocabulary = module is embeddings or module is projection
        for parameter_name, parameter in module._parameters.items():
            if parameter is not None:
                placement = Shard(0) if is_vocabulary else _choose_placement(style, name, parameter)
                if id(parameter) not in made:  # tied parameters stay tied
                    made[id(parameter)] = _shard_parameter(parameter, placement, mesh)
                module._parameters[parameter_name] = made[id(parameter)]
        # In later pipeline stages, a stand-in without weights replaces the embeddings.
        if module is embeddings and not isinstance(module, PassThrough):
            module.forward = _build_embedding_forward(module, group)
        elif module._parameters and not any(module is inner for tower in towers for inner in tower.modules()):
            module.forward = _build_local_parameter_forward(
                [module], module.forward, 1 / mesh.size() if style in ROW_STYLES else 1.0
            )
    for tower in towers:  # a module of a tower may use parameters of another (`nn.MultiheadAttention` does)
        tower.forward = _build_local_parameter_forward([m for m in tower.modules() if m._parameters], tower.forward)
    _insert_collectives(decoder, styles, group)


def replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate a module's weights on every rank of the mesh, as one parameter with one gradient."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = _shard_parameter(parameter, Replicate(), mesh)


def _find_towers(root: nn.Module, decoder: nn.Module, projection: nn.Module | None) -> list[nn.Module]:
    """Return the largest modules outside of the decoder and the projection: a vision tower and its projector."""
    found: list[nn.Module] = []
    for child in root.children():
        if child is decoder or child is projection:
            continue
        inside = list(child.modules())
        if decoder in inside or projection in inside:
            found += _find_towers(child, decoder, projection)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found


def _choose_styles(decoder: Any) -> dict[str, str]:
    """Return the tensor-parallel style of each sharded module, by name; see `choose_styles`."""
    styles = choose_styles(decoder)
    if not styles:
        raise ModelError(
            f"{type(decoder).__name__} cannot be sharded over training.parallel.tp: transformers has no plan for it "
            "(base_model_tp_plan); set tp to 1"
        )
    return styles


def _check_sizes(decoder: Any, embeddings: Any, size: int, styles: dict[str, str]) -> None:
    sizes = {**list_sharded_sizes(decoder, styles), "vocabulary": embeddings.weight.shape[0]}
    wrong = {name: count for name, count in sizes.items() if count % size}
    if wrong:
        raise ModelError(
            ", ".join(f"{name} ({count})" for name, count in wrong.items())
            + f" must be divisible by training.parallel.tp ({size}); supported sizes: "
            + _format_divisors(math.gcd(*sizes.values()))
        )


def _format_divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, min(number, 64) + 1) if number % size == 0)


def _choose_placement(style: str | None, name: str, parameter: Tensor) -> Placement:
    if style in COLUMN_STYLES and ".lora_A." not in name:
        return Shard(0)
    if style in ROW_STYLES and ".lora_B." not in name and parameter.ndim > 1:
        return Shard(1)
    return Replicate()


def _shard_parameter(parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh) -> nn.Parameter:
    part = parameter.detach()
    if isinstance(placement, Shard):
        chunk = part.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
        part = chunk.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(
        DTensor.from_local(part, mesh, [placement], run_check=False), requires_grad=parameter.requires_grad
    )


def _build_local_parameter_forward(
    modules: Sequence[nn.Module], original_forward: Callable[..., Any], bias_fraction: float = 1.0
) -> Callable[..., Any]:
    """Return a `forward` that calls `original_forward` with this rank's parts as the parameters of `modules`.

    Args:
        modules: The modules whose parameters `original_forward` uses.
        original_forward: The original `forward`.
        bias_fraction: The factor by which this rank's bias is multiplied if outputs are summed over the ranks.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        before = [dict(module.__dict__) for module in modules]
        for module in modules:
            parts = {name: get_local_part(p) for name, p in module._parameters.items() if p is not None}
            if bias_fraction != 1.0 and "bias" in parts:
                parts["bias"] = parts["bias"] * bias_fraction
            module.__dict__.update(parts)  # attribute lookup finds these before the parameters
        try:
            return original_forward(*args, **kwargs)
        finally:
            for module, own_before in zip(modules, before, strict=True):
                for name in module._parameters:
                    if name in own_before:
                        module.__dict__[name] = own_before[name]
                    else:
                        module.__dict__.pop(name, None)

    return forward


def _build_embedding_forward(embeddings: Any, group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Return a `forward` that computes embeddings [1, n / size, H] of this rank's tokens from ids [1, n].

    Each rank looks up its part of the vocabulary.
    """
    looked_up = _build_local_parameter_forward([embeddings], embeddings.forward)
    count = embeddings.weight.shape[0] // group.size()
    first = group.rank() * count
    padding = embeddings.padding_idx
    # Relative to this rank's part: `nn.Embedding` gives the row of this index no gradient.
    embeddings.padding_idx = None if padding not in range(first, first + count) else padding - first

    def forward(ids: Tensor) -> Tensor:
        local = ids - first
        here = (local >= 0) & (local < count)
        found = looked_up(local.clamp(0, count - 1)) * here[..., None]
        return reduce_scatter(found[0], group)[None].clone()  # FSDP cannot track a view

    return forward


def _insert_collectives(decoder: Any, styles: dict[str, str], group: ProcessGroup) -> None:
    """Insert the collectives that move activations between token shards and head or column shards."""
    parents: set[str] = set()
    for name, style in styles.items():
        module = decoder.get_submodule(name)
        if style in ROW_STYLES:
            module.forward = _build_reduce_scatter_forward(module.forward, group, splits=style == "rowwise_split_input")
        else:
            parents.add(name.rpartition(".")[0])
            if style == "colwise_gather_output":
                module.forward = _build_output_gather_forward(module.forward, group)
    for name in parents:
        module = decoder.get_submodule(name)
        module.forward = _build_all_tokens_forward(module.forward, group)
    for module in _iter_replicated_mixers(decoder, parents):
        if any(isinstance(p, DTensor) for p in module.parameters()):
            inner = [m for m in module.modules() if m._parameters]  # modules that may use parameters directly
            whole = _build_local_parameter_forward(inner, _build_all_tokens_forward(module.forward, group))
            module.forward = _build_local_tokens_forward(whole, group)


def _iter_replicated_mixers(decoder: Any, sharded: set[str]) -> Iterator[nn.Module]:
    """Yield the modules of layers that mix tokens, such as attention, unless their path is in `sharded`."""
    for i, layer in enumerate(decoder.layers):
        for name, module in layer.named_children():
            path = f"layers.{i}.{name}"
            if path not in sharded and name not in _POINTWISE_MODULES and "norm" not in name.lower():
                yield module


def _build_reduce_scatter_forward(
    original_forward: Callable[..., Tensor], group: ProcessGroup, *, splits: bool
) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if splits:
            x = x.chunk(group.size(), -1)[group.rank()]
        return _apply_to_row(reduce_scatter, original_forward(x), group)

    return forward


def _build_output_gather_forward(
    original_forward: Callable[..., Tensor], group: ProcessGroup
) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return all_gather(original_forward(x).movedim(-1, 0), group).movedim(0, -1)

    return forward


def _build_all_tokens_forward(original_forward: Callable[..., Any], group: ProcessGroup) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_apply_to_row(all_gather, args[0], group), *args[1:])
        else:
            kwargs["hidden_states"] = _apply_to_row(all_gather, kwargs["hidden_states"], group)
        return original_forward(*args, **kwargs)

    return forward


def _apply_to_row(collective: Callable[[Tensor, ProcessGroup], Tensor], states: Tensor, group: ProcessGroup) -> Tensor:
    """Apply a collective to a row's states, [1, n, H] or [n, H] (experts get a row without its first dimension)."""
    return collective(states, group) if states.ndim == 2 else collective(states[0], group)[None]


def _build_local_tokens_forward(original_forward: Callable[..., Any], group: ProcessGroup) -> Callable[..., Any]:
    """Return a `forward` that computes all tokens with `original_forward` but returns only this rank's tokens.

    The gradient of each token then comes from one rank only, so gradients of replicated weights may be summed over
    ranks.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        result = original_forward(*args, **kwargs)
        states = result[0] if isinstance(result, tuple) else result
        # The gradient of every token comes from one rank only, so the sum over ranks is right.
        part = states.chunk(group.size(), 1)[group.rank()]
        return (part, *result[1:]) if isinstance(result, tuple) else part

    return forward
