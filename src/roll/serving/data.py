"""Converts the data of a request to a training batch, and checks everything that can be checked without the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from roll.serving import wire
from roll.serving.failures import ApiError
from roll.serving.losses import TokenSumLoss, build_loss
from roll.types import FloatArray, IntArray, TrainingBatch, TrainingSample

__all__ = ["MAX_DATA", "TrainingRequest", "decode_request"]

MAX_DATA = 4096
"""The maximum number of data in a request. Clients send at most 1024."""
_COLUMNS = {"weights": "advantages", "advantages": "advantages", "logprobs": "rollout_logprobs"}
"""The field of `TrainingSample` for each input of a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRequest:
    """A decoded `forward_backward` request."""

    batch: TrainingBatch
    loss: TokenSumLoss
    forward_only: bool


def decode_request(message: Any, *, max_tokens: int, vocab_size: int) -> TrainingRequest:
    """Decode a request.

    Args:
        message: The message `ForwardBackwardRequest`.
        max_tokens: The largest number of tokens of a datum.
        vocab_size: The number of tokens in the vocabulary.

    Raises:
        ApiError: A field is missing or wrong; the error names it.
    """
    loss = build_loss(message.loss_fn, wire.get_loss_config(message))
    if not message.data:
        raise ApiError(400, "there must be at least one datum.", field="data")
    if len(message.data) > MAX_DATA:
        raise ApiError(400, f"there must be at most {MAX_DATA} data, got {len(message.data)}.", field="data")
    samples = [_decode_datum(datum, index, loss, max_tokens, vocab_size) for index, datum in enumerate(message.data)]
    return TrainingRequest(
        batch=TrainingBatch(samples=tuple(samples)), loss=loss, forward_only=bool(message.forward_only)
    )


def _decode_datum(datum: Any, index: int, loss: TokenSumLoss, max_tokens: int, vocab_size: int) -> TrainingSample:
    where = f"data[{index}]"
    tokens = _decode_tokens(datum, where)
    if not 1 <= len(tokens) <= max_tokens:
        problem = f"must have between 1 and {max_tokens} tokens, got {len(tokens)}."
        raise ApiError(400, problem, field=f"{where}.model_input")
    _check_tokens(tokens, vocab_size, f"{where}.model_input")
    given = dict(datum.loss_fn_inputs)
    needed = ("target_tokens", *loss.columns)
    for name in needed:
        if name not in given:
            problem = f"this input is missing; the loss '{loss.name}' needs {', '.join(needed)}."
            raise ApiError(400, problem, field=f"{where}.loss_fn_inputs.{name}")
    for name in given:
        if name not in needed:
            problem = f"the loss '{loss.name}' does not support this input; its inputs are {', '.join(needed)}."
            raise ApiError(400, problem, field=f"{where}.loss_fn_inputs.{name[:64]}")
    field = f"{where}.loss_fn_inputs.target_tokens"
    targets = wire.read_integers(given["target_tokens"], len(tokens), field)
    _check_tokens(targets, vocab_size, field)
    columns: dict[str, FloatArray] = {}
    for name in loss.columns:
        field = f"{where}.loss_fn_inputs.{name}"
        values = wire.read_floats(given[name], len(tokens), field)
        columns[_COLUMNS[name]] = np.concatenate([np.zeros(1, np.float32), values])
    # Target i follows token i, so the sample has one more token than the input. The network does not read the last.
    wanted = np.concatenate([tokens[:1], targets]).astype(np.int32)
    return TrainingSample(
        sample_id=f"{index:06d}",
        unit=index,
        token_ids=np.concatenate([tokens, wanted[-1:]]).astype(np.int32),
        target_ids=wanted,
        loss_mask=np.arange(len(wanted)) > 0,  # every target's log-prob is returned, also where its weight is 0
        advantages=columns["advantages"],
        rollout_logprobs=columns.get("rollout_logprobs"),
    )


def _decode_tokens(datum: Any, where: str) -> IntArray:
    parts: list[IntArray] = []
    for number, chunk in enumerate(datum.model_input):
        field, kind = f"{where}.model_input[{number}]", chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ApiError(
                400, f"only chunks of text tokens are supported, got {kind or 'an empty chunk'}.", field=field
            )
        parts.append(wire.decode_int32(chunk.encoded_text.tokens, field))
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _check_tokens(tokens: IntArray, vocab_size: int, field: str) -> None:
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(wrong):
        place = int(wrong[0])
        problem = f"token {int(tokens[place])} at position {place} is not in the vocabulary of {vocab_size} tokens."
        raise ApiError(400, problem, field=field)
