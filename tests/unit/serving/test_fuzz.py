"""Every body of the API, drawn from its schema: as described, with one part replaced, or nothing of the kind.

Each answer is a result or one error that names the field. What fails changes nothing, and no key reaches what another
key owns.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import hypothesis.strategies as st
import numpy as np
import pytest
from api_client import ADAM, KEY, OTHER_KEY, ApiFailure, Client, client, datum, decode_outputs, serving
from hypothesis import HealthCheck, given, settings
from worlds.schemas import ANYTHING, TEXT, allowed

from roll.serving import requests
from roll.serving.losses import LOSSES
from roll.serving.routes import ROUTES
from roll.serving.wire import CLASSES, CONTENT_TYPE

pytestmark = pytest.mark.integration

T = TypeVar("T")

BODIES = {
    **{path: route.body for path, route in ROUTES.items()},
    "retrieve_future": requests.RetrieveFuture,
    "sessions/@own/finish": requests.FinishSession,
}
SCHEMAS = {path: body.model_json_schema() for path, body in BODIES.items()}
MODEL_PATHS = ("optim_step", "save_weights", "save_weights_for_sampler", "load_weights")
"""Requests that could change a model."""
IDS = ("session_id", "model_id", "sampling_session_id", "request_id", "tinker_path", "model_path")
WHOSE = st.sampled_from(["@own", "@own", "@own", "@other"]) | st.text(min_size=1, max_size=5)
TOKENS = list(range(10, 22))


def simple(weight: float = 1.0) -> Any:
    return datum(TOKENS, TOKENS[::-1], weights=np.full(len(TOKENS), weight))


@st.composite
def bodies(draw: st.DrawFn, paths: tuple[str, ...]) -> tuple[str, Any]:
    """A path and a body. IDs are "@own", "@other" or nonsense; "@next" is a number that was not used before."""
    path = draw(st.sampled_from(paths))
    named: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(IDS, WHOSE)
    named |= {"model_seq_id": st.just("@next") | st.integers(0, 2), "base_model": st.just("tiny") | TEXT}
    named["sampling_session_seq_id"] = st.just("@next") | st.integers(0, 2) | st.none()
    named["seq_id"] = st.just("@next") if path == "asample" else st.integers(0, 2)
    if path == "load_weights":
        named["path"] = WHOSE
    body = draw(allowed(SCHEMAS[path], SCHEMAS[path].get("$defs", {}), named))
    match draw(st.integers(0, 9)):
        case 0 | 1 | 2 if body:
            body = {**body, draw(st.sampled_from(sorted(body))): draw(ANYTHING)}
        case 3 if body:
            body = dict(body)
            del body[draw(st.sampled_from(sorted(body)))]
        case 4:
            body = {**body, draw(TEXT): draw(ANYTHING)}
        case 5:
            body = draw(ANYTHING)
    return path, body


class World:
    """A server with what alice and bob own, in a loop of its own."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.numbers = itertools.count(1000)
        self.run(self._open(model, directory))

    def run(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))  # nothing hangs

    async def _open(self, model: Path, directory: Path) -> None:
        server = await self.stack.enter_async_context(serving(model, directory, gap_timeout_s=0.05))
        self.alice = await self.stack.enter_async_context(client(server))
        self.bob = await self.stack.enter_async_context(client(server, OTHER_KEY))
        self.ids = {"@own": await self._fill(self.alice), "@other": await self._fill(self.bob)}
        self.base_loss = await self.measure(self.alice, await self.alice.create_model(9), 1)
        self.bobs_loss = await self.measure(self.bob, self.ids["@other"]["model_id"])

    async def _fill(self, one: Client) -> dict[str, str]:
        model = await one.create_model(0)
        await one.forward_backward(model, [simple()])
        await one.step(model)
        sampler = {"model_id": model, "seq_id": one.next_seq(model), "path": "sampler"}
        return {
            "session_id": one.session_id,
            "model_id": model,
            "model_path": (await one.result(await one.send("save_weights_for_sampler", sampler)))["path"],
            "tinker_path": await one.save(model, "state"),
            "sampling_session_id": await one.snapshot(model, 5),
            "request_id": (await one.submit(model, [simple()], forward_only=True))["request_id"],
        }

    async def measure(self, one: Client, model: str, seq: int | None = None) -> float:
        """The loss of a model, without a gradient."""
        return (await one.forward_backward(model, [simple()], seq=seq, forward_only=True))[0]

    def name_ids(self, path: str, body: Any, model: str) -> tuple[str, Any, bool]:
        """The path and body with real IDs, and whether one of them is bob's."""
        is_foreign = False
        if isinstance(body, dict):
            body = dict(body)
            for name, value in body.items():
                kind = "tinker_path" if (path, name) == ("load_weights", "path") else name
                if value in ("@own", "@other") and kind in IDS:
                    body[name] = self.ids[value][kind]
                    is_foreign |= value == "@other"
                    if (value, kind) == ("@own", "model_id"):
                        body[name] = model
                elif value == "@next":
                    body[name] = next(self.numbers)
        return path.replace("@own", "no-such-session"), body, is_foreign


@pytest.fixture(scope="module")
def world(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tiny_model, tmp_path_factory.mktemp("fuzz"))
    yield made
    made.run(made.stack.aclose())
    made.loop.close()


async def outcome(one: Client, path: str, body: bytes, content_type: str = "application/json") -> Any:
    """A result, or a failure: its answer is one error, and a promise fails only by the client's mistake."""
    try:
        found = await one.send(path, body, content_type=content_type)
        if isinstance(found, dict) and "request_id" in found and path != "retrieve_future":
            found = await one.result(found)
        return found
    except ApiFailure as failure:
        assert failure.status in (200, 400, 404, 410, 413, 415), failure
        assert failure.content["error"] and failure.content.get("category", "user") == "user", failure
        return failure


def check_error(path: str, body: Any, failure: ApiFailure) -> None:
    """The error names a field of the request."""
    if failure.status == 200:  # through a promise
        return
    text, field = failure.content["error"], failure.content["field"]
    if field is None:
        assert text.startswith(("the body must be a JSON object", "the body is not valid JSON")), failure
        assert not isinstance(body, dict) or "JSON" in text, failure
        return
    assert text.startswith(f"{field}: ")
    known = re.split(r"[.\[]", field)[0] in {*BODIES[path].model_fields, *(body if isinstance(body, dict) else ())}
    assert known or "this field is not supported" in text, failure


EVERYTHING = settings(max_examples=120, suppress_health_check=list(HealthCheck))


async def attack(world: World, path: str, body: Any) -> None:
    alice = world.alice
    model = await alice.create_model(next(world.numbers)) if path in MODEL_PATHS else ""
    url, body, is_foreign = world.name_ids(path, body, model)
    text = json.dumps(body).encode("utf-8", "surrogatepass")
    found = await outcome(alice, url, text)
    if isinstance(found, ApiFailure) and not path.startswith("sessions/"):
        check_error(path, body, found)
    assert not is_foreign or isinstance(found, ApiFailure), (path, body)
    if model and isinstance(found, ApiFailure):  # nothing has changed
        seq = body["seq_id"] + 1 if found.status == 200 and body.get("model_id") == model else 1
        assert await world.measure(alice, model, seq) == world.base_loss


@EVERYTHING
@given(bodies(tuple(BODIES)))
def test_serving_fuzz_every_body_gets_a_result_or_an_error_with_the_field(world: World, sent: tuple[str, Any]) -> None:
    world.run(attack(world, *sent))


@EVERYTHING
@given(bodies(MODEL_PATHS))
def test_serving_fuzz_failed_requests_do_not_change_models(world: World, sent: tuple[str, Any]) -> None:
    world.run(attack(world, *sent))


@pytest.mark.slow
@settings(max_examples=5000, suppress_health_check=list(HealthCheck))
@given(bodies(tuple(BODIES)))
def test_serving_fuzz_many_bodies_cause_no_server_error(world: World, sent: tuple[str, Any]) -> None:
    world.run(attack(world, *sent))


NUMBERS = st.floats(width=32) | st.sampled_from([0.0, 1.0, -1.0])


def make_tensor(dtype: int, values: list[Any], extra: bytes, shape: list[int] | None, is_sparse: bool) -> Any:
    kind = {1: "<f4", 3: "<i4"}.get(dtype, "<i8")
    with np.errstate(all="ignore"):
        content = (
            np.nan_to_num(np.asarray(values, np.float64)).astype(kind) if kind != "<f4" else np.asarray(values, kind)
        )
    message = CLASSES["Tensor"](dtype=dtype, shape=[len(values)] if shape is None else shape)
    if is_sparse:
        message.sparse_csr.values = content.tobytes()
    else:
        message.dense = content.tobytes() + extra
    return message


def tensors(length: int) -> st.SearchStrategy[Any]:
    """Tensors of which about half are as described."""
    return st.builds(
        make_tensor,
        st.sampled_from([1, 1, 2, 2, 3, 0, 9, -1]),
        st.lists(NUMBERS, min_size=length, max_size=length) | st.lists(NUMBERS, max_size=4),
        st.just(b"") | st.binary(max_size=3),
        st.none() | st.lists(st.integers(-2, 9), max_size=2),
        st.sampled_from([False, False, False, True]),
    )


@st.composite
def messages(draw: st.DrawFn) -> Any:
    """A `ForwardBackwardRequest` without a model."""
    loss = draw(st.sampled_from(sorted(LOSSES)) | TEXT)
    columns = LOSSES[loss].columns if loss in LOSSES else ("weights",)
    data = []
    for _ in range(draw(st.integers(0, 2))):
        tokens = draw(st.lists(st.integers(4, 258), min_size=1, max_size=6))
        each = datum(tokens, tokens, **{name: np.ones(len(tokens)) for name in columns})
        match draw(st.integers(0, 7)):
            case 0 | 1:
                name = draw(st.sampled_from(["target_tokens", *columns]) | TEXT)
                each.loss_fn_inputs[name].CopyFrom(draw(tensors(len(tokens))))
            case 2:
                del each.loss_fn_inputs[draw(st.sampled_from(["target_tokens", *columns]))]
            case 3:
                numbers = draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3))
                tail = draw(st.sampled_from([b"", b"\x00"]))
                each.model_input[0].encoded_text.tokens = np.asarray(numbers, "<i4").tobytes() + tail
            case 4:
                chunk = each.model_input.add()
                if kind := draw(st.sampled_from(["", "image", "dmel"])):
                    getattr(chunk, kind).SetInParent()
        data.append(each)
    return CLASSES["ForwardBackwardRequest"](
        data=data,
        loss_fn=loss,
        loss_fn_config=draw(st.dictionaries(st.sampled_from(["beta", "clip_low_threshold", "x"]), NUMBERS, max_size=1)),
        forward_only=draw(st.booleans()),
    )


@EVERYTHING
@given(messages(), st.sampled_from([2, 2, 2, 3, 0, -1, 2**31 - 1]))
def test_serving_fuzz_invalid_data_are_named_and_do_not_change_models(world: World, message: Any, seq: int) -> None:
    async def attempt() -> None:
        alice = world.alice
        model = await alice.create_model(next(world.numbers))
        await alice.forward_backward(model, [simple()], seq=1)  # a gradient that must not be applied alone
        message.model_id, message.seq_id = model, seq
        found = await outcome(alice, "forward_backward", message.SerializeToString(), CONTENT_TYPE)
        if not isinstance(found, ApiFailure):
            loss, logprobs = decode_outputs(found)
            assert np.isfinite(loss) and all(np.isfinite(each).all() for each in logprobs)
            return
        named = r"seq_id: |data(\[\d+\])?[.:]|loss_fn(_config\.\w+)?: |the loss is |request \d+ failed: request"
        assert re.match(named, found.content["error"]), found
        if seq == 2**31 - 1:
            return
        if found.status != 200 or message.forward_only:  # it has no place in the order, or no gradient
            return
        following = seq + 1
        step = {"model_id": model, "seq_id": following, "adam_params": ADAM}
        rejected = await outcome(alice, "optim_step", json.dumps(step).encode())
        assert isinstance(rejected, ApiFailure) and "optim_step was rejected" in str(rejected)
        assert await world.measure(alice, model, following + 1) == world.base_loss

    world.run(attempt())


@EVERYTHING
@given(
    st.sampled_from([*BODIES, "forward_backward"]), st.binary(max_size=40), st.sampled_from([CONTENT_TYPE, "text/x"])
)
def test_serving_fuzz_random_bytes_are_rejected(world: World, path: str, body: bytes, content_type: str) -> None:
    found = world.run(outcome(world.alice, path, body, content_type))
    assert isinstance(found, ApiFailure) or body == b""


@pytest.mark.parametrize("path", [path for path, body in BODIES.items() if set(IDS) & set(body.model_fields)])
def test_serving_fuzz_ids_of_other_keys_are_unknown(world: World, path: str) -> None:
    """Each ID of bob, in a body that is valid otherwise."""
    own, other = world.ids["@own"], world.ids["@other"]
    rest = {"seq_id": 900, "adam_params": {}, "path": "mine", "model_seq_id": 901, "sampling_session_seq_id": 902}
    rest |= {"base_model": "tiny", "lora_config": {"rank": 2}, "optimizer": True, "sampling_params": {"max_tokens": 1}}
    rest |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}}
    if path == "load_weights":
        rest = {"optimizer": True, "model_seq_id": 901, "path": own["tinker_path"]}
    if path == "save_weights_for_sampler":
        del rest["sampling_session_seq_id"]
    fields = BODIES[path].model_fields
    body = {name: value for name, value in {**own, **rest}.items() if name in fields}
    if path == "asample":
        body |= {"base_model": None, "model_path": None}
    if path == "load_weights":
        del body["model_id"]
    if path == "create_sampling_session":
        del body["base_model"]
    for name in [*(name for name in IDS if body.get(name)), *(["path"] if path == "load_weights" else [])]:
        foreign = {**body, name: other["tinker_path" if name == "path" else name]}
        found = world.run(outcome(world.alice, path, json.dumps(foreign).encode()))
        assert isinstance(found, ApiFailure), (path, name)
        assert found.status == 404 or "there is no checkpoint" in found.content["error"], (path, name, found)


def test_serving_fuzz_other_keys_are_unaffected(world: World) -> None:
    assert world.run(world.measure(world.bob, world.ids["@other"]["model_id"])) == world.bobs_loss
    assert world.run(world.alice.get("healthz")) == {"status": "ok"}
    assert KEY != OTHER_KEY
