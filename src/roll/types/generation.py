"""Generation requests, sampling parameters and generations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from roll.errors import InfraError
from roll.types.arrays import FloatArray, IntArray
from roll.types.media import MediaSpan

__all__ = ["FinishReason", "Generation", "GenerationRequest", "SamplingParams"]

FinishReason: TypeAlias = Literal["stop", "length", "abort", "context"]
"""`context` occurs only in rollouts: the context was full before the episode was over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters; an engine returns `logprobs` under the resulting distribution."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy; log-probs are then computed at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()
    """Token ids to which sampling is restricted, with log-probs in `Generation.choice_logprobs`; empty means all
    tokens."""
    seed: int | None = None
    """Seed of this request; it makes retries independent of other requests."""
    position: int = 0
    """Number of the answer's tokens that earlier requests sampled, which are at the end of the prompt. Token k of this
    request is sampled with random number `position` + k of the seed, so an answer does not depend on interruptions.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One call to the policy, or to one of its adapters. Input and output are tokens."""

    request_id: str
    token_ids: IntArray
    """Prompt tokens, shape [P]."""
    sampling: SamplingParams
    priority: int = 0
    """Requests with a lower value run first."""
    adapter: str | None = None
    """Name of the adapter; `None` for the policy itself."""
    media: tuple[MediaSpan, ...] = ()
    """Media spans in `token_ids`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """An engine's answer to a request; partial if `finish_reason` is `abort`.

    Raises:
        InfraError: A log-prob is not finite, so a loss computed from it would not be finite either.
    """

    request_id: str
    token_ids: IntArray
    """Generated tokens, including the stop token, shape [T]."""
    logprobs: FloatArray
    """[T] log-probs of the sampled tokens under the sampling distribution; finite."""
    policy_versions: IntArray
    """[T] policy version that sampled each token; with an adapter, the adapter's version."""
    finish_reason: FinishReason
    engine_id: str = ""
    choice_logprobs: FloatArray | None = None
    """[T, choices] log-probs of the tokens in `SamplingParams.choices`, normalized over them; `None` without choices.
    """
    experts: IntArray | None = None
    """[P + T, layers, k] int8 or int16: experts that MoE routers chose for each token of prompt and answer in the
    engine's first forward pass of the token. -1 means unknown, as for the last token, which has no forward pass. `None`
    if not recorded."""

    def __post_init__(self) -> None:
        wrong = np.flatnonzero(~np.isfinite(self.logprobs))
        if len(wrong):
            raise InfraError(
                f"engine '{self.engine_id}' returned {len(wrong)} of {len(self.logprobs)} log-probs that are not "
                f"finite for request {self.request_id} (the first is {self.logprobs[wrong[0]]}, of token {wrong[0]}). "
                "If this repeats, check the model's weights, and remove speculative decoding from inference.options."
            )
