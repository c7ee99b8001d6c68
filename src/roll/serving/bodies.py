"""Converts request bodies to adapter settings, and models to response bodies."""

from __future__ import annotations

import logging
from typing import Any

from roll.serving.checkpoints import Checkpoint, Checkpoints, Kind
from roll.serving.failures import ApiError, RequestFailure
from roll.serving.models import Model
from roll.serving.requests import AdamParams, LoraSettings
from roll.serving.settings import ServeSettings
from roll.training.adapter_snapshot import AdapterSpec

__all__ = [
    "build_lora_settings",
    "build_spec",
    "check_base_model",
    "check_params",
    "describe_model",
    "describe_weights",
    "find_checkpoint",
]

logger = logging.getLogger(__name__)


def build_spec(lora: LoraSettings, settings: ServeSettings, seed: int) -> AdapterSpec:
    """Return the spec of a new adapter, with `seed` if the request has no seed.

    Raises:
        ApiError: The server does not support the settings.
    """
    if lora.rank > settings.max_rank:
        problem = f"must be <= {settings.max_rank} (--max-rank of the server), got {lora.rank}."
        raise ApiError(400, problem, field="lora_config.rank")
    if not (lora.train_mlp or lora.train_attn):
        problem = "train_mlp or train_attn must be true: this server does not train the output embedding."
        raise ApiError(400, problem, field="lora_config")
    if lora.train_unembed:
        # True is the clients' default, so it is not an error.
        logger.info("train_unembed is true, but the output embedding has no adapter here and stays as it is.")
    return AdapterSpec(
        rank=lora.rank,
        alpha=settings.alpha,
        seed=seed if lora.seed is None else lora.seed,
        attention=lora.train_attn,
        mlp=lora.train_mlp,
    )


def describe_model(model: Model, base_model: str, tokenizer_id: str) -> dict[str, Any]:
    """Return the answer to `get_info`."""
    return {
        "type": "get_info",
        "model_id": model.model_id,
        "model_name": base_model,
        "model_data": {"model_name": base_model, "tokenizer_id": tokenizer_id},
        "is_lora": True,
        "lora_rank": model.spec.rank,
    }


def describe_weights(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the answer to `weights_info`."""
    spec = checkpoint.spec
    return {
        "base_model": checkpoint.base_model,
        "is_lora": True,
        "lora_rank": spec.rank,
        "train_unembed": checkpoint.train_unembed,
        "train_mlp": spec.mlp,
        "train_attn": spec.attention,
    }


def check_params(params: AdamParams) -> None:
    """Check settings of an optimizer step that limit each other.

    Raises:
        ApiError: The weight decay would change the sign of weights.
    """
    product = params.learning_rate * params.weight_decay
    if product > 1:
        problem = f"learning_rate * weight_decay must be <= 1, got {product:g}: weights are multiplied by 1 minus it."
        raise ApiError(400, problem, field="adam_params.weight_decay")


def check_base_model(name: str, settings: ServeSettings) -> None:
    """Check that a client requests the base model of this server.

    Raises:
        ApiError: The server has another base model.
    """
    if name != settings.model_name:
        served = settings.model_name
        raise ApiError(400, f"'{name}' is not served: the base model of this server is '{served}'.", field="base_model")


def build_lora_settings(checkpoint: Checkpoint) -> LoraSettings:
    """Return the LoRA settings of the model that a checkpoint was saved from."""
    spec = checkpoint.spec
    return LoraSettings(
        rank=spec.rank, train_mlp=spec.mlp, train_attn=spec.attention, train_unembed=checkpoint.train_unembed
    )


def find_checkpoint(checkpoints: Checkpoints, path: str, owner: str, kinds: tuple[Kind, ...], field: str) -> Checkpoint:
    """Return the checkpoint at a path from a request body; see `Checkpoints.find`.

    Raises:
        ApiError: There is no such checkpoint.
    """
    try:
        return checkpoints.find(path, owner, kinds)
    except RequestFailure as failure:
        raise ApiError(404, failure.message.removeprefix("path: "), field=field) from failure
