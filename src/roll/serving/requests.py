"""The bodies of requests in JSON. A field that the server does not know is rejected, because ignoring it could silently
change what the client asked for.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from roll.errors import shorten
from roll.serving.failures import ApiError

__all__ = [
    "MAX_JSON_BYTES",
    "AdamParams",
    "CancelFuture",
    "ClientConfig",
    "CreateModel",
    "CreateSamplingSession",
    "CreateSession",
    "FinishSession",
    "GetInfo",
    "Heartbeat",
    "LoadWeights",
    "LoraSettings",
    "OptimStep",
    "RetrieveFuture",
    "Sample",
    "SamplingSettings",
    "SaveWeights",
    "SaveWeightsForSampler",
    "WeightsInfo",
    "parse_body",
    "read_place",
]

MAX_JSON_BYTES = 8 * 2**20
"""The largest size of a body in JSON: parsing takes about 1 s. Data for training are in protobuf."""

MAX_FIELDS = 64
"""The largest number of fields of an object in JSON, except in `_FREE`."""
_FREE = frozenset({"user_metadata", "reason"})
"""Objects whose fields the client chooses."""

Id: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]
Index: TypeAlias = Annotated[int, Field(ge=0, le=2**62)]
SeqId: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]
Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
"""The name of a checkpoint, which becomes the name of a directory."""
Ttl: TypeAlias = Annotated[int, Field(ge=3600, le=315_360_000)]
Token: TypeAlias = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopString: TypeAlias = Annotated[str, Field(min_length=1, max_length=1024)]
# An error per item of a long list would take minutes and gigabytes.
StopStrings: TypeAlias = Annotated[list[StopString], Field(max_length=1024, fail_fast=True)]
StopTokens: TypeAlias = Annotated[list[Token], Field(max_length=1024, fail_fast=True)]
Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Beta: TypeAlias = Annotated[Finite, Field(ge=0, le=0.999999)]
"""The update divides by 1 - beta in float32."""
UserMetadata: TypeAlias = dict[str, Any] | None


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class ClientConfig(BaseModel):
    """`client/config` and `client/dynamic_config`."""

    model_config = ConfigDict(extra="ignore")
    sdk_version: str = ""


class CreateSession(_Body):
    """`create_session`."""

    tags: Annotated[list[str], Field(fail_fast=True)] = []
    user_metadata: UserMetadata = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class Heartbeat(_Body):
    """`session_heartbeat`."""

    session_id: Id
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishSession(_Body):
    """`sessions/{id}/finish`."""

    reason: dict[str, Any] = {}
    detail: str | None = None


class LoraSettings(_Body):
    """`lora_config` of `create_model`."""

    rank: Annotated[int, Field(ge=1)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerSettings(_Body):
    """`optimizer_config` of `create_model`."""

    type: Literal["adamw"] = "adamw"


class CreateModel(_Body):
    """`create_model`."""

    session_id: Id
    model_seq_id: Index
    base_model: Id
    user_metadata: UserMetadata = None
    lora_config: LoraSettings
    optimizer_config: OptimizerSettings = OptimizerSettings()
    type: Literal["create_model"] = "create_model"


class _ModelBody(_Body):
    """A request that runs in the order of the requests of its model."""

    model_id: Id
    seq_id: SeqId


class _Place(_ModelBody):
    model_config = ConfigDict(extra="ignore")


class _SaveBody(_ModelBody):
    """A request that saves the weights of its model."""

    ttl_seconds: Ttl | None = None
    user_metadata: UserMetadata = None


class GetInfo(_Body):
    """`get_info`."""

    model_id: Id
    type: Literal["get_info"] = "get_info"


class AdamParams(_Body):
    """`adam_params` of `optim_step`. Within these limits, the update of a finite gradient is finite in float32."""

    learning_rate: Annotated[Finite, Field(ge=0, le=100)] = 1e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Annotated[Finite, Field(ge=1e-30)] = 1e-12
    weight_decay: Annotated[Finite, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[Finite, Field(ge=0)] = 0.0


class OptimStep(_ModelBody):
    """`optim_step`."""

    adam_params: AdamParams
    type: Literal["optim_step"] = "optim_step"


class SaveWeights(_SaveBody):
    """`save_weights`."""

    path: Name
    overwrite: bool = False
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSampler(_SaveBody):
    """`save_weights_for_sampler`."""

    path: Name | None = None
    sampling_session_seq_id: Index | None = None
    kind: Literal["snapshot"] = "snapshot"
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class LoadWeights(_Body):
    """`load_weights`: into a model (`model_id`), or into a new one (`session_id`)."""

    path: Id
    optimizer: bool
    model_id: Id | None = None
    seq_id: SeqId | None = None
    session_id: Id | None = None
    model_seq_id: Index | None = None
    base_model: Id | None = None
    optimizer_config: OptimizerSettings | None = None
    user_metadata: UserMetadata = None
    weights_access_token: None = None
    type: Literal["load_weights"] = "load_weights"


class CreateSamplingSession(_Body):
    """`create_sampling_session`."""

    session_id: Id
    sampling_session_seq_id: Index
    base_model: Id | None = None
    model_path: Id | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class TextChunk(_Body):
    """A part of a prompt."""

    tokens: Annotated[list[Token], Field(fail_fast=True)]
    type: Literal["encoded_text"]


class Prompt(_Body):
    """`prompt` of `asample`."""

    chunks: Annotated[list[TextChunk], Field(max_length=4096, fail_fast=True)]


class SamplingSettings(_Body):
    """`sampling_params` of `asample`."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: StopString | StopStrings | StopTokens | None = None
    temperature: Annotated[Finite, Field(ge=0, le=1e6)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0


class Sample(_Body):
    """`asample`."""

    sampling_session_id: Id
    seq_id: Index
    prompt: Prompt
    sampling_params: SamplingSettings
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=0)] = 0
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=0)] = 0
    target_prompt_logprobs: None = None
    record_stability_info: Literal[False] | None = None
    base_model: None = None
    model_path: None = None
    type: Literal["sample"] = "sample"


class RetrieveFuture(_Body):
    """`retrieve_future`."""

    request_id: Id
    allow_metadata_only: bool = False


class CancelFuture(_Body):
    """`cancel_future`."""

    request_id: Id


class WeightsInfo(_Body):
    """`weights_info`."""

    tinker_path: Id


B = TypeVar("B", bound=BaseModel)

_UNSUPPORTED = {
    "topk_prompt_logprobs": "top-k log-probs of the prompt are not supported: set it to 0",
    "topk_sample_logprobs": "top-k log-probs of sampled tokens are not supported: set it to 0",
    "prompt_alt_tokens_k": "alternatives to the prompt's tokens are not supported: set it to 0",
    "target_prompt_logprobs": "log-probs of other tokens in the prompt are not supported: leave it out",
    "record_stability_info": "the loss stable_reinforce is not supported: set it to false",
    "kind": "only 'snapshot' is supported, because weights for sampling never change",
    "optimizer_config.type": "only 'adamw' is supported",
    "optimizer_params": "only AdamW is supported: send adam_params",
    "weights_access_token": "access tokens are not supported: use the key that saved the weights",
    "base_model": "is not supported here",
    "model_path": "is not supported here: create a sampling session",
    "path": "must be a name of at most 128 letters, digits, '.', '_' and '-'",
}
"""Error messages for values that the API allows and this server does not, by field."""
_SUPPORTED = {
    (CreateModel, "base_model"),
    (CreateSamplingSession, "base_model"),
    (CreateSamplingSession, "model_path"),
    (LoadWeights, "base_model"),
    (LoadWeights, "path"),
}
"""Bodies in which a field of `_UNSUPPORTED` has another meaning."""


def parse_body(kind: type[B], body: bytes) -> B:
    """Parse a body in JSON.

    Raises:
        ApiError: The body is not JSON, or a field is missing, unknown or invalid. The error names the first such field.
    """
    if len(body) > MAX_JSON_BYTES:
        raise ApiError(413, f"a body in JSON must have at most {MAX_JSON_BYTES} bytes, got {len(body)}.")
    try:
        content = from_json(body or b"{}")
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(content).__name__}.")
    _check_num_fields(content)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _describe_error(kind, error) from error


def _check_num_fields(content: dict[str, Any]) -> None:
    """Check that no object has so many fields that an error for each of them would take long."""
    stack: list[tuple[str, Any]] = [("", content)]
    while stack:
        field, value = stack.pop()
        if isinstance(value, list):
            stack += [(field, each) for each in value if isinstance(each, dict)]
            continue
        if len(value) > MAX_FIELDS:
            problem = f"an object must have at most {MAX_FIELDS} fields, got {len(value)}."
            raise ApiError(400, problem, field=field or shorten(next(reversed(value))))
        stack += [
            (f"{field}.{name}" if field else name, each) for name, each in value.items() if _is_nested(name, each)
        ]


def _is_nested(name: str, value: object) -> bool:
    return isinstance(value, dict | list) and name not in _FREE and name.isidentifier()


def read_place(body: bytes) -> tuple[str, int] | None:
    """Return the model and the sequence ID in a body that was rejected; `None` if it has none."""
    try:
        return (place := _Place.model_validate(from_json(body))).model_id, place.seq_id
    except ValueError:  # also a `ValidationError`
        return None


def _describe_error(kind: type[BaseModel], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    field = ""
    for part in first["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif part.isidentifier() and not (field.endswith("stop") and part in ("str", "list")):
            field += f".{part}" if field else part
        elif first["type"] == "extra_forbidden":
            field += f".{shorten(part)}" if field else shorten(part)
    if first["type"] == "missing":
        return ApiError(400, "this field is missing.", field=field)
    if field in _UNSUPPORTED and (kind, field) not in _SUPPORTED:
        return ApiError(400, f"{_UNSUPPORTED[field]}; got {shorten(first['input'])}.", field=field)
    if field.startswith("sampling_params.stop"):
        problem = f"must be a string, strings, or tokens; got {shorten(first['input'])}."
        return ApiError(400, problem, field="sampling_params.stop")
    if first["type"] == "extra_forbidden":
        known = f" The fields of the request are: {', '.join(kind.model_fields)}." if len(first["loc"]) == 1 else ""
        return ApiError(400, f"this field is not supported.{known}", field=field)
    problem = first["msg"].replace("Input should be", "must be")
    for words, symbol in (("greater than", ">"), ("less than", "<")):
        problem = problem.replace(f"{words} or equal to", f"{symbol}=").replace(words, symbol)
    return ApiError(400, f"{problem}, got {shorten(first['input'])}.", field=field)
