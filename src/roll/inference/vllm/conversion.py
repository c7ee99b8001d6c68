"""Converts requests to vLLM's format, and vLLM's outputs to generations. Imports vLLM only when called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from roll.errors import InfraError, WeightSyncError
from roll.inference.vllm.continuation import POSITION_KEY
from roll.types import FinishReason, FloatArray, Generation, GenerationRequest, IntArray

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs

__all__ = [
    "INITIAL_VERSION",
    "build_sampling_params",
    "build_scoring_params",
    "merge_checksums",
    "to_generation",
    "to_logprobs",
]

INITIAL_VERSION = 0
"""The policy version of the weights that the engine loads at its start."""


def build_sampling_params(request: GenerationRequest, excluded: Sequence[int] = ()) -> SamplingParams:
    """Convert a request's sampling parameters; vLLM then also returns the log-prob of each sampled token.

    Args:
        request: The request.
        excluded: Tokens that must not be sampled.
    """
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
        ignore_eos=True,  # only the stop tokens of the request end it
        allowed_token_ids=list(sampling.choices) or None,
        logit_bias=dict.fromkeys(excluded, -100.0) or None,  # the lowest value that vLLM accepts
        logprobs=len(sampling.choices),
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        extra_args={POSITION_KEY: sampling.position} if sampling.position and sampling.seed is not None else None,
    )


def build_scoring_params() -> SamplingParams:
    """Return the parameters of a request that computes the log-probs of its prompt at temperature 1."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,  # vLLM requires that one token is generated
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def to_generation(
    request: GenerationRequest,
    output: RequestOutput,
    engine_id: str,
    experts: IntArray | None = None,
    parse_version: Callable[[str], int] = int,
) -> Generation:
    """Convert a finished vLLM output to a generation.

    Args:
        request: The request.
        output: The output of vLLM.
        engine_id: The id of the engine.
        experts: The experts [n, layers, k] chosen for the first n tokens; `None` if experts are not recorded.
        parse_version: Converts a weight version of vLLM to a policy version.

    Raises:
        InfraError: vLLM failed this request, or the log-prob of a token is missing or not finite.
    """
    completion = output.outputs[0]
    num_tokens = len(completion.token_ids)
    if completion.finish_reason not in ("stop", "length", "abort"):
        raise InfraError(
            f"engine '{engine_id}': vLLM ended request {request.request_id} with finish reason "
            f"'{completion.finish_reason}'."
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
        versions[span.start : span.end] = INITIAL_VERSION if span.version == "default" else parse_version(span.version)
    return Generation(
        request_id=request.request_id,
        token_ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=logprobs,
        policy_versions=versions,
        finish_reason=cast(FinishReason, completion.finish_reason),
        engine_id=engine_id,
        choice_logprobs=_extract_choice_logprobs(flat, request.sampling.choices),
        experts=None if experts is None else _pad_experts(experts, len(request.token_ids) + num_tokens),
    )


def _pad_experts(experts: IntArray, length: int) -> IntArray:
    """Return the experts padded to [length, layers, k]; unknown experts, such as the last token's, are -1."""
    padded = np.full((length, *experts.shape[1:]), -1, experts.dtype)
    # When a request ends, its last token has not been processed by the network, so it has no experts.
    known = min(len(experts), length - 1)
    padded[:known] = experts[:known]
    return padded


def _extract_choice_logprobs(flat: FlatLogprobs, choices: tuple[int, ...]) -> FloatArray | None:
    """Return the log-prob of each choice at each generated token [T, choices]; `None` if there are no choices."""
    if not choices:
        return None
    logprobs = np.full((len(flat.start_indices), len(choices)), -np.inf, np.float32)
    columns = {token: column for column, token in enumerate(choices)}
    # vLLM lists the sampled token first, then the others in descending order, so columns are found by token ID.
    for row, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        for token, logprob in zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True):
            if token in columns:
                logprobs[row, columns[token]] = logprob
    return logprobs


def to_logprobs(output: RequestOutput) -> FloatArray:
    """Return the log-probs [L] of a request's prompt; entry 0 is 0."""
    flat = cast("FlatLogprobs", output.prompt_logprobs)
    return np.concatenate([np.zeros(1, np.float32), np.asarray(flat.logprobs, dtype=np.float32)])


def merge_checksums(replies: list[dict[str, int]], policy_version: int) -> dict[str, int]:
    """Return the checksums by tensor name, after checking that all workers report the same checksums.

    Raises:
        WeightSyncError: the checksums of a tensor differ between workers; the message names it.
    """
    first = replies[0]
    for name, checksum in first.items():
        if any(other.get(name) != checksum for other in replies[1:]):
            raise WeightSyncError(
                f"weight sync of policy version {policy_version}: workers of one engine received different bytes "
                f"for '{name}'."
            )
    return first
