"""The JSON that runs and reward services exchange; docs/rewards.md describes it for services in other languages.

    POST <url>/score   {"id", "items": [{"text", "answer", "metadata", …}, …]}
                    ─► {"id", "results": [{"value", "correct", …} or {"error", "kind"}, …]}

Invariants: the results are in the order of the items; a reply is rejected as a whole if the number of results or the
`id` differs, or if a value is not a finite number; unknown keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from roll.errors import MalformedPromptError, shorten
from roll.types import Message, Prompt, Rollout

__all__ = [
    "MAX_BODY_BYTES",
    "MAX_ITEMS",
    "ErrorKind",
    "ItemResult",
    "ScoreItem",
    "ScoreReply",
    "ScoreRequest",
    "build_request",
    "build_rollout",
    "describe_invalid",
    "encode_item",
]

MAX_ITEMS = 256
"""Maximum number of answers in one request."""
MAX_BODY_BYTES = 16 * 2**20
"""Maximum size of a request that `roll reward serve` accepts."""
MAX_PARTS = 64
"""Maximum number of parts in one result; each part becomes a metric."""

ErrorKind = Literal["infrastructure", "unscorable", "malformed_prompt"]
PartName = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,100}$")]


class _Record(BaseModel):
    """Base of all records: types are strict, numbers are finite, and unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class ScoreItem(_Record):
    """One answer to score."""

    text: str
    answer: str = ""
    """Reference answer of the prompt."""
    metadata: dict[str, Any] = {}
    prompt: str | list[dict[str, Any]] = []
    """The question: a string, or chat messages."""
    uid: str = ""
    """ID of the prompt."""
    domain: str = ""
    finished: bool = True
    """False if the answer was truncated."""
    final_text: str | None = None
    """`text` without reasoning, if known."""
    token_ids: list[int] | None = None


class ScoreRequest(_Record):
    """The body of a request."""

    id: str = Field("", max_length=200)
    items: list[ScoreItem] = Field(min_length=1, max_length=MAX_ITEMS)


class ItemResult(_Record):
    """The result of one answer: a value, or an error."""

    value: float | None = None
    correct: bool | None = None
    """True if the task was solved; `None` if the service does not decide that."""
    verdict: str = ""
    parts: dict[PartName, float] = Field({}, max_length=MAX_PARTS)
    timed_out: bool = False
    """True if the answer is treated as incorrect because a verifier ran out of time."""
    error: str | None = None
    """The reason why the answer could not be scored."""
    kind: ErrorKind = "infrastructure"
    """Type of the error; only `infrastructure` errors are retryable."""


class ScoreReply(_Record):
    """The body of a reply."""

    id: str | None = None
    results: list[ItemResult] = Field(max_length=MAX_ITEMS)


def encode_item(rollout: Rollout, metadata_keys: Sequence[str] | None, *, with_token_ids: bool) -> bytes:
    """Encode a rollout as the JSON of a `ScoreItem`.

    Args:
        rollout: The rollout.
        metadata_keys: The columns to send; `None` for all.
        with_token_ids: Whether to send the tokens of the answer.

    Raises:
        MalformedPromptError: A column is missing, or cannot be encoded as JSON.
    """
    prompt = rollout.prompt
    metadata = dict(prompt.metadata)
    if metadata_keys is not None:
        missing = [key for key in metadata_keys if key not in metadata]
        if missing:
            known = ", ".join(map(repr, metadata)) or "none"
            raise MalformedPromptError(
                prompt.uid, f"column '{missing[0]}' of `metadata_keys` does not exist (columns: {known})"
            )
        metadata = {key: metadata[key] for key in metadata_keys}
    item: dict[str, Any] = {
        "text": rollout.text,
        "answer": prompt.answer,
        "metadata": metadata,
        "prompt": [message.to_dict() for message in prompt.input_messages],
        "uid": prompt.uid,
        "domain": prompt.domain,
        "finished": rollout.is_finished,
    }
    if rollout.final_text is not None:
        item["final_text"] = rollout.final_text
    if with_token_ids:
        item["token_ids"] = rollout.token_ids.tolist()
    try:
        text = json.dumps(item, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedPromptError(
            prompt.uid,
            f"its columns cannot be sent as JSON ({error}): list the columns that the service requires in "
            "`metadata_keys` of the reward 'remote'",
        ) from None
    # JSON in UTF-8 cannot contain lone surrogates, which some datasets have.
    return text.encode("utf-8", "replace")


def build_request(request_id: str, items: Sequence[bytes]) -> bytes:
    """Build the body of a request from encoded items."""
    return b'{"id":"' + request_id.encode() + b'","items":[' + b",".join(items) + b"]}"


def build_rollout(item: ScoreItem) -> Rollout:
    """Build the rollout that a service's reward scores.

    Raises:
        ValueError: A message of the prompt is malformed, or a token ID is too large.
    """
    prompt = [{"role": "user", "content": item.prompt}] if isinstance(item.prompt, str) else item.prompt
    try:
        messages = tuple(Message.from_dict(message) for message in prompt)
        token_ids = np.asarray(item.token_ids or (), np.int32)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None
    return Rollout(
        draw_id=0,
        index=0,
        prompt=Prompt(uid=item.uid, domain=item.domain, messages=messages, answer=item.answer, metadata=item.metadata),
        prompt_token_ids=np.zeros(0, np.int32),
        token_ids=token_ids,
        logprobs=np.zeros(len(token_ids), np.float32),
        policy_versions=np.zeros(len(token_ids), np.int32),
        finish_reason="stop" if item.finished else "length",
        text=item.text,
        final_text=item.final_text,
    )


def describe_invalid(error: ValidationError) -> str:
    """Return the first problem of invalid JSON as one line, with the path of the field."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = ".".join(
        name if len(name) <= 60 and name.isprintable() else shorten(name) for name in map(str, first["loc"])
    )
    return f"{path}: {first['msg']}" if path else str(first["msg"])
