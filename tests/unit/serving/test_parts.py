"""Parts of the training server without a model: keys, promises, and the wire format."""

from __future__ import annotations

import asyncio
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_client import tensor

from roll.errors import ConfigError
from roll.serving import ServeSettings, requests, wire
from roll.serving.failures import ApiError, RequestFailure
from roll.serving.losses import LOSSES, build_loss
from roll.serving.promises import KEEP_S, KEEP_UNREAD_S, Promises
from roll.serving.settings import create_key, read_keys
from roll.serving.startup import open_server
from roll.serving.submissions import Result, Submission
from roll.serving.wire import CLASSES


def test_serving_keys_have_owners(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# staff\nalice=tml-aaaaaaaa\n\nbob = tml-bbbbbbbb\n", encoding="utf-8")
    assert read_keys(["tml-cccccccc", "dan=tml-dddddddd"], file) == {
        "tml-cccccccc": "default",
        "tml-dddddddd": "dan",
        "tml-aaaaaaaa": "alice",
        "tml-bbbbbbbb": "bob",
    }
    assert create_key() != create_key() and create_key().startswith("tml-")
    for given, message in (
        (["sk-12345678"], "must be 'tml-' and at least 8 .*: this key has another prefix"),
        (["tml-1"], "this key has 1 characters after the prefix"),
        (["tml-1234567ü"], "this key has other characters"),
        (["a=tml-12345678", "b=tml-12345678"], "is also the key of 'a'"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_keys(given, None)
    file.write_text("tml-aaaaaaaa\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 1 of .* must be OWNER=KEY"):
        read_keys([], file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys([], tmp_path / "missing")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_rank": 0}, "--max-rank must be >= 1"),
        ({"alpha": 0.0}, "--alpha must be > 0"),
        ({"max_context": 1}, "--max-context must be >= 2"),
        ({"max_adapters": 0}, "--max-adapters must be >= 1"),
        ({"session_timeout_s": 0.0}, "--session-timeout must be > 0"),
        ({"keys": {}}, "needs at least one key"),
    ],
)
def test_serving_settings_are_checked(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeSettings(**({"model": "x", "keys": {"tml-12345678": "a"}} | changes))  # type: ignore[arg-type]


async def test_serving_refuses_a_context_longer_than_the_models(tmp_path: Path, tiny_model: Path) -> None:
    settings = ServeSettings(
        model=str(tiny_model), engine="hf", directory=tmp_path, max_context=513, keys={"tml-12345678": "a"}
    )
    with pytest.raises(ConfigError, match=r"--max-context must be <= 512, the context length of .*, got 513\."):
        async with open_server(settings):
            pass


async def test_serving_results_expire_and_are_private_to_their_owner() -> None:
    now = [0.0]
    promises = Promises(lambda: now[0])

    async def work(fails: bool) -> Result:
        if fails:
            raise ExceptionGroup("several", [ApiError(400, "wrong.", field="a.b")])
        return Result(body=b"x")

    read, unread, failed = (promises.create("alice", Submission(path="x", body=b"")) for _ in range(3))
    for promise in (read, unread, failed):
        promises.run(promise, work(promise is failed))
    assert await promises.wait(read, 1.0) == Result(body=b"x")
    failure = await promises.wait(failed, 1.0)
    assert isinstance(failure, RequestFailure) and (failure.message, failure.category) == ("a.b: wrong.", "user")
    with pytest.raises(ApiError):
        promises.find(read.request_id, "bob")
    now[0] = KEEP_S + 1
    promises.drop_expired()
    assert len(promises) == 1 and promises.find(unread.request_id, "alice") is unread
    assert isinstance(read.outcome, RequestFailure)  # the memory of the result is free
    now[0] = KEEP_UNREAD_S + 1
    promises.drop_expired()
    assert len(promises) == 0

    endless = promises.create("alice", Submission(path="x", body=b""))
    promises.run(endless, asyncio.Event().wait())  # type: ignore[arg-type]
    assert await promises.wait(endless, 0.01) is None
    await promises.close()
    assert await promises.wait(endless, 1.0) is None  # "try again": a later server continues


def test_serving_messages_have_the_field_numbers_of_the_public_client() -> None:
    # Written by hand from the protobuf encoding: field number << 3 | wire type, length, content.
    datum = b"\x0a\x06\x0a\x04\x0a\x02\x00\x00"  # one chunk of two bytes, which are not a token
    body = b"\x0a\x01m" + b"\x10\x05" + b"\x1a" + bytes([len(datum)]) + datum + b"\x22\x03dro" + b"\x30\x01"
    body += b"\x3a\x0f" + b"\x0a\x04beta" + b"\x12\x07\x12\x05words"
    message = wire.parse_forward_backward(body)
    assert (message.model_id, message.seq_id, message.loss_fn, message.forward_only) == ("m", 5, "dro", True)
    assert wire.get_loss_config(message) == {"beta": "words"}
    with pytest.raises(ApiError, match="2 bytes are not a whole number of int32 tokens"):
        wire.decode_int32(message.data[0].model_input[0].encoded_text.tokens, "x")
    with pytest.raises(ApiError, match="not a ForwardBackwardRequest"):
        wire.parse_forward_backward(b"\x0a\xff")
    answer = wire.encode_samples([(np.array([7]), np.array([-1.0]), "length")])
    assert answer == b"\x0a\x0e" + b"\x08\x01" + b"\x12\x04\x07\x00\x00\x00" + b"\x1a\x04\x00\x00\x80\xbf"


def test_serving_tensors_are_checked() -> None:
    sparse = CLASSES["Tensor"](dtype=2, shape=[1, 3])
    sparse.sparse_csr.values = b""
    cases = [
        (sparse, r"one dimension, got the shape \[1, 3\]"),
        (tensor([[1, 2, 3]]), "one dimension"),
        (CLASSES["Tensor"](dtype=2, dense=b"123"), "3 bytes are not a whole number"),
        (tensor([1, 2, 3], shape=[4]), r"has 3 elements, but the shape \[4\]"),
        (tensor([1, 2]), "must have 3 elements"),
        (tensor([1, 2, -1]), "-1 at position 2 is not a token"),
        (tensor([1, 2, 2**40]), "is not a token"),
        (tensor([1.0, 2.0, 3.0]), "must have the dtype int64"),
    ]
    for message, expected in cases:
        with pytest.raises(ApiError, match=expected):
            wire.read_integers(message, 3, "x")
    assert wire.read_floats(tensor([1, 2, 3]), 3, "x").tolist() == [1.0, 2.0, 3.0]
    assert set(LOSSES) == {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"}


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (requests.Sample, b'{"prompt": {"chunks": [{"type": "encoded_text", "tokens": [%s"a"]}]}}', r"tokens\[0\]: "),
        (requests.Sample, b'{"sampling_params": {"stop": [%s"a"]}}', "stop: must be a string, strings, or tokens"),
        (requests.Sample, b'{"prompt": {"chunks": [%s"a"]}}', r"chunks\[0\]: .* valid dictionary"),
        (requests.CreateSession, b'{"tags": [%s{}]}', r"tags\[0\]: "),
    ],
)
def test_serving_long_lists_of_wrong_items_are_refused_with_one_error(kind: Any, body: bytes, message: str) -> None:
    """An error for each of the items would take 30 s and 1 GB."""
    body = body % (b"1.5," * 1_000_000)
    rest = {"sampling_session_id": "a", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}}
    for name in [name for name in rest if name.encode() in body or kind is requests.CreateSession]:
        del rest[name]
    body = body[:-1] + b"".join(f', "{name}": {json.dumps(value)}'.encode() for name, value in rest.items()) + b"}"
    tracemalloc.start()
    with pytest.raises(ApiError) as failure:
        requests.parse_body(kind, body)
    assert re.search(message, f"{failure.value.field}: {failure.value.message}") and len(failure.value.message) < 200
    assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    tracemalloc.stop()


def test_serving_bodies_with_too_many_bytes_or_fields_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {f"field{number}": 1 for number in range(65)}
    bodies: dict[str, Any] = {
        "field64: an object must have at most 64 fields, got 65": many,
        "prompt.chunks: an object": {"prompt": {"chunks": [{}, many]}},
    }
    for message, content in bodies.items():
        with pytest.raises(ApiError) as failure:
            requests.parse_body(requests.Sample, json.dumps(content).encode())
        assert message in f"{failure.value.field.strip(chr(39))}: {failure.value.message}"
    requests.parse_body(requests.CreateSession, json.dumps({"user_metadata": many}).encode())
    monkeypatch.setattr(requests, "MAX_JSON_BYTES", 10)
    with pytest.raises(ApiError, match="at most 10 bytes, got 11") as failure:
        requests.parse_body(requests.CreateSession, b"{         }")
    assert failure.value.status == 413


def test_serving_errors_do_not_repeat_long_values() -> None:
    name = "x" * 100_000
    for loss, config in ((name, {}), ("ppo", {name: 1.0}), ("dro", {"beta": name})):
        with pytest.raises(ApiError) as failure:
            build_loss(loss, config)
        assert len(failure.value.message) + len(failure.value.field) < 400
    with pytest.raises(ApiError) as failure:
        wire.read_floats(tensor([1.0], shape=[1] * 100_000), 1, "x")
    assert len(failure.value.message) < 200


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (requests.LoadWeights, {"path": "x" * 300, "optimizer": True}, "path: String should have at most 256"),
        (
            requests.CreateSamplingSession,
            {"session_id": "a", "sampling_session_seq_id": 0, "model_path": "x" * 300},
            "model_path: String should have at most 256",
        ),
        (requests.SaveWeights, {"model_id": "a", "seq_id": 1, "path": "x" * 300}, "path: must be a name of at most"),
    ],
)
def test_serving_fields_of_several_bodies_have_the_error_of_their_body(
    kind: Any, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(ApiError) as failure:
        requests.parse_body(kind, json.dumps(body).encode())
    assert f"{failure.value.field}: {failure.value.message}".startswith(message)
