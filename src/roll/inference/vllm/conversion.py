"""Conversion of ROLL's records to vLLM's and back. Imports vLLM only when called."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from roll.errors import DataError, InfraError
from roll.types import FinishReason, FloatArray, Generation, GenerationRequest, IntArray

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs

__all__ = [
    "INITIAL_VERSION",
    "check_fits",
    "check_tokens",
    "sampling_params",
    "scoring_params",
    "to_generation",
    "to_logprobs",
]

INITIAL_VERSION = 0
"""The policy version of the weights that the engine started with."""


def check_tokens(what: str, token_ids: IntArray, vocab_size: int) -> None:
    """Reject tokens that would end vLLM's process.

    Raises:
        DataError: there are no tokens, or one is outside the vocabulary.
    """
    if len(token_ids) == 0:
        raise DataError(f"{what} has no tokens: an engine needs at least one.")
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise DataError(f"{what} has token id {wrong}, the model has 0 … {vocab_size - 1}: use its own tokenizer.")


def check_fits(request: GenerationRequest, max_context: int) -> None:
    """Reject a request that could not be finished.

    Raises:
        DataError: prompt and answer together are longer than the engine's context, or no token may be generated.
    """
    prompt, answer = len(request.token_ids), request.sampling.max_new_tokens
    if answer < 1:
        raise DataError(f"request {request.request_id}: max_new_tokens is {answer}, must be at least 1.")
    if prompt + answer > max_context:
        raise DataError(
            f"request {request.request_id}: {prompt} prompt tokens and max_new_tokens {answer} make {prompt + answer}, "
            f"the engine's context is {max_context}: shorten the prompt, lower rollout.max_new_tokens, or raise "
            "inference.max_context."
        )


def sampling_params(request: GenerationRequest) -> SamplingParams:
    """Convert a request's sampling settings; the sampled token's log-prob comes with each token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # only the request's own stop tokens end it
        allowed_token_ids=list(sampling.choices) or None,
        logprobs=len(sampling.choices),
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def scoring_params() -> SamplingParams:
    """Score the prompt at temperature 1; vLLM requires that one token is generated."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def to_generation(
    request: GenerationRequest, output: RequestOutput, engine_id: str, experts: IntArray | None = None
) -> Generation:
    """Convert a finished vLLM output to a generation.

    Args:
        request: The request.
        output: The output of vLLM.
        engine_id: The id of the engine.
        experts: The experts [n, layers, k] chosen for the first n tokens; `None` where they are not recorded.

    Raises:
        InfraError: vLLM failed this request, or a token has no log-prob, or one that is not finite.
    """
    completion = output.outputs[0]
    num_tokens = len(completion.token_ids)
    if completion.finish_reason not in ("stop", "length", "abort"):
        raise InfraError(
            f"engine '{engine_id}': vLLM ended request {request.request_id} with '{completion.finish_reason}'."
        )
    flat = cast("FlatLogprobs", completion.logprobs)
    if len(flat.start_indices) != num_tokens:
        raise InfraError(
            f"engine '{engine_id}': vLLM returned {len(flat.start_indices)} log-probs for the {num_tokens} tokens of "
            f"request {request.request_id}."
        )
    logprobs = np.asarray([flat.logprobs[start] for start in flat.start_indices], dtype=np.float32)
    versions = np.full(num_tokens, INITIAL_VERSION, dtype=np.int32)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = INITIAL_VERSION if span.version == "default" else int(span.version)
    return Generation(
        request_id=request.request_id,
        token_ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=logprobs,
        policy_versions=versions,
        finish_reason=cast(FinishReason, completion.finish_reason),
        engine_id=engine_id,
        choice_logprobs=_of_choices(flat, request.sampling.choices),
        experts=None if experts is None else _all_but_the_last(experts, len(request.token_ids) + num_tokens),
    )


def _all_but_the_last(experts: IntArray, length: int) -> IntArray:
    """Return experts [length, layers, k], -1 where unknown. Those that vLLM may have for the last token are dropped."""
    found = np.full((length, *experts.shape[1:]), -1, experts.dtype)
    known = min(len(experts), length - 1)
    found[:known] = experts[:known]
    return found


def _of_choices(flat: FlatLogprobs, choices: tuple[int, ...]) -> FloatArray | None:
    """Return the log-probs [T, choices]; vLLM sorts them in descending order, next to the sampled token's own."""
    if not choices:
        return None
    found = np.full((len(flat.start_indices), len(choices)), -np.inf, np.float32)
    place = {token: column for column, token in enumerate(choices)}
    for row, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        for token, logprob in zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True):
            if token in place:
                found[row, place[token]] = logprob
    return found


def to_logprobs(output: RequestOutput) -> FloatArray:
    """Return the log-probs [L] of a scored prompt; entry 0 is 0."""
    flat = cast("FlatLogprobs", output.prompt_logprobs)
    return np.concatenate([np.zeros(1, np.float32), np.asarray(flat.logprobs, dtype=np.float32)])
