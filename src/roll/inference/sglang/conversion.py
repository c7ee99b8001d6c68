"""Converts requests to the JSON of SGLang's `/generate`, and its replies to generations.

SGLang returns the log-prob of each sampled token under the softmax at the request's temperature, before top-k and top-p
remove tokens. A policy gradient needs the distribution that was sampled from, so requests with top-k or top-p are
refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from roll.errors import DataError, EngineDiedError, InfraError, UnsupportedError
from roll.inference.request_checks import check_length, check_tokens
from roll.types import FinishReason, FloatArray, Generation, GenerationRequest, IntArray

__all__ = [
    "ABORTED_REPLY",
    "INITIAL_VERSION",
    "build_request",
    "build_scoring_request",
    "get_rest",
    "is_aborted",
    "join_parts",
    "make_aborted",
    "set_version",
    "to_error",
    "to_generation",
    "to_logprobs",
]

INITIAL_VERSION = 0
"""The policy version of the weights that the server loads at its start, which SGLang calls `default`."""
ABORTED_REPLY: Mapping[str, Any] = {
    "output_ids": [],
    "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "default"},
}
"""A reply to a request that was aborted before it had any tokens."""
_LOST_ADAPTER = ("has never been loaded", "are not loaded", "Failed to implicitly load")
"""Parts of SGLang's messages about a request whose adapter it does not have."""
_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def build_request(request: GenerationRequest, max_context: int, vocab_size: int) -> dict[str, Any]:
    """Return the body of `/generate` for a request.

    Raises:
        DataError: The prompt has no tokens or a token outside the vocabulary, prompt plus answer are too long, or the
            temperature is not finite or negative.
        UnsupportedError: The request needs something that SGLang's server or its log-probs do not support.
    """
    sampling, name = request.sampling, f"request {request.request_id}"
    if request.media or sampling.choices:
        what = "media" if request.media else "choices"
        raise UnsupportedError(f"{name} has {what}, which the engine sglang does not support: use the engine vllm.")
    if not 0 <= sampling.temperature < math.inf:
        raise DataError(f"{name} has temperature {sampling.temperature:g}, but it must be finite and at least 0.")
    if sampling.temperature > 0 and not (sampling.top_p >= 1.0 and sampling.top_k <= 0):
        raise UnsupportedError(
            f"{name} has top_p {sampling.top_p:g} and top_k {sampling.top_k}, but SGLang returns log-probs without "
            "them: set rollout.top_p to 1 and rollout.top_k to 0, or use the engine vllm."
        )
    check_tokens(name, request.token_ids, vocab_size)
    check_length(request, max_context)
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        # With `ignore_eos`, SGLang also ignores the stop tokens. Without it, the end-of-sequence tokens of the model
        # end the answer, too.
        "ignore_eos": not sampling.stop_token_ids,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed % 2**63
    return {
        "input_ids": request.token_ids.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,  # no log-probs of the prompt, so its prefix may come from the cache
    }


def build_scoring_request(name: str, sequence: IntArray, max_context: int, vocab_size: int) -> dict[str, Any]:
    """Return the body of `/generate` that computes the log-probs of a sequence at temperature 1.

    Raises:
        DataError: The sequence has no tokens, tokens outside the vocabulary, or more than `max_context` tokens.
    """
    check_tokens(f"sequence {name}", sequence, vocab_size)
    if len(sequence) > max_context:
        raise DataError(
            f"sequence {name} has {len(sequence)} tokens, which exceed the engine's context length {max_context}: "
            "shorten it, or raise inference.max_context."
        )
    return {
        "input_ids": sequence.tolist(),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def to_generation(request: GenerationRequest, reply: Mapping[str, Any], engine_id: str) -> Generation:
    """Convert a reply of `/generate`.

    Raises:
        InfraError: The request failed, or tokens, log-probs or weight versions of the reply do not fit together.
        UnsupportedError: A token that is no stop token of the request ended the answer.
    """
    name = f"engine '{engine_id}': SGLang's reply to request {request.request_id}"
    try:
        meta, token_ids = reply["meta_info"], reply["output_ids"]
        reason, found = meta["finish_reason"]["type"], meta.get("output_token_logprobs") or []
        logprobs, sampled = [entry[0] for entry in found], [entry[1] for entry in found]
        versions = _read_versions(meta, len(token_ids))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise InfraError(f"{name} cannot be read ({type(error).__name__}: {error}): {str(reply)[:200]}") from error
    if (
        not isinstance(reason, str)
        or reason not in _FINISH_REASONS
        or (reason == "abort" and meta["finish_reason"].get("status_code"))
    ):
        raise InfraError(f"{name} has the finish reason {meta['finish_reason']}.")
    if sampled != token_ids:
        raise InfraError(f"{name} has {len(token_ids)} tokens, and log-probs of {len(sampled)} that differ from them.")
    stops = request.sampling.stop_token_ids
    if reason == "stop" and (not token_ids or token_ids[-1] not in stops):
        raise UnsupportedError(
            f"{name} ends with {token_ids[-1:]}, an end-of-sequence token of the model's configuration, which SGLang "
            f"cannot ignore; the request's stop tokens are {list(stops)}: add it to them, or use the engine vllm."
        )
    # SGLang samples one more token for an aborted request, and does not check whether it ends the answer.
    if reason == "abort" and token_ids:
        complete = len(token_ids) >= request.sampling.max_new_tokens
        reason = "stop" if token_ids[-1] in stops else "length" if complete else reason
    return Generation(
        request_id=request.request_id,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        policy_versions=versions,
        finish_reason=_FINISH_REASONS[reason],
        engine_id=engine_id,
    )


def is_aborted(reply: Mapping[str, Any]) -> bool:
    """Return whether the server aborted a request."""
    meta = reply.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    return isinstance(reason, dict) and reason.get("type") == "abort"


def get_rest(request: GenerationRequest, parts: Sequence[Generation]) -> GenerationRequest:
    """Return the request that continues an answer whose first tokens are `parts`."""
    if not parts:
        return request
    tokens = np.concatenate([request.token_ids, *(part.token_ids for part in parts)])
    remaining = request.sampling.max_new_tokens - (len(tokens) - len(request.token_ids))
    sampling = dataclasses.replace(request.sampling, max_new_tokens=remaining)
    return dataclasses.replace(request, token_ids=tokens, sampling=sampling)


def join_parts(parts: Sequence[Generation]) -> Generation:
    """Return the answer that a request and its continuations have generated."""
    if len(parts) == 1:
        return parts[0]
    return dataclasses.replace(
        parts[-1],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        policy_versions=np.concatenate([part.policy_versions for part in parts]),
    )


def set_version(part: Generation, policy_version: int) -> Generation:
    """Return a generation whose tokens all have the same policy version."""
    return dataclasses.replace(part, policy_versions=np.full_like(part.policy_versions, policy_version))


def make_aborted(request: GenerationRequest, engine_id: str) -> Generation:
    """Return the answer of a request that was aborted before the server received it."""
    return Generation(
        request_id=request.request_id,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        policy_versions=np.zeros(0, np.int32),
        finish_reason="abort",
        engine_id=engine_id,
    )


def to_error(
    status: int, reply: Mapping[str, Any], body: Mapping[str, Any], request_id: str, engine_id: str
) -> Exception:
    """Return the error of a request that the server rejected with an HTTP status other than 200."""
    message = reply.get("error", reply)
    text = " ".join(str(message.get("message", message) if isinstance(message, dict) else message).split())
    adapter = body.get("lora_path")
    is_lost = any(words in text for words in _LOST_ADAPTER)
    if status == 400 and is_lost and adapter is not None and adapter in text:  # it was started again, for example
        return EngineDiedError(engine_id, f"its server does not have the adapter '{adapter}' any more")
    kind = DataError if 400 <= status < 500 else InfraError
    return kind(f"engine '{engine_id}': SGLang rejected request '{request_id}' (HTTP {status}): {text[:300]}")


def to_logprobs(reply: Mapping[str, Any], length: int, engine_id: str) -> FloatArray:
    """Return the log-probs [L] of a scored sequence; entry 0 is 0.

    Raises:
        InfraError: The reply has no log-probs, or their number is wrong.
    """
    try:
        found = reply["meta_info"].get("input_token_logprobs") or []
        logprobs = np.asarray([0.0, *(entry[0] for entry in found[1:])], dtype=np.float32)
    except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
        raise InfraError(
            f"engine '{engine_id}': SGLang's log-probs cannot be read ({type(error).__name__}: {error}): "
            f"{str(reply)[:200]}"
        ) from error
    if len(found) != length:
        raise InfraError(
            f"engine '{engine_id}': SGLang returned {len(found)} log-probs for a sequence of {length} tokens."
        )
    return logprobs


def _read_versions(meta: Mapping[str, Any], num_tokens: int) -> IntArray:
    """Return the policy version [T] of each token: SGLang reports spans if weights changed during the request."""
    versions = np.full(num_tokens, _parse_version(meta["weight_version"]), dtype=np.int32)
    for span in meta.get("weight_versions") or ():
        versions[span["start"] : span["end"]] = _parse_version(span["version"])
    return versions


def _parse_version(version: str) -> int:
    return INITIAL_VERSION if version == "default" else int(version)
