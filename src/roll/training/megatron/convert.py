"""Convert a trainer's HF network to Megatron's layers with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roll.config.model import LoRAConfig
from roll.config.training import TrainingConfig
from roll.errors import ModelError
from roll.models import get_decoder
from roll.training.distributed import Ranks
from roll.training.experts import find_experts
from roll.training.megatron.adapters import attach_adapters
from roll.training.megatron.full_weights import WeightPlacement
from roll.training.megatron.network import MegatronModel, build_transformer_config
from roll.training.megatron.weight_mapping import Shards, locate_weights
from roll.training.network.lora import find_adapters
from roll.training.network.pipeline_split import split_into_stages
from roll.training.network.policy import PolicyNetwork
from roll.training.network.value import ValueNetwork

__all__ = ["collect_weights", "convert_from_hf"]

Network = PolicyNetwork | ValueNetwork


def convert_from_hf(
    hf: Network, training: TrainingConfig, ranks: Ranks, lora: LoRAConfig | None = None
) -> tuple[Network, Any, WeightPlacement]:
    """Convert an HF network to Megatron. Return the network on this rank's device, Megatron's configuration of its
    layers, and the placement of all weights.

    Args:
        hf: The loaded network on the host. Its weights are freed; only its configuration can be used afterwards.
        training: The training configuration, with the parallel sizes.
        ranks: The ranks over which the network is sharded.
        lora: The configuration of the network's adapters, if it has adapters.

    Raises:
        ModelError: The model family is not supported, or the model cannot be sharded with this layout.
    """
    weights = collect_weights(hf)
    locations = locate_weights(list(weights), hf.decoder.config)
    dtype = next(iter(weights.values())).dtype
    config = build_transformer_config(hf.decoder, training, dtype)
    experts_mesh = ranks.experts_mesh
    shards = Shards(tp=ranks.share.tp, ep=None if experts_mesh is None else experts_mesh.get_group("ep"))
    # On the meta device first: each rank then allocates only its own stage.
    with torch.device("meta"):
        model = _build_model(config, hf if isinstance(hf, ValueNetwork) else hf.root, shards)
        if lora is not None:
            attach_adapters(model, find_adapters(hf.root), weights, locations, lora.dropout, shards.tp)
            layers: Any = model.model.layers
            for layer in layers:
                layer.has_dropout = lora.dropout > 0
        if isinstance(hf, ValueNetwork):
            network: Network = ValueNetwork(model)
        else:
            frozen = [
                None if each is None else _build_model(config, each, shards) for each in (hf.reference, *hf.teachers)
            ]
            network = PolicyNetwork(model, frozen[0], frozen[1:], value_head=hf.value_head is not None)
    everything = collect_weights(network)
    if ranks.stage is not None:
        split_into_stages(network, ranks.stage, ranks.share, dtype)
    _share_load_balancing(hf, network)
    placement = WeightPlacement(
        locations=locations,
        trained=tuple(name for name, weight in weights.items() if weight.requires_grad),
        parameters=everything,
        pipeline_split=network.pipeline_split,
        shards=shards,
    )
    _check_stages(placement)
    _materialize(network, ranks.device)
    network.share = ranks.share
    _set_attributes(collect_weights(network), placement)
    _load_weights(collect_weights(network), weights, network.decoder, hf.decoder, shards)
    for mine, other in zip(network.frozen_models, hf.frozen_models, strict=True):
        mine.requires_grad_(False)
        own = dict(mine.named_parameters()), dict(other.named_parameters())
        _load_weights(*own, get_decoder(mine), get_decoder(other), shards)
    # The HF weights are copied; keeping them would double the host memory.
    hf.to("meta")
    return network, config, placement


def _check_stages(placement: WeightPlacement) -> None:
    """Check that every pipeline stage has weights to train, because Megatron's optimizer needs some on every rank.

    Raises:
        ModelError: The adapters of the model are all in other stages.
    """
    split = placement.pipeline_split
    if split is None or not placement.trained:
        return
    trained = {placement.locations[name].parameter for name in placement.trained}
    last = split.stage.count - 1
    used = {stage for name in trained for stage in split.stages_by_weight.get(name, [last])}
    if idle := sorted(set(range(split.stage.count)) - used):
        raise ModelError(
            f"pipeline stage {idle[0]} has no adapters, and training.backend 'megatron' requires weights to train in "
            "every stage: change model.lora.target_modules, or set training.parallel.pp to 1"
        )


def _share_load_balancing(hf: Network, network: Network) -> None:
    """Give the routers of a network the settings of the HF network's routers."""
    for one in (hf, network):
        if not isinstance(one, PolicyNetwork) or one.routing is None:
            return
    network.routing.aux_coefficient = hf.routing.aux_coefficient  # type: ignore[union-attr]


def collect_weights(network: Network) -> dict[str, nn.Parameter]:
    """Return all weights of a network except those of its frozen models, in order."""
    heads = network.heads if isinstance(network, PolicyNetwork) else {}
    return dict(network.root.named_parameters()) | heads


def _build_model(config: Any, hf: Any, shards: Shards) -> MegatronModel:
    """Build the Megatron model that corresponds to an HF model or a value network, on the current default device."""
    score = hf.score if isinstance(hf, ValueNetwork) and hf.is_reward_model else None
    has_projection = "lm_head.weight" in dict(hf.named_parameters())
    decoder = hf.decoder if isinstance(hf, ValueNetwork) else get_decoder(hf)
    experts = {i: layer.mlp for i, layer in enumerate(decoder.layers) if find_experts(layer)}
    return MegatronModel(
        config, decoder.config, experts, shards.ep, has_separate_projection=has_projection, score=score
    )


def _materialize(network: nn.Module, device: torch.device) -> None:
    """Allocate the parameters in place; tied parameters stay tied, and parameters keep the attributes that Megatron
    set.
    """
    before = dict(network.named_parameters(remove_duplicate=False))
    network.to_empty(device=device)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, old in before.items():
        path, _, last = name.rpartition(".")
        new = made.setdefault(old, network.get_parameter(name))
        new.__dict__.update(old.__dict__)
        network.get_submodule(path)._parameters[last] = new


def _set_attributes(parameters: dict[str, nn.Parameter], placement: WeightPlacement) -> None:
    """Freeze the parameters that are not trained, and set Megatron's attributes of parameters that are sharded over tp
    or shared with another pipeline stage.

    The gradient norm includes sharded parameters from every rank, and all other parameters once. Megatron itself sets
    these attributes only when it initializes weights.
    """
    copies = () if placement.pipeline_split is None else placement.pipeline_split.copies
    trained = set(placement.trained)
    for name, location in placement.locations.items():
        parameter: Any = parameters.get(location.parameter)
        if parameter is None:
            continue
        parameter.requires_grad_(name in trained)
        has_tp = placement.shards.tp is not None
        parameter.tensor_model_parallel = has_tp and location.dim is not None and not location.is_expert
        parameter.shared = location.parameter in copies
        # Each tp rank computes the gradient of a replicated weight for its own tokens or heads.
        parameter.sequence_parallel = has_tp and location.dim is None
        parameter.allreduce = not location.is_expert  # Megatron's name for weights that all data ranks have


def _load_weights(
    parameters: dict[str, nn.Parameter], weights: dict[str, nn.Parameter], decoder: Any, hf: Any, shards: Shards
) -> None:
    """Copy an HF model's weights, and its RoPE frequencies, into Megatron's modules."""
    locations = locate_weights(list(weights), hf.config)
    with torch.no_grad():
        for name, weight in weights.items():
            location = locations[name]
            if location.parameter in parameters:
                location.write(parameters[location.parameter].data, weight.detach(), shards.get_ranks(location))
    device = next(iter(parameters.values())).device
    decoder.frequencies = hf.rotary_emb.inv_freq.float().to(device)
