"""Convert a trainer's HF network to Megatron's layers with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roll.config.training import TrainingConfig
from roll.models import get_decoder
from roll.training.distributed import Ranks
from roll.training.megatron.full_weights import WeightPlacement
from roll.training.megatron.network import MegatronModel, build_transformer_config
from roll.training.megatron.weight_mapping import locate_weights
from roll.training.network.pipeline_split import split_into_stages
from roll.training.network.policy import PolicyNetwork
from roll.training.network.value import ValueNetwork

__all__ = ["collect_weights", "convert_from_hf"]

Network = PolicyNetwork | ValueNetwork


def convert_from_hf(hf: Network, training: TrainingConfig, ranks: Ranks) -> tuple[Network, Any, WeightPlacement]:
    """Convert an HF network to Megatron. Return the network on this rank's device, Megatron's configuration of its
    layers, and the placement of all weights.

    Args:
        hf: The loaded network on the host. Its weights are freed; only its configuration can be used afterwards.
        training: The training configuration, with the parallel sizes.
        ranks: The ranks over which the network is sharded.

    Raises:
        ModelError: The model family is not supported, or the model cannot be sharded with this layout.
    """
    weights = collect_weights(hf)
    locations = locate_weights(list(weights), hf.decoder.config)
    dtype = next(iter(weights.values())).dtype
    config = build_transformer_config(hf.decoder, training, dtype)
    # On the meta device first: each rank then allocates only its own stage.
    with torch.device("meta"):
        model = _build_model(config, hf if isinstance(hf, ValueNetwork) else hf.root)
        if isinstance(hf, ValueNetwork):
            network: Network = ValueNetwork(model)
        else:
            frozen = [None if each is None else _build_model(config, each) for each in (hf.reference, *hf.teachers)]
            network = PolicyNetwork(model, frozen[0], frozen[1:], value_head=hf.value_head is not None)
    everything = collect_weights(network)
    if ranks.stage is not None:
        split_into_stages(network, ranks.stage, ranks.share, dtype)
    placement = WeightPlacement(
        locations=locations, parameters=everything, pipeline_split=network.pipeline_split, tp=ranks.share.tp
    )
    _materialize(network, ranks.device)
    network.share = ranks.share
    _set_parallel_attributes(collect_weights(network), placement)
    _load_weights(collect_weights(network), weights, network.decoder, hf.decoder, ranks)
    for mine, other in zip(network.frozen_models, hf.frozen_models, strict=True):
        mine.requires_grad_(False)
        own = dict(mine.named_parameters()), dict(other.named_parameters())
        _load_weights(*own, get_decoder(mine), get_decoder(other), ranks)
    # The HF weights are copied; keeping them would double the host memory.
    hf.to("meta")
    return network, config, placement


def collect_weights(network: Network) -> dict[str, nn.Parameter]:
    """Return all trained weights of a network, in order."""
    heads = network.heads if isinstance(network, PolicyNetwork) else {}
    return dict(network.root.named_parameters()) | heads


def _build_model(config: Any, hf: Any) -> MegatronModel:
    """Build the Megatron model that corresponds to an HF model or a value network, on the current default device."""
    score = hf.score if isinstance(hf, ValueNetwork) and hf.is_reward_model else None
    has_projection = "lm_head.weight" in dict(hf.named_parameters())
    decoder = hf.decoder if isinstance(hf, ValueNetwork) else get_decoder(hf)
    return MegatronModel(config, decoder.config, has_separate_projection=has_projection, score=score)


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


def _set_parallel_attributes(parameters: dict[str, nn.Parameter], placement: WeightPlacement) -> None:
    """Set Megatron's attributes of parameters that are sharded over tp or shared with another pipeline stage.

    The gradient norm includes sharded parameters from every rank, and all other parameters once. Megatron itself sets
    these attributes only when it initializes weights.
    """
    copies = () if placement.pipeline_split is None else placement.pipeline_split.copies
    for location in placement.locations.values():
        parameter: Any = parameters.get(location.parameter)
        if parameter is None:
            continue
        parameter.tensor_model_parallel = placement.tp is not None and location.dim is not None
        parameter.shared = location.parameter in copies
        if location.parameter.startswith(("value_head.", "score.")):  # every tp rank has a share of the gradient
            parameter.sequence_parallel = placement.tp is not None


def _load_weights(
    parameters: dict[str, nn.Parameter], weights: dict[str, nn.Parameter], decoder: Any, hf: Any, ranks: Ranks
) -> None:
    """Copy an HF model's weights, and its RoPE frequencies, into Megatron's modules."""
    locations = locate_weights(list(weights), hf.config)
    with torch.no_grad():
        for name, weight in weights.items():
            location = locations[name]
            if location.parameter in parameters:
                location.write(parameters[location.parameter].data, weight.detach(), ranks.share.tp)
    decoder.frequencies = hf.rotary_emb.inv_freq.float().to(ranks.device)
