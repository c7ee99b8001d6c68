"""The order of requests, retries, failures, polls and owners: what clients rely on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from api_client import ADAM, OTHER_KEY, ApiFailure, Client, client, datum, decode_outputs, gather, serving

from roll.serving import models
from roll.serving.failures import RequestFailure
from roll.serving.models import check_weights
from roll.serving.requests import LoraSettings
from roll.training.adapter_snapshot import AdapterSnapshot, AdapterSpec

TOKENS = list(range(10, 30))


def simple(weight: float = 1.0, seed: int = 0) -> Any:
    targets = np.random.default_rng(seed).integers(4, 260, len(TOKENS))
    return datum(TOKENS, targets, weights=np.full(len(TOKENS), weight))


async def test_serving_requests_of_a_model_run_once_and_in_order(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        straight, shuffled = await one.create_model(0), await one.create_model(1)
        first = [
            (await one.forward_backward(straight, [simple(seed=seed)]))[0] for seed in (1, 2)
        ]  # both before the update
        await one.step(straight)
        last, _ = await one.forward_backward(straight, [simple(seed=3)])

        # the same, sent as 4, 2, 3, 1 with repetitions; nothing runs before 1 arrives
        update = {"model_id": shuffled, "seq_id": 3, "adam_params": ADAM}
        four = await one.submit(shuffled, [simple(seed=3)], seq=4)
        two = await one.submit(shuffled, [simple(seed=2)], seq=2)
        three = await one.send("optim_step", update)
        assert await one.submit(shuffled, [simple(seed=2)], seq=2) == two
        assert await one.send("optim_step", update) == three
        one_ = await one.submit(shuffled, [simple(seed=1)], seq=1)
        results = await gather(*(one.result(each) for each in (one_, two, four)))
        assert [decode_outputs(each)[0] for each in results] == [*first, last]
        assert await one.submit(shuffled, [simple(seed=1)], seq=1) == one_  # also after it ran
        assert decode_outputs(await one.result(one_))[0] == first[0]
        with pytest.raises(ApiFailure, match="seq_id: 2 was already used for another request"):
            await one.submit(shuffled, [simple(seed=9)], seq=2)


async def test_serving_failed_request_discards_the_gradient_and_rejects_the_next_update(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        before, _ = await one.forward_backward(model, [simple()], forward_only=True)
        await one.forward_backward(model, [simple()])
        with pytest.raises(ApiFailure, match=r"data\[1\]\.model_input: token 999 at position 0") as failure:
            await one.forward_backward(model, [simple(), datum([999], [5], weights=[1.0])])
        assert (failure.value.status, failure.value.content["category"]) == (200, "user")
        await one.forward_backward(model, [simple()])  # a part of the same batch, as far as the client knows
        with pytest.raises(ApiFailure, match=r"optim_step was rejected .* request 3 \(forward_backward\) failed"):
            await one.step(model)
        with pytest.raises(ApiFailure, match="requires gradients"):
            await one.step(model)
        after, _ = await one.forward_backward(model, [simple()], forward_only=True)
        assert after == before
        with pytest.raises(ApiFailure, match="must have between 1 and 96 tokens"):  # a failed forward pass has none
            await one.forward_backward(model, [datum([], [], weights=[])], forward_only=True)
        await one.forward_backward(model, [simple()])
        await one.step(model)
        trained, _ = await one.forward_backward(model, [simple()], forward_only=True)
        assert trained < before


async def test_serving_nonfinite_gradient_does_not_change_weights(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        before, _ = await one.forward_backward(model, [simple()], forward_only=True)
        huge = [datum(TOKENS, TOKENS, logprobs=np.full(20, -200.0), advantages=np.full(20, 1.0))]
        with pytest.raises(ApiFailure, match="the loss is -inf"):
            await one.forward_backward(model, huge, "importance_sampling")
        with pytest.raises(ApiFailure, match="the loss is -inf"):
            await one.step(model)
        after, _ = await one.forward_backward(model, [simple()], forward_only=True)
        assert after == before


async def test_serving_poll_times_out_with_try_again(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path, poll_s=0.2, gap_timeout_s=60) as server, client(server) as one:
        model = await one.create_model()
        promise = await one.submit(model, [simple()], seq=2)  # waits for request 1
        start = asyncio.get_running_loop().time()
        answer = await one.send("retrieve_future", promise)
        assert answer == {"type": "try_again", "request_id": promise["request_id"], "queue_state": "active"}
        assert asyncio.get_running_loop().time() - start >= 0.19
        await one.submit(model, [simple()], seq=1)
        assert isinstance(await one.result(promise), bytes)


async def test_serving_missing_request_fails_the_first_later_request_only(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path, gap_timeout_s=0.3) as server, client(server) as one:
        model = await one.create_model()
        waiting = await one.submit(model, [simple()], seq=3)
        with pytest.raises(ApiFailure, match=r"request 1 to 2 of this model did not arrive within 0\.3 s"):
            await one.result(waiting)
        with pytest.raises(ApiFailure, match="did not arrive"):  # its part of the gradient is missing
            await one.step(model, seq=4)
        loss, _ = await one.forward_backward(model, [simple()], seq=5)
        assert loss > 0
        with pytest.raises(ApiFailure, match="request 2 arrived after request 5 was processed"):
            await one.forward_backward(model, [simple()], seq=2)


async def test_serving_later_requests_do_not_wait_for_a_rejected_request(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one, client(server, OTHER_KEY) as two:
        model = await one.create_model()
        await one.forward_backward(model, [simple()])
        for changes in ({"learning_rate": -1.0}, {"learning_rate": 10.0, "weight_decay": 0.2}):  # 2 and 3
            with pytest.raises(ApiFailure, match=r"400: .*adam_params"):
                await one.step(model, **changes)
        with pytest.raises(ApiFailure, match=r"400: .*path: must be a name"):  # 4
            await one.save(model, "../x")
        await one.step(model)  # with the gradient of 1
        early = await one.submit(model, [simple()], seq=8)  # 6 and 7 are on their way
        with pytest.raises(ApiFailure, match="400"):
            await one.step(model, seq=7, beta1=1.0)
        with pytest.raises(ApiFailure, match="404"):  # no other key can let a request be skipped
            await two.send("optim_step", {"model_id": model, "seq_id": 6, "adam_params": {}})
        with pytest.raises(ApiFailure, match="400"):
            await two.send("optim_step", {"model_id": model, "seq_id": 6, "adam_params": {"beta1": 1.0}})
        assert not server.service.promises.find(early["request_id"], "alice").done.is_set()
        six = await one.submit(model, [simple()], seq=6)
        await gather(one.result(six), one.result(early))
        with pytest.raises(ApiFailure, match="arrived after request 8"):
            await one.step(model, seq=7)
        with pytest.raises(ApiFailure, match="400"):
            await one.step(model, seq=9, beta1=1.0)
        await one.step(model, seq=9)  # the number of a rejected request can be used again


async def test_serving_checkpoints_resume_exactly_and_are_private_to_their_owner(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def advance(one: Client, model: str) -> float:
        await one.forward_backward(model, [simple(seed=4)])
        await one.step(model)
        return (await one.forward_backward(model, [simple(seed=4)], forward_only=True))[0]

    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        await advance(one, model)
        path = await one.save(model, "half")
        expected = await advance(one, model)
        load = {"path": path, "optimizer": True, "model_id": model, "seq_id": one.next_seq(model)}
        await one.result(await one.send("load_weights", load))  # into the same model
        assert await advance(one, model) == expected
        with pytest.raises(ApiFailure, match="exists already: choose another name, or save with overwrite"):
            await one.save(model, "half")
        assert await one.save(model, "half", overwrite=True) == path
        await one.save(model, "other")
    async with serving(tiny_model, tmp_path, max_rank=4) as server, client(server) as one:  # another server
        other = path.replace("half", "other")
        fresh = {"session_id": one.session_id, "path": other, "optimizer": True, "model_seq_id": 5}
        fresh_id = (await one.result(await one.send("load_weights", fresh)))["model_id"]
        plain = {**fresh, "optimizer": False, "model_seq_id": 6}
        plain_id = (await one.result(await one.send("load_weights", plain)))["model_id"]
        assert (await one.send("weights_info", {"tinker_path": other}))["lora_rank"] == 4
        assert await advance(one, fresh_id) != await advance(one, plain_id)
        async with client(server, OTHER_KEY) as two:
            with pytest.raises(ApiFailure, match="there is no checkpoint"):
                await two.result(await two.send("load_weights", {**fresh, "session_id": two.session_id}))
            for name, body in {
                "weights_info": {"tinker_path": other},
                "get_info": {"model_id": fresh_id},
                "optim_step": {"model_id": fresh_id, "seq_id": 9, "adam_params": ADAM},
                "session_heartbeat": {"session_id": one.session_id},
                "save_weights": {"model_id": fresh_id, "seq_id": 9, "path": "mine"},
            }.items():
                with pytest.raises(ApiFailure) as failure:
                    await two.send(name, body)
                assert failure.value.status == 404, name
            with pytest.raises(ApiFailure) as failure:
                await two.submit(fresh_id, [simple()])
            assert failure.value.status == 404
            promise = await one.submit(fresh_id, [simple()])
            with pytest.raises(ApiFailure) as failure:
                await two.send("retrieve_future", promise)
            assert failure.value.status == 404


async def test_serving_finished_session_frees_its_models(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        session = await one.snapshot(model, 0)
        assert list(tmp_path.glob("*/sampler_weights/.snapshot-*"))
        await one.send(f"sessions/{one.session_id}/finish", {"reason": {"type": "success"}})
        for path, body in {
            "get_info": {"model_id": model},
            "session_heartbeat": {"session_id": one.session_id},
        }.items():
            with pytest.raises(ApiFailure) as failure:
                await one.send(path, body)
            assert failure.value.status in (404, 410)
        with pytest.raises(ApiFailure, match="410"):
            await one.sample(session, 0, TOKENS)
        assert not list(tmp_path.glob("*/sampler_weights/.snapshot-*"))
        assert (await one.get("healthz")) == {"status": "ok"}


BAD: dict[str, tuple[str, Any, int, str]] = {
    "not json": ("create_session", b"{", 400, "not valid JSON"),
    "not an object": ("create_session", [], 400, "must be a JSON object"),
    "unknown field": ("create_session", {"nonsense": 1}, 400, "nonsense: this field is not supported"),
    "wrong type": ("create_session", {"tags": "x"}, 400, "tags: "),
    "no session": ("create_model", {"model_seq_id": 0, "base_model": "tiny"}, 400, "session_id: this field is missing"),
    "rank": ("create_model", {"lora_config": {"rank": 0}}, 400, r"lora_config.rank: must be >= 1, got 0\."),
    "rank too large": ("create_model", {"lora_config": {"rank": 9}}, 400, r"lora_config.rank: must be <= 8"),
    "no layers": (
        "create_model",
        {"lora_config": {"rank": 2, "train_mlp": False, "train_attn": False}},
        400,
        "lora_config: train_mlp or train_attn must be true",
    ),
    "base model": ("create_model", {"base_model": "other"}, 400, "base_model: 'other' is not served"),
    "optimizer": ("create_model", {"optimizer_config": {"type": "dimuon"}}, 400, "only 'adamw' is supported"),
    "beta": ("optim_step", {"adam_params": {"beta1": 1.0}}, 400, "adam_params.beta1: "),
    "learning rate": ("optim_step", {"adam_params": {"learning_rate": -1.0}}, 400, "adam_params.learning_rate: "),
    "learning rate that overflows": ("optim_step", {"adam_params": {"learning_rate": 1e308}}, 400, "must be <= 100,"),
    "beta that is 1 in float32": ("optim_step", {"adam_params": {"beta2": 0.99999999999}}, 400, "adam_params.beta2: "),
    "eps that is 0 in float32": ("optim_step", {"adam_params": {"eps": 1e-50}}, 400, "adam_params.eps: "),
    "decay that changes signs": (
        "optim_step",
        {"adam_params": {"learning_rate": 10.0, "weight_decay": 0.2}},
        400,
        r"adam_params.weight_decay: learning_rate \* weight_decay must be <= 1, got 2",
    ),
    "temperature": ("asample", {"sampling_params": {"temperature": 1e-300}}, 400, "temperature: must be 0 .greedy. or"),
    "top-k": ("asample", {"sampling_params": {"top_k": 2**70}}, 400, "sampling_params.top_k: "),
    "stop": (
        "asample",
        {"sampling_params": {"stop": [1.5]}},
        400,
        "sampling_params.stop: must be a string, strings, or",
    ),
    "two weights": (
        "create_sampling_session",
        {"model_path": "tinker://x/y/z", "base_model": "other"},
        400,
        "base_model",
    ),
    "other parameters": ("optim_step", {"optimizer_params": {"type": "dimuon"}}, 400, "only AdamW is supported"),
    "inflight": ("save_weights_for_sampler", {"kind": "inflight"}, 400, "kind: only 'snapshot' is supported"),
    "name": ("save_weights", {"path": "../x"}, 400, "path: must be a name"),
    "path": (
        "create_sampling_session",
        {"model_path": "tinker://x/weights/y", "base_model": None},
        404,
        "model_path: ",
    ),
    "promise": ("retrieve_future", {"request_id": "x"}, 404, "request_id: there is no request"),
    "json body": ("forward_backward", {}, 415, "must be application/x-protobuf"),
    "route": ("copy_weights", {}, 404, "is not supported by this server"),
}
TEMPLATES: dict[str, dict[str, Any]] = {
    "create_model": {"session_id": "S", "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}},
    "optim_step": {"model_id": "M", "seq_id": 1, "adam_params": {}},
    "save_weights": {"model_id": "M", "seq_id": 1, "path": "x"},
    "save_weights_for_sampler": {"model_id": "M", "seq_id": 1, "path": "x"},
    "create_sampling_session": {"session_id": "S", "sampling_session_seq_id": 0, "base_model": "tiny"},
    "asample": {
        "sampling_session_id": "B",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
        "sampling_params": {},
    },
}


async def test_serving_invalid_bodies_are_rejected_with_the_field(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model(7)
        base = {"session_id": one.session_id, "sampling_session_seq_id": 99, "base_model": "tiny"}
        ids = {
            "S": one.session_id,
            "M": model,
            "B": (await one.send("create_sampling_session", base))["sampling_session_id"],
        }
        for name, (path, changes, status, message) in BAD.items():
            body = changes
            if isinstance(changes, dict) and path in TEMPLATES and name != "no session":
                body = {**TEMPLATES[path], **changes}
                body = {key: ids.get(str(value), value) for key, value in body.items()}
            with pytest.raises(ApiFailure, match=message) as failure:
                await one.send(path, body)
            assert failure.value.status == status, name
            assert str(failure.value).count("error") == 1, name
        loss, _ = await one.forward_backward(model, [simple()])  # nothing was applied, and no number was used
        assert loss > 0
        stranger = Client(one.http, one.url, "tml-unknown-1")
        with pytest.raises(ApiFailure) as failure:
            await stranger.open()
        assert failure.value.status == 401


async def test_serving_invalid_data_are_rejected_with_datum_and_input(tiny_model: Path, tmp_path: Path) -> None:
    ones = np.ones(3)
    bad: dict[str, tuple[Any, str, dict[str, float]]] = {
        "no weights": (datum([5, 6, 7], [6, 7, 8]), "cross_entropy", {}),
        "weights: must have 3 elements": (datum([5, 6, 7], [6, 7, 8], weights=[1.0]), "cross_entropy", {}),
        "weights: must be finite": (datum([5, 6, 7], [6, 7, 8], weights=[1.0, np.nan, 1.0]), "cross_entropy", {}),
        "target_tokens: token 300 at position 2": (datum([5, 6, 7], [6, 7, 300], weights=ones), "cross_entropy", {}),
        "target_tokens: must have the dtype int64": (
            datum([5, 6, 7], [6, 7, 8], target_tokens=ones, weights=ones),
            "cross_entropy",
            {},
        ),
        "advantages: this input is missing": (datum([5, 6, 7], [6, 7, 8], logprobs=ones), "ppo", {}),
        "mask: the loss 'ppo' does not support this input": (
            datum([5, 6, 7], [6, 7, 8], logprobs=ones, advantages=ones, mask=ones),
            "ppo",
            {},
        ),
        "loss_fn: the loss 'stable_reinforce' is not supported": (
            datum([5], [5], weights=[1.0]),
            "stable_reinforce",
            {},
        ),
        "loss_fn_config.beta: this is not a setting": (datum([5], [5], weights=[1.0]), "cross_entropy", {"beta": 1.0}),
        "loss_fn_config.clip_low_threshold: must be <=": (datum([5], [5]), "ppo", {"clip_low_threshold": 3.0}),
    }
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        for message, (each, loss, config) in bad.items():
            with pytest.raises(ApiFailure) as failure:
                await one.forward_backward(model, [each], loss, config=config)
            expected = "weights: this input is missing" if message == "no weights" else message
            assert expected in str(failure.value), message
        with pytest.raises(ApiFailure, match="optim_step was rejected"):
            await one.step(model)


@pytest.mark.parametrize("weight", [float("nan"), float("-inf"), -1000.5])
def test_serving_snapshots_with_overflowing_weights_are_rejected(weight: float) -> None:
    weights = {"a.lora_A.weight": torch.full((2, 3), 1000.0), "a.lora_B.weight": torch.tensor([[0.0, weight]])}
    with pytest.raises(
        RequestFailure, match=r"the training has diverged: the largest weight of 'a\.lora_B\.weight' is"
    ):
        check_weights(AdapterSnapshot(spec=AdapterSpec(rank=2), weights=weights))
    del weights["a.lora_B.weight"]
    check_weights(AdapterSnapshot(spec=AdapterSpec(rank=2), weights=weights))


async def test_serving_diverged_model_does_not_affect_other_models(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one, client(server, OTHER_KEY) as two:
        model, session = await one.create_model(), await two.snapshot(await two.create_model(), 0)
        await one.forward_backward(model, [simple()])
        await one.step(model, learning_rate=50.0)  # the first update is as large as the learning rate
        monkeypatch.setattr(models, "MAX_WEIGHT", 49.0)
        with pytest.raises(ApiFailure, match=r"the largest weight of '.*' is 50, and at most 49 can be sampled from"):
            await one.snapshot(model, 0)
        assert (await two.sample(session, 0, TOKENS)).sequences


async def test_serving_equal_bodies_on_two_paths_are_different_requests(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        body = {"model_id": await one.create_model(), "seq_id": 1, "path": "mine"}
        await one.result(await one.send("save_weights", body))
        with pytest.raises(ApiFailure, match="seq_id: 1 was already used for another request"):
            await one.send("save_weights_for_sampler", body)


async def test_serving_model_is_not_created_if_its_session_ends(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        body = {"session_id": one.session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
        promise = await one.send("create_model", body)
        await one.send("cancel_future", promise)  # has no effect
        model_id = (await one.result(promise))["model_id"]
        assert (await one.send("get_info", {"model_id": model_id}))["lora_rank"] == 2
        service = server.service
        session = service.sessions.find(one.session_id, "alice")
        session.is_finished = True
        with pytest.raises(RequestFailure, match="the session has ended"):
            await service.models.add(session, f"{model_id}1", AdapterSpec(rank=2), LoraSettings(rank=2), None)
        assert [each.model_id for each in service.models] == [model_id]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd", "br"])
async def test_serving_corrupt_compressed_bodies_are_rejected(tiny_model: Path, tmp_path: Path, encoding: str) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        headers = {"X-API-Key": one.key, "Content-Encoding": encoding, "Content-Type": "application/json"}
        url = f"{server.url}/api/v1/create_session"
        async with one.http.post(url, data=b"this is not compressed at all", headers=headers) as response:
            assert response.status == 400
            text = await response.text()
            # aiohttp answers itself where the library of the encoding is not installed
            assert "the body cannot be read" in text or "Can not decode content-encoding" in text
        assert await one.get("healthz") == {"status": "ok"}
