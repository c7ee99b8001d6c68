"""Checkpoints and snapshots on disk: paths that are used again, files that change, and other options of the server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from api_client import ApiFailure, Client, client, datum, read_sequences, serving
from safetensors.torch import load_file, save_file

from roll.errors import ConfigError
from roll.serving import checkpoints as checkpoints_module

TOKENS = list(range(10, 30))


def simple(seed: int = 0) -> Any:
    targets = np.random.default_rng(seed).integers(4, 260, len(TOKENS))
    return datum(TOKENS, targets, weights=np.ones(len(TOKENS)))


async def train(one: Client, model: str, seed: int) -> None:
    await one.forward_backward(model, [simple(seed)])
    await one.step(model, learning_rate=0.1)


async def save_for_sampler(one: Client, model: str, **more: Any) -> str:
    body = {"model_id": model, "seq_id": one.next_seq(model), **more}
    return (await one.result(await one.send("save_weights_for_sampler", body)))["path"]


async def open_sampler(one: Client, number: int, path: str) -> str:
    body = {"session_id": one.session_id, "sampling_session_seq_id": number, "model_path": path}
    return (await one.send("create_sampling_session", body))["sampling_session_id"]


async def test_serving_a_snapshot_that_replaces_an_expired_one_is_sampled_from(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(checkpoints_module.time, "time", lambda: now[0])
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        await train(one, model, 0)
        path = await save_for_sampler(one, model, path="latest", ttl_seconds=3600)
        old = await open_sampler(one, 0, path)
        first = read_sequences(await one.sample(old, 0, TOKENS))[0][0]
        now[0] += 3601
        await server.service.clean_up()
        await train(one, model, 1)
        other = await open_sampler(one, 1, await save_for_sampler(one, model, path="other"))
        expected = read_sequences(await one.sample(other, 0, TOKENS))[0][0]
        assert await save_for_sampler(one, model, path="latest") == path
        new = await open_sampler(one, 2, path)
        assert read_sequences(await one.sample(new, 0, TOKENS))[0][0] == expected != first
        with pytest.raises(ApiFailure, match="was deleted"):  # and never the weights of another snapshot
            await one.sample(old, 1, TOKENS)
        session_id = one.session_id
    async with serving(tiny_model, tmp_path) as server, client(server) as two:
        two.session_id = session_id
        assert read_sequences(await two.sample(new, 1, TOKENS))[0][0] == expected
        with pytest.raises(ApiFailure, match="was deleted"):  # nor after a restart
            await two.sample(old, 2, TOKENS)


async def test_serving_a_checkpoint_is_read_as_a_whole_while_it_is_overwritten(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        path = await one.save(model, "mine")
        await train(one, model, 0)
        entered, go_on, load = threading.Event(), threading.Event(), checkpoints_module.load_file

        def wait_and_load(file: Path) -> Any:
            found = load(file)
            if not entered.is_set():  # between the weights and the moments
                entered.set()
                assert go_on.wait(30)
            return found

        monkeypatch.setattr(checkpoints_module, "load_file", wait_and_load)
        fresh = {"session_id": one.session_id, "path": path, "optimizer": True, "model_seq_id": 5}
        loading = await one.send("load_weights", fresh)
        await asyncio.to_thread(entered.wait, 30)
        save = {"model_id": model, "seq_id": one.next_seq(model), "path": "mine", "overwrite": True}
        saving = await one.send("save_weights", save)
        answered = server.service.promises.find(saving["request_id"], "alice").done
        done, _ = await asyncio.wait([asyncio.ensure_future(answered.wait())], timeout=0.2)
        assert not done
        go_on.set()
        await one.result(saving)
        loaded = (await one.result(loading))["model_id"]
        state = await server.service.trainer._group.call("read_adapter", loaded)
        assert state.num_steps == 0 and set(state.steps.values()) == {0}
        assert all(float(moment.abs().max()) == 0 for each in state.moments.values() for moment in each.values())


def break_file(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def lack(tensors: dict[str, Any]) -> None:
    del tensors[min(tensors)]


def add(tensors: dict[str, Any]) -> None:
    tensors["base_model.model.other.lora_A.weight"] = torch.zeros(4, 4)


def reshape(tensors: dict[str, Any]) -> None:
    tensors[min(tensors)] = tensors[min(tensors)][:1].clone()  # it could be broadcast


def diverge(tensors: dict[str, Any]) -> None:
    tensors[min(tensors)] = torch.full_like(tensors[min(tensors)], float("nan"))


@pytest.mark.parametrize(
    ("change", "of_snapshot", "of_checkpoint"),
    [
        (lack, r"lacks the tensor '.*', and \d+ tensors such as '.*' are expected", "the adapter lacks tensor"),
        (add, "has an unknown tensor 'other.lora_A.weight'", "has an unknown tensor 'other.lora_A.weight'"),
        (reshape, r"has the shape \(1, \d+\), but \(4, \d+\) is expected", r"must have the shape \(4, \d+\), got"),
        (diverge, "the largest weight of '.*' is nan", ""),
    ],
    ids=["lacks", "unknown", "shape", "nan"],
)
async def test_serving_adapters_whose_files_do_not_fit_are_refused_with_what_is_expected(
    tiny_model: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], of_snapshot: str, of_checkpoint: str
) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        snapshot, checkpoint = await save_for_sampler(one, model, path="x"), await one.save(model, "y")
        for path in (snapshot, checkpoint):
            break_file(tmp_path / path.removeprefix("tinker://"), change)
        with pytest.raises(ApiFailure, match=of_snapshot):
            await one.sample(await open_sampler(one, 0, snapshot), 0, TOKENS)
        before, _ = await one.forward_backward(model, [simple()], forward_only=True)
        if of_checkpoint:
            load = {"path": checkpoint, "optimizer": False, "model_id": model, "seq_id": one.next_seq(model)}
            with pytest.raises(ApiFailure, match=of_checkpoint):
                await one.result(await one.send("load_weights", load))
        assert (await one.forward_backward(model, [simple()], forward_only=True))[0] == before
        assert server.service._sampler._engines.members[0].num_restarts == 0


async def test_serving_a_server_with_other_options_does_not_continue_and_deletes_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        await train(one, model, 0)
        await server.service.models.states.store(next(iter(server.service.models)), 2)
        await one.snapshot(model, 0)
        expected, _ = await one.forward_backward(model, [simple()], forward_only=True)
        seq = dict(one.seq)
    hidden = {*tmp_path.glob("*/*/.*")}
    assert len(hidden) == 2
    for changes, message in (
        ({"alpha": 16.0}, r"--alpha is 16\.0, but the models in '.*' were trained with 32\.0: start the server with"),
        ({"dtype": "bfloat16"}, "--dtype is bfloat16"),
        ({"name": "other"}, "--name is other"),
        ({"max_rank": 2}, r"cannot be restored, lora_config\.rank: must be <= 2 .*: start the server with the options"),
    ):
        with pytest.raises(ConfigError, match=message):
            async with serving(tiny_model, tmp_path, **changes):
                pass
        assert {*tmp_path.glob("*/*/.*")} == hidden
    async with serving(tiny_model, tmp_path) as server, client(server) as two:
        two.session_id, two.seq = one.session_id, seq
        assert (await two.forward_backward(model, [simple()], forward_only=True))[0] == expected
        await two.send(f"sessions/{one.session_id}/finish", {})
        for session in list(server.service.sessions):
            session.is_finished or await server.service.finish_session(session)
    async with serving(tiny_model, tmp_path, alpha=16.0):  # nothing is left to restore
        assert json.loads((tmp_path / "options.json").read_text())["alpha"] == 16.0
