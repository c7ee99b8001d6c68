"""Calls of the model: what an engine is asked, how it samples, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from roll.errors import InfraError
from roll.types.arrays import FloatArray, IntArray
from roll.types.media import MediaSpan

__all__ = ["FinishReason", "Generation", "GenerationRequest", "SamplingParams"]

FinishReason: TypeAlias = Literal["stop", "length", "abort", "context"]
"""`context` is of rollouts alone: the context was full before the episode was over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How an engine samples. `logprobs` it returns are under this distribution."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy; log-probs are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()
    """Only these tokens may be sampled, and `Generation.choice_logprobs` weighs them; empty: every token may."""
    seed: int | None = None
    """Of this request alone, so a re-issued request does not depend on its neighbours' randomness."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One call of the policy, or of the adapter of it that is named: tokens in, tokens out."""

    request_id: str
    token_ids: IntArray
    """[P]"""
    sampling: SamplingParams
    priority: int = 0
    """Lower runs first where an engine must choose."""
    adapter: str | None = None
    media: tuple[MediaSpan, ...] = ()
    """Where media stand in `token_ids`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What an engine made of a request; partial when `finish_reason` is `abort`.

    Raises:
        InfraError: a log-prob is not finite. A loss that is computed from it would not be finite either.
    """

    request_id: str
    token_ids: IntArray
    """[T] includes the stop token that ended it."""
    logprobs: FloatArray
    """[T] of the sampled tokens, under the sampling distribution; finite."""
    policy_versions: IntArray
    """[T] the policy version that made each token, of the request's adapter where it named one."""
    finish_reason: FinishReason
    engine_id: str = ""
    choice_logprobs: FloatArray | None = None
    """[T, choices] of every token in `SamplingParams.choices`, among these alone; `None` where there are none."""
    experts: IntArray | None = None
    """[P + T, layers, k] int8 or int16 which experts a mixture's routers chose for each token of prompt and answer when
    it first went through the engine; -1: unknown, as always for the last, which never did. `None`: not recorded."""

    def __post_init__(self) -> None:
        wrong = np.flatnonzero(~np.isfinite(self.logprobs))
        if len(wrong):
            raise InfraError(
                f"engine '{self.engine_id}' returned {len(wrong)} of {len(self.logprobs)} log-probs that are not "
                f"finite for request {self.request_id} (the first is {self.logprobs[wrong[0]]}, of token {wrong[0]}). "
                "If this repeats, check the model's weights, and remove speculative decoding from inference.options."
            )
