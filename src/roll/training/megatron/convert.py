"""Conversion of a trainer's HF network to Megatron's layers with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roll.config.training import TrainingConfig
from roll.models import decoder_of
from roll.training.distributed import Ranks
from roll.training.megatron.full_weights import WeightPlacement
from roll.training.megatron.network import MegatronModel, transformer_config
from roll.training.megatron.weight_mapping import locate_weights
from roll.training.network.pipeline_split import split_into_stages
from roll.training.network.policy import PolicyNetwork
from roll.training.network.value import ValueNetwork

__all__ = ["convert_from_hf", "weights_by_name"]

Network = PolicyNetwork | ValueNetwork


def convert_from_hf(hf: Network, training: TrainingConfig, ranks: Ranks) -> tuple[Network, Any, WeightPlacement]:
    """Return the network on this rank's device, Megatron's configuration of its layers, and the places of all weights.

    Args:
        hf: The loaded network on the host. It loses its weights and afterwards serves for configurations only.
        training: The training configuration, with the parallel sizes.
        ranks: The ranks that divide the network.

    Raises:
        ModelError: the model family is not known, or cannot be divided this way.
    """
    weights = weights_by_name(hf)
    places = locate_weights(list(weights), hf.decoder.config)
    dtype = next(iter(weights.values())).dtype
    config = transformer_config(hf.decoder, training, dtype)
    with torch.device("meta"):
        model = _model(config, hf if isinstance(hf, ValueNetwork) else hf.root)
        if isinstance(hf, ValueNetwork):
            network: Network = ValueNetwork(model)
        else:
            frozen = [None if each is None else _model(config, each) for each in (hf.reference, *hf.teachers)]
            network = PolicyNetwork(model, frozen[0], frozen[1:], value_head=hf.value_head is not None)
    everything = weights_by_name(network)
    if ranks.stage is not None:
        split_into_stages(network, ranks.stage, ranks.share, dtype)
    whereabouts = WeightPlacement(places=places, parameters=everything, cut=network.pipeline_split, tp=ranks.share.tp)
    _materialize(network, ranks.device)
    network.share = ranks.share
    _mark(weights_by_name(network), whereabouts)
    _load_weights(weights_by_name(network), weights, network.decoder, hf.decoder, ranks)
    for mine, other in zip(network.frozen_models, hf.frozen_models, strict=True):
        mine.requires_grad_(False)
        own = dict(mine.named_parameters()), dict(other.named_parameters())
        _load_weights(*own, decoder_of(mine), decoder_of(other), ranks)
    hf.to("meta")
    return network, config, whereabouts


def weights_by_name(network: Network) -> dict[str, nn.Parameter]:
    """Return all trained weights of a network, in order."""
    heads = network.heads if isinstance(network, PolicyNetwork) else {}
    return dict(network.root.named_parameters()) | heads


def _model(config: Any, hf: Any) -> MegatronModel:
    """Build the Megatron model that corresponds to an HF model or a value network, without memory."""
    score = hf.score if isinstance(hf, ValueNetwork) and hf.scores_texts else None
    projects = "lm_head.weight" in dict(hf.named_parameters())
    decoder = hf.decoder if isinstance(hf, ValueNetwork) else decoder_of(hf)
    return MegatronModel(config, decoder.config, projects=projects, score=score)


def _materialize(network: nn.Module, device: torch.device) -> None:
    """Allocate the parameters in place; tied parameters stay tied, and Megatron's marks on parameters are kept."""
    before = dict(network.named_parameters(remove_duplicate=False))
    network.to_empty(device=device)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, old in before.items():
        path, _, last = name.rpartition(".")
        new = made.setdefault(old, network.get_parameter(name))
        new.__dict__.update(old.__dict__)
        network.get_submodule(path)._parameters[last] = new


def _mark(parameters: dict[str, nn.Parameter], whereabouts: WeightPlacement) -> None:
    """Mark which parameters tp ranks divide, and which ones another stage also has.

    Divided parameters count on every rank in the gradient norm, all others once. Megatron itself sets the marks only
    where it draws initial values.
    """
    copies = () if whereabouts.cut is None else whereabouts.cut.copies
    for place in whereabouts.places.values():
        parameter: Any = parameters.get(place.parameter)
        if parameter is None:
            continue
        parameter.tensor_model_parallel = whereabouts.tp is not None and place.dim is not None
        parameter.shared = place.parameter in copies
        if place.parameter.startswith(("value_head.", "score.")):  # every tp rank has a share of the gradient
            parameter.sequence_parallel = whereabouts.tp is not None


def _load_weights(
    parameters: dict[str, nn.Parameter], weights: dict[str, nn.Parameter], decoder: Any, hf: Any, ranks: Ranks
) -> None:
    """Copy an HF model's weights, and the frequencies of its rotary positions, into Megatron's modules."""
    places = locate_weights(list(weights), hf.config)
    with torch.no_grad():
        for name, weight in weights.items():
            place = places[name]
            if place.parameter in parameters:
                place.write(parameters[place.parameter].data, weight.detach(), ranks.share.tp)
    decoder.frequencies = hf.rotary_emb.inv_freq.float().to(ranks.device)
