"""The protobuf messages of the API: the body of `forward_backward`, and the results of training and sampling.

The field numbers are those of the public client. Fields that the server does not use are left out; protobuf ignores
them. The messages are in a descriptor pool of their own, so the client can be imported in the same process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from roll.errors import shorten
from roll.serving.failures import ApiError
from roll.types import FloatArray, IntArray

__all__ = [
    "CONTENT_TYPE",
    "decode_int32",
    "encode_outputs",
    "encode_samples",
    "get_loss_config",
    "parse_forward_backward",
    "read_floats",
    "read_integers",
]

CONTENT_TYPE = "application/x-protobuf"
_PACKAGE = "roll_serving"
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _FIELD.TYPE_BOOL,
    "bytes": _FIELD.TYPE_BYTES,
    "double": _FIELD.TYPE_DOUBLE,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "string": _FIELD.TYPE_STRING,
}
_MESSAGES: dict[str, tuple[str, ...]] = {
    # a field: [optional | repeated | map | oneof:NAME] TYPE NAME NUMBER; the keys of maps are strings
    "EncodedTextChunk": ("bytes tokens 1",),
    "ImageChunk": ("bytes data 1",),
    "DmelChunk": ("bytes dmel 1",),
    "Chunk": (
        "oneof:chunk EncodedTextChunk encoded_text 1",
        "oneof:chunk ImageChunk image 2",
        "oneof:chunk DmelChunk dmel 3",
    ),
    "SparseCsr": ("bytes values 1", "bytes crow_indices 2", "bytes col_indices 3"),
    "Tensor": (
        "oneof:encoding bytes dense 1",
        "oneof:encoding SparseCsr sparse_csr 2",
        "int32 dtype 3",
        "repeated int64 shape 4",
    ),
    "Datum": ("repeated Chunk model_input 1", "map Tensor loss_fn_inputs 2"),
    "LossConfigValue": ("oneof:value double number 1", "oneof:value string text 2"),
    "ForwardBackwardRequest": (
        "string model_id 1",
        "int32 seq_id 2",
        "repeated Datum data 3",
        "string loss_fn 4",
        "map double loss_fn_config 5",
        "bool forward_only 6",
        "map LossConfigValue loss_fn_config_v2 7",
    ),
    "BatchedTensor": ("bytes data 1", "bytes offsets 2", "int32 dtype 3", "repeated int64 trailing_shape 4"),
    "ArrayRecord": ("string type_tag 1", "map BatchedTensor fields 2", "int64 num_datums 3"),
    "ForwardBackwardOutput": (
        "string loss_fn_output_type 1",
        "repeated ArrayRecord loss_fn_outputs 2",
        "map double metrics 3",
    ),
    "SampledSequence": ("int32 stop_reason 1", "bytes tokens 2", "optional bytes logprobs 3"),
    "SampleResponse": ("repeated SampledSequence sequences 1", "optional bytes prompt_logprobs 2"),
}
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_DTYPES = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8"), _INT32: np.dtype("<i4")}
_STOP_REASONS = {"stop": 0, "length": 1}


def _add_field(message: Any, text: str) -> None:
    """Add a field to the descriptor of a message; see `_MESSAGES`."""
    *modifier, kind, name, number = text.split()
    label = modifier[0] if modifier else ""
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    if label in ("repeated", "map"):
        field.label = _FIELD.LABEL_REPEATED
    if label == "map":
        entry_name = name.title().replace("_", "") + "Entry"  # the name that protobuf requires
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, "string key 1")
        _add_field(entry, f"{kind} value 2")
        kind = f"{message.name}.{entry_name}"
    if label == "optional" or label.startswith("oneof:"):
        oneof = f"_{name}" if label == "optional" else label.removeprefix("oneof:")
        known = [each.name for each in message.oneof_decl]
        if oneof not in known:
            message.oneof_decl.add(name=oneof)
            known.append(oneof)
        field.oneof_index = known.index(oneof)
        field.proto3_optional = label == "optional"
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _FIELD.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"


def _build_classes() -> dict[str, Any]:
    """Return the message classes, by name."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            _add_field(message, field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


CLASSES = _build_classes()
"""The message classes, by name."""


def parse_forward_backward(body: bytes) -> Any:
    """Parse the body of `forward_backward`.

    Raises:
        ApiError: The body is not such a message.
    """
    message = CLASSES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ApiError(400, f"the body is not a ForwardBackwardRequest in protobuf: {error}") from error
    return message


def get_loss_config(message: Any) -> dict[str, float | str]:
    """Return `loss_fn_config` of a request."""
    settings: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        settings[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return settings


def decode_int32(data: bytes, field: str) -> IntArray:
    """Decode the tokens of a chunk.

    Raises:
        ApiError: The number of bytes is not a multiple of 4.
    """
    if len(data) % 4:
        raise ApiError(400, f"{len(data)} bytes are not a whole number of int32 tokens.", field=field)
    return np.frombuffer(data, "<i4")


def read_integers(tensor: Any, length: int, field: str) -> IntArray:
    """Read a tensor of integers with one dimension, as int32. The numbers are not compared with a vocabulary.

    Args:
        tensor: The message `Tensor`.
        length: The required number of elements.
        field: The name of the tensor in errors.

    Raises:
        ApiError: The tensor has another dtype, dimension or length, or a number is out of range.
    """
    values = _read_elements(tensor, length, (_INT64, _INT32), "int64", field)
    wrong = np.flatnonzero((values < 0) | (values > np.iinfo(np.int32).max))
    if len(wrong):
        raise ApiError(400, f"{values[wrong[0]]} at position {wrong[0]} is not a token.", field=field)
    return values.astype(np.int32)


def read_floats(tensor: Any, length: int, field: str) -> FloatArray:
    """Read a tensor of finite numbers with one dimension, as float32; see `read_integers`.

    Raises:
        ApiError: The tensor has another dtype, dimension or length, or a number is not finite.
    """
    numbers = _read_elements(tensor, length, (_FLOAT32, _INT64, _INT32), "float32", field).astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if len(wrong):
        raise ApiError(400, f"must be finite, got {numbers[wrong[0]]} at position {wrong[0]}.", field=field)
    return numbers


def _read_elements(tensor: Any, length: int, allowed: Sequence[int], expected: str, field: str) -> NDArray[Any]:
    shape = tuple(tensor.shape)
    if len(shape) > 1 or tensor.WhichOneof("encoding") == "sparse_csr":
        raise ApiError(400, f"must have one dimension, got the shape {shorten(list(shape))}.", field=field)
    if tensor.dtype not in allowed:
        raise ApiError(400, f"must have the dtype {expected}, got the dtype number {tensor.dtype}.", field=field)
    dtype = _DTYPES[tensor.dtype]
    if len(tensor.dense) % dtype.itemsize:
        raise ApiError(400, f"{len(tensor.dense)} bytes are not a whole number of {dtype} elements.", field=field)
    values = np.frombuffer(tensor.dense, dtype)
    if shape not in ((), (len(values),)):
        raise ApiError(400, f"has {len(values)} elements, but the shape {shorten(list(shape))}.", field=field)
    if len(values) != length:
        problem = f"must have {length} elements, one per token of model_input, got {len(values)}."
        raise ApiError(400, problem, field=field)
    return values


def encode_outputs(logprobs: Sequence[FloatArray], metrics: Mapping[str, float]) -> bytes:
    """Encode the result of `forward_backward`: the log-probs of each datum's targets, and the metrics."""
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    column = record.fields["logprobs"]
    column.dtype = _FLOAT32
    column.data = b"".join(np.ascontiguousarray(each, "<f4").tobytes() for each in logprobs)
    column.offsets = np.cumsum([0, *(4 * len(each) for each in logprobs)], dtype="<i8").tobytes()
    return message.SerializeToString()


def encode_samples(
    sequences: Sequence[tuple[IntArray, FloatArray, str]], prompt_logprobs: FloatArray | None = None
) -> bytes:
    """Encode the result of `asample`.

    Args:
        sequences: Tokens, log-probs, and the stop reason (`stop` or `length`) of each sequence.
        prompt_logprobs: The log-probs of the prompt's tokens, NaN where they were not computed; `None` if they were not
            requested.
    """
    message = CLASSES["SampleResponse"]()
    for tokens, logprobs, reason in sequences:
        message.sequences.add(
            stop_reason=_STOP_REASONS[reason],
            tokens=np.ascontiguousarray(tokens, "<i4").tobytes(),
            logprobs=np.ascontiguousarray(logprobs, "<f4").tobytes(),
        )
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.ascontiguousarray(prompt_logprobs, "<f4").tobytes()
    return message.SerializeToString()
