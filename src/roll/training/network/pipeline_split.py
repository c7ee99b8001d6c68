"""Pipeline parallelism: division of a model into stages of consecutive layers, in place.

    first stage     embeddings, layers 0 … a
    later stages    layers a + 1 … b
    last stage      layers … , last norm, vocabulary projection, value head; tied embeddings once more

With `vpp`, each stage has that many model chunks: stage r of p has the chunks r, p + r, 2p + r, … Layers and parameters
keep their names: modules of other stages are replaced by modules without weights (`model_chunks`).

`roll.config.staging` decides the number of layers per part. The vocabulary projection counts as a number of layers: its
size divided by the weights of one layer that a token is multiplied with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roll.config.staging import layers_by_part
from roll.errors import ModelError
from roll.models import decoder_of
from roll.training.network.lora import Adapter, find_adapters
from roll.training.network.model_chunks import keep_model_chunks
from roll.training.network.packing_check import check_stages
from roll.training.network.weights import persistent_buffers
from roll.training.parallel.pipeline import Stage
from roll.training.parallel.tokens import TokenShare
from roll.training.precision import MasterWeights

__all__ = ["PipelineSplit", "check_split", "reduce_tied_gradients", "split_into_stages"]


@dataclass(frozen=True, kw_only=True)
class PipelineSplit:
    """A rank's view of the whole model of which it has one stage."""

    stage: Stage
    dtype: torch.dtype
    """The dtype of the hidden states between stages."""
    tensors: Mapping[str, Tensor]
    """The whole model's parameters and persistent buffers, tied ones once, in order, without data."""
    stages_of: Mapping[str, list[int]]
    """The stages that have each weight, by name. Two stages share only tied weights: embeddings and vocabulary
    projection."""
    adapters: Mapping[str, Adapter]
    """The whole model's adapters, by checkpoint name."""
    layers: tuple[range, ...]
    """The layers of this stage, by part."""

    @property
    def copies(self) -> frozenset[str]:
        """The weights of this stage that an earlier stage also has, and counts."""
        return frozenset(name for name, stages in self.stages_of.items() if self.stage.number in stages[1:])

    @property
    def tied(self) -> list[str]:
        """The weights of this stage that another stage also has."""
        return [name for name, stages in self.stages_of.items() if len(stages) > 1 and self.stage.number in stages]

    def all_tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole model's tensors; those of other stages have no data."""
        return {name: own.get(name, tensor) for name, tensor in self.tensors.items()}

    def send_to_first(self, name: str, tensor: Tensor) -> Tensor:
        """Send a whole tensor from the stage that has it to rank 0; the result on other ranks is not meaningful.
        Collective.
        """
        stage, owner = self.stage, self.stages_of[name][0]
        if owner and stage.with_first:
            if stage.number == owner:
                stage.send_to_first(tensor)
            elif stage.is_first:
                return stage.recv_from(owner, tensor)
        return tensor.new_empty(0, device="cpu") if tensor.is_meta else tensor


def check_split(network: Any, stage: Stage) -> None:
    """Check that a network, whole on every rank, can be cut into the stage's number of parts.

    Raises:
        ModelError: the network has fewer layers than parts, or passes more than hidden states between layers.
    """
    models = [(decoder_of(model), model.get_output_embeddings()) for model in network.frozen_models]
    for decoder, projection in (*models, (network.decoder, network.projection)):
        check_stages(decoder, [span.start for span in _spans(decoder, projection, stage)[1:]])


def split_into_stages(network: Any, stage: Stage, share: TokenShare, dtype: torch.dtype) -> None:
    """Keep only this stage's part of a network that passed `check_split` and is whole on every rank. Collective.

    Args:
        network: `PolicyNetwork` or `ValueNetwork`, on the host.
        stage: The stage of this rank.
        share: This rank's share of the tokens.
        dtype: The dtype that the network computes in.

    Raises:
        ModelError: a weight would not be in any stage.
    """
    whole = dict(network.root.named_parameters()) | persistent_buffers(network.root)
    adapters = find_adapters(network.root) if any(".lora_" in name for name in whole) else {}
    heads = [h for h in (getattr(network, "value_head", None), getattr(network, "score", None)) if h is not None]
    for model in network.frozen_models:
        decoder, projection = decoder_of(model), model.get_output_embeddings()
        keep_model_chunks(model, decoder, projection, (), stage, _spans(decoder, projection, stage), share, dtype)
    spans = _spans(network.decoder, network.projection, stage)
    keep_model_chunks(network, network.decoder, network.projection, heads, stage, spans, share, dtype)
    if getattr(network, "routing", None) is not None:
        network.routing.clear()
    own = dict(network.root.named_parameters()) | persistent_buffers(network.root)
    held = [set(names) for names in stage.gather(list(own))]
    stages_of = {name: [i for i, names in enumerate(held) if name in names] for name in whole}
    if lost := [name for name, stages in stages_of.items() if not stages]:
        raise ModelError(f"'{lost[0]}' would be in no stage of {network.architecture}: set training.parallel.pp to 1")
    network.pipeline_split = PipelineSplit(
        stage=stage,
        dtype=dtype,
        tensors={name: _without_data(tensor) for name, tensor in whole.items()},
        stages_of=stages_of,
        adapters=adapters,
        layers=tuple(spans[part.number] for part in stage.chunks),
    )


@torch.no_grad()
def reduce_tied_gradients(cut: PipelineSplit, weights: MasterWeights) -> None:
    """Sum the gradients of tied weights over the two stages that hold them. Collective."""
    for name in cut.tied:
        if name in weights.parameters:
            grad = weights.grad(name)
            assert grad is not None, f"the loss did not reach {name} in stage {cut.stage.number}"
            grad.add_(cut.stage.exchange_with_other_end(grad))


def _spans(decoder: Any, projection: Any, stage: Stage) -> list[range]:
    """Return the layers of each part of the model."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(f"{type(decoder).__name__} cannot be split into pipeline stages: its decoder has no `layers`")
    count = stage.count * stage.num_chunks
    if len(layers) < count:
        parts = "needs as many" if stage.num_chunks == 1 else f"x vpp {stage.num_chunks} needs {count}"
        raise ModelError(
            f"training.parallel.pp {stage.count} {parts} decoder layers, but {type(decoder).__name__} has "
            f"{len(layers)}: lower it"
        )
    config = decoder.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    used = sum(p.numel() * (chosen / len(p) if p.ndim > 2 else 1) for p in layers.parameters()) / len(layers)
    weight = 0.0 if projection is None else projection.weight.numel() / used
    counts = layers_by_part(len(layers), stage.count, stage.num_chunks, weight)
    return [range(sum(counts[:i]), sum(counts[: i + 1])) for i in range(count)]


def _without_data(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
