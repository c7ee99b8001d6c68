"""A trainer's network, as `transformers` has it, rebuilt of Megatron's layers with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roll.config.training import TrainingConfig
from roll.models import decoder_of
from roll.training.megatron.names import Place, find_places
from roll.training.megatron.network import MegatronModel, transformer_config
from roll.training.megatron.spread import SpreadWeights
from roll.training.parallel.tokens import TokenShare
from roll.training.policy import PolicyNetwork
from roll.training.value import ValueNetwork

__all__ = ["rebuild", "weights_by_name"]

Network = PolicyNetwork | ValueNetwork


def rebuild(hf: Network, training: TrainingConfig, device: torch.device, share: TokenShare) -> tuple[Network, Any]:
    """The network on a device, and Megatron's configuration of its layers.

    Args:
        hf: loaded, on the host; from here on it has no weights, and says names and configurations alone.
        training: how ranks divide it.
        device: of this rank.
        share: which tokens are this rank's.

    Raises:
        ModelError: the family is none of those that are known, or cannot be divided so.
    """
    names = weights_by_name(hf)
    config = transformer_config(hf.decoder, training, next(iter(names.values())).dtype)
    with torch.device("meta"):
        model = _model(config, hf.root if isinstance(hf, PolicyNetwork) else hf)
        if isinstance(hf, ValueNetwork):
            network: Network = ValueNetwork(model)
        else:
            frozen = [None if each is None else _model(config, each) for each in (hf.reference, *hf.teachers)]
            network = PolicyNetwork(model, frozen[0], frozen[1:], value_head=hf.value_head is not None)
    _materialise(network, device)
    network.share = share
    _fill(weights_by_name(network), names, network.decoder, hf.decoder, share)
    _mark(weights_by_name(network), find_places(list(names), hf.decoder.config), share)
    if isinstance(hf, PolicyNetwork):
        for mine, other in zip(network.frozen, hf.frozen, strict=True):  # type: ignore[union-attr]
            mine.requires_grad_(False)
            own = dict(mine.named_parameters()), dict(other.named_parameters())
            _fill(*own, decoder_of(mine), decoder_of(other), share)
    hf.to("meta")
    return network, config


def weights_by_name(network: Network) -> dict[str, nn.Parameter]:
    """All that is trained of a network, in order."""
    heads = network.heads if isinstance(network, PolicyNetwork) else {}
    return dict(network.root.named_parameters()) | heads


def _model(config: Any, hf: Any) -> MegatronModel:
    """On no device yet, after an HF model, or a network of values."""
    score = hf.score if isinstance(hf, ValueNetwork) and hf.scores_texts else None
    projects = "lm_head.weight" in dict(hf.named_parameters())
    decoder = hf.decoder if isinstance(hf, ValueNetwork) else decoder_of(hf)
    return MegatronModel(config, decoder.config, projects=projects, score=score)


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Give parameters memory, in place; they stay as Megatron has marked them."""
    marks = {name: dict(parameter.__dict__) for name, parameter in model.named_parameters()}
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        parameter.__dict__.update(marks[name])


def _mark(parameters: dict[str, nn.Parameter], places: dict[str, Place], share: TokenShare) -> None:
    """Let Megatron know of which parameters tp ranks have different parts: all of these count in the gradient's norm,
    others once. It marks them itself only where it draws their first values."""
    for name, place in places.items():
        parameter: Any = parameters[place.parameter]
        parameter.tensor_model_parallel = share.tp is not None and place.dim is not None
        if name.startswith(("value_head.", "score.")):  # every tp rank has a share of the gradient
            parameter.sequence_parallel = share.tp is not None


def _fill(
    parameters: dict[str, nn.Parameter], weights: dict[str, nn.Parameter], decoder: Any, hf: Any, share: TokenShare
) -> None:
    """Put an HF model's weights, and the frequencies of its positions, into Megatron's modules."""
    spread = SpreadWeights(parameters, find_places(list(weights), hf.config), share.tp)
    for name, weight in weights.items():
        spread.load(name, weight.detach())
    decoder.frequencies = hf.rotary_emb.inv_freq.float().to(next(iter(parameters.values())).device)
