"""Split a model into pipeline stages of consecutive layers, in place.

    first stage     embeddings, layers 0 … a
    later stages    layers a + 1 … b
    last stage      layers … , last norm, vocabulary projection, value head; tied embeddings once more

With `vpp`, each stage has that many model chunks: stage r of p has the chunks r, p + r, 2p + r, … Layers and parameters
keep their names: modules of other stages are replaced by modules without weights (`model_chunks`).

`roll.config.staging` decides the number of layers per chunk. The vocabulary projection is treated as several layers:
its size divided by the number of weights that a token uses in one layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roll.config.staging import assign_layers
from roll.errors import ModelError
from roll.models import get_decoder
from roll.training.network.lora import Adapter, find_adapters
from roll.training.network.media import get_model_media
from roll.training.network.model_chunks import keep_model_chunks
from roll.training.network.packing_check import check_stages
from roll.training.network.weights import find_persistent_buffers
from roll.training.parallel.pipeline import Stage
from roll.training.parallel.tokens import TokenShard
from roll.training.precision import MasterWeights

__all__ = ["PipelineSplit", "check_split", "reduce_tied_gradients", "split_into_stages"]


@dataclass(frozen=True, kw_only=True)
class PipelineSplit:
    """This rank's pipeline stage, and a description of the whole model."""

    stage: Stage
    dtype: torch.dtype
    """The dtype of the hidden states between stages."""
    tensors: Mapping[str, Tensor]
    """The whole model's parameters and persistent buffers, in order and without data; a tied weight appears once."""
    stages_by_weight: Mapping[str, list[int]]
    """The stages that have each weight, by name. Only tied weights (embeddings, projection) have several stages."""
    adapters: Mapping[str, Adapter]
    """The whole model's adapters, by checkpoint name."""
    layers: tuple[range, ...]
    """The layers of this stage, by chunk."""

    @property
    def copies(self) -> frozenset[str]:
        """The names of weights that an earlier stage also has; the gradient norm includes these weights only in that
        stage.
        """
        return frozenset(name for name, stages in self.stages_by_weight.items() if self.stage.number in stages[1:])

    @property
    def tied(self) -> list[str]:
        """The names of weights that this stage shares with another stage."""
        return [
            name for name, stages in self.stages_by_weight.items() if len(stages) > 1 and self.stage.number in stages
        ]

    def gather_tensors(self, local_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the whole model by name; tensors that are not in `local_tensors` are on the meta
        device.
        """
        return {name: local_tensors.get(name, tensor) for name, tensor in self.tensors.items()}

    def send_to_first(self, name: str, tensor: Tensor) -> Tensor:
        """Send the full weight `name` from the stage that has it to rank 0, and return it there. Collective.

        The results on other ranks must not be used.
        """
        stage, owner = self.stage, self.stages_by_weight[name][0]
        if owner and stage.includes_rank_0:
            if stage.number == owner:
                stage.send_to_first_stage(tensor)
            elif stage.is_first:
                return stage.recv_from(owner, tensor)
        return tensor.new_empty(0, device="cpu") if tensor.is_meta else tensor


def check_split(network: Any, stage: Stage) -> None:
    """Check that a network can be split into the chunks of all stages. Every rank must have the whole network.

    Raises:
        ModelError: The network has fewer layers than chunks, or passes more than hidden states between layers.
    """
    models = [(get_decoder(model), model.get_output_embeddings()) for model in network.frozen_models]
    for decoder, projection in (*models, (network.decoder, network.projection)):
        if get_model_media(decoder) is not None:
            raise ModelError(
                f"{type(decoder).__name__} is a vision-language model, whose vision tower does not support pipeline "
                "stages: set training.parallel.pp to 1, and shard the model with training.parallel.tp or FSDP instead"
            )
        check_stages(decoder, [span.start for span in _split_layers(decoder, projection, stage)[1:]])


def split_into_stages(network: Any, stage: Stage, token_shard: TokenShard, dtype: torch.dtype) -> None:
    """Keep only this stage's part of a network that passed `check_split` and is whole on every rank. Collective.

    Args:
        network: `PolicyNetwork` or `ValueNetwork`, on the host.
        stage: The stage of this rank.
        token_shard: This rank's share of the tokens.
        dtype: The compute dtype of the network.

    Raises:
        ModelError: A weight would not belong to any stage.
    """
    whole = dict(network.root.named_parameters()) | find_persistent_buffers(network.root)
    adapters = find_adapters(network.root) if any(".lora_" in name for name in whole) else {}
    heads = [h for h in (getattr(network, "value_head", None), getattr(network, "score", None)) if h is not None]
    for model in network.frozen_models:
        decoder, projection = get_decoder(model), model.get_output_embeddings()
        keep_model_chunks(
            model, decoder, projection, (), stage, _split_layers(decoder, projection, stage), token_shard, dtype
        )
    spans = _split_layers(network.decoder, network.projection, stage)
    keep_model_chunks(network, network.decoder, network.projection, heads, stage, spans, token_shard, dtype)
    if getattr(network, "routing", None) is not None:
        network.routing.clear()
    tensors = dict(network.root.named_parameters()) | find_persistent_buffers(network.root)
    # Only the result of the split shows which names each stage has left, so the stages exchange them.
    held = [set(names) for names in stage.gather(list(tensors))]
    stages_by_weight = {name: [i for i, names in enumerate(held) if name in names] for name in whole}
    if lost := [name for name, stages in stages_by_weight.items() if not stages]:
        raise ModelError(
            f"{network.architecture} cannot be split into pipeline stages: no stage would have the weight "
            f"'{lost[0]}'; set training.parallel.pp to 1"
        )
    network.pipeline_split = PipelineSplit(
        stage=stage,
        dtype=dtype,
        tensors={name: _to_meta(tensor) for name, tensor in whole.items()},
        stages_by_weight=stages_by_weight,
        adapters=adapters,
        layers=tuple(spans[chunk.number] for chunk in stage.chunks),
    )


@torch.no_grad()
def reduce_tied_gradients(split: PipelineSplit, weights: MasterWeights) -> None:
    """Sum the gradients of tied weights over the two stages that share the weights. Collective."""
    for name in split.tied:
        if name in weights.parameters:
            grad = weights.get_grad(name)
            assert grad is not None, f"the loss did not reach {name} in stage {split.stage.number}"
            grad.add_(split.stage.exchange_between_ends(grad))


def _split_layers(decoder: Any, projection: Any, stage: Stage) -> list[range]:
    """Return the layers of each chunk of the model."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(f"{type(decoder).__name__} cannot be split into pipeline stages: its decoder has no `layers`")
    count = stage.count * stage.num_chunks
    if len(layers) < count:
        needed = (
            "requires at least as many"
            if stage.num_chunks == 1
            else (f"x vpp {stage.num_chunks} requires at least {count}")
        )
        raise ModelError(
            f"training.parallel.pp {stage.count} {needed} decoder layers, but {type(decoder).__name__} has "
            f"{len(layers)}: lower pp or vpp"
        )
    config = decoder.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    # Experts are stacked in tensors of three dimensions, of which a token uses `chosen` matrices.
    used = sum(p.numel() * (chosen / len(p) if p.ndim > 2 else 1) for p in layers.parameters()) / len(layers)
    weight = 0.0 if projection is None else projection.weight.numel() / used
    counts = assign_layers(len(layers), stage.count, stage.num_chunks, weight)
    return [range(sum(counts[:i]), sum(counts[: i + 1])) for i in range(count)]


def _to_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
