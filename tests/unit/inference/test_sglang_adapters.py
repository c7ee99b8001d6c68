"""Adapters of the engine `sglang`: loaded under new names, with their scale, while requests run."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from hf_helpers import Weights, has_generated, reference_logprobs, request, send
from sglang_helpers import (
    INFO,
    LORA,
    PATTERNS,
    TEXT,
    fail,
    merged_logprobs,
    numbers,
    running,
    spec_of,
    sync,
    train,
    version_of,
)
from sglang_server import serving

from roll.config.model import LoRAConfig
from roll.errors import DataError, EngineDiedError, InfraError, ModelError, UnsupportedError, WeightSyncError
from roll.inference.sglang.engine import SGLangEngine
from roll.inference.sglang.launch import build_arguments


@pytest.mark.parametrize("lora", [LORA, PATTERNS], ids=["plain", "patterns"])
async def test_sglang_adapters_after_each_sync_are_those_of_the_trainer(lora: LoRAConfig, tiny_model: Path) -> None:
    """Ranks, rsLoRA and alphas of single layers are part of what the server reads."""
    async with running(tiny_model, lora=lora) as (server, engine):
        backend = train(tiny_model, lora)
        for version in (1, 2, 3):
            receipt = await sync(engine, backend, version)
            assert (receipt.policy_version, receipt.adapter) == (version, None)
            (found,) = await engine.logprobs([TEXT])
            np.testing.assert_allclose(found, merged_logprobs(backend, tiny_model, TEXT), atol=1e-5)
            made = await engine.generate(request("a", TEXT[:40]))
            whole = np.concatenate([TEXT[:40], made.token_ids])
            np.testing.assert_allclose(made.logprobs, merged_logprobs(backend, tiny_model, whole)[40:], atol=1e-5)
            assert {*made.policy_versions.tolist()} == {version}
            assert numbers(server) == [version]
            backend = train(tiny_model, lora, steps=version + 1)


@pytest.mark.parametrize("targets", [["q_proj"], ["k_proj"], ["q_proj", "k_proj"], ["up_proj"], ["gate_proj"]])
async def test_sglang_adapters_of_some_parts_of_a_fused_layer(targets: list[str], tiny_model: Path) -> None:
    """SGLang rejects such an adapter, or ends at the first request that uses it, unless the other parts are zeros."""
    lora = LORA.model_copy(update={"target_modules": targets})
    async with serving(tiny_model, lora=lora.model_copy(update={"alpha": 4.0})) as server:
        server.lora_info = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": targets}
        engine = SGLangEngine(spec_of(tiny_model, options={"url": server.url}, lora=lora))
        await engine.start()
        backend = train(tiny_model, lora)
        await sync(engine, backend, 1)
        (found,) = await engine.logprobs([TEXT])
        np.testing.assert_allclose(found, merged_logprobs(backend, tiny_model, TEXT), atol=1e-5)
        await engine.close()


async def test_sglang_adapters_running_requests_continue_with_the_new_adapter(tiny_model: Path) -> None:
    """A sync ends the request at the server, whose tokens are then the prompt of its continuation."""
    old, new = train(tiny_model), train(tiny_model, steps=3)
    async with running(tiny_model) as (server, engine):
        await sync(engine, old, 1)
        answer = asyncio.create_task(engine.generate(request("a", TEXT[:12], max_new_tokens=60)))
        scores = asyncio.create_task(engine.logprobs([TEXT] * 3))
        await has_generated(server.engine, 5)
        await sync(engine, new, 2)
        found = await answer
        assert len(found.token_ids) == 60 and found.finish_reason == "length" and found.request_id == "a"
        versions = found.policy_versions.tolist()
        assert versions == sorted(versions) and {*versions} == {1, 2}
        whole = np.concatenate([TEXT[:12], found.token_ids])
        for version, backend in ((1, old), (2, new)):
            of_version = found.policy_versions == version
            expected = merged_logprobs(backend, tiny_model, whole)[12:]
            np.testing.assert_allclose(found.logprobs[of_version], expected[of_version], atol=1e-5)
        assert len(await scores) == 3
        assert engine.load().num_running == 0


async def test_sglang_adapters_a_request_aborted_during_a_pause_returns_its_tokens(tiny_model: Path) -> None:
    async with running(tiny_model) as (server, engine):
        await sync(engine, train(tiny_model), 1)
        kept, lost = (
            asyncio.create_task(engine.generate(request(name, max_new_tokens=60))) for name in ("kept", "lost")
        )
        await has_generated(server.engine, 3)
        await engine.pause("keep")
        await engine.abort(["lost"])
        assert (await lost).finish_reason == "abort" and 3 <= len((await lost).token_ids) < 60
        assert not kept.done() and engine.load().num_waiting == 1
        await engine.resume()
        assert (await kept).finish_reason == "length" and len((await kept).token_ids) == 60


@pytest.mark.parametrize("mode", ["abort", "drain"])
async def test_sglang_adapters_pauses_that_end_requests(mode: Any, tiny_model: Path) -> None:
    async with running(tiny_model) as (server, engine):
        await sync(engine, train(tiny_model), 1)
        answer = asyncio.create_task(engine.generate(request("a", max_new_tokens=60)))
        await has_generated(server.engine, 3)
        await engine.pause(mode)
        found = await answer
        assert found.finish_reason == {"abort": "abort", "drain": "length"}[mode]
        assert (len(found.token_ids) == 60) == (mode == "drain")
        await engine.resume()
        assert len((await engine.generate(request("b"))).token_ids) == 16


async def test_sglang_adapters_of_several_names_and_their_limit(tiny_model: Path) -> None:
    async with running(tiny_model, max_adapters=2) as (server, engine):
        backends = {name: train(tiny_model, seed=seed) for seed, name in enumerate("xy")}
        for version, (name, backend) in enumerate(backends.items(), start=1):
            await sync(engine, backend, version, name)
        for name, backend in backends.items():
            (found,) = await engine.logprobs([TEXT], adapter=name)
            np.testing.assert_allclose(found, merged_logprobs(backend, tiny_model, TEXT), atol=1e-5)
        (found,) = await engine.logprobs([TEXT])
        np.testing.assert_allclose(found, reference_logprobs(tiny_model, TEXT), atol=1e-5)
        rows = [dataclasses.replace(request(f"{i}"), adapter=name) for i, name in enumerate(("x", None, "y"))]
        versions = [{*(await engine.generate(row)).policy_versions.tolist()} for row in rows]
        assert versions == [{1}, {0}, {2}]
        with pytest.raises(WeightSyncError, match=r"adapter 'z' cannot be added: the engine has 2 adapters"):
            await sync(engine, backends["x"], 3, "z")
        with pytest.raises(DataError, match="names the adapter 'z', which the engine has not received"):
            await engine.generate(dataclasses.replace(request("c"), adapter="z"))
        assert numbers(server) == [1, 2]


async def test_sglang_adapters_that_the_server_rejects_leave_the_old_one(tiny_model: Path) -> None:
    backend = train(tiny_model)
    async with running(tiny_model) as (server, engine):
        with pytest.raises(WeightSyncError, match="has received no adapter yet"):
            await engine.generate(request("early"))
        await sync(engine, backend, 1)
        server.failures["/load_lora_adapter"] = web.json_response(
            {"success": False, "error_message": "no memory"}, status=400
        )
        with pytest.raises(WeightSyncError, match="SGLang cannot load policy version 2: no memory"):
            await sync(engine, backend, 2)
        del server.failures["/load_lora_adapter"]
        wrong = {name: torch.zeros(3, 3) for name in backend.adapter_weights().names()}
        with pytest.raises(WeightSyncError, match=r"must have shape \(4, 32\), got \(3, 3\)"):
            await send(engine, Weights(wrong), 3, "shared_memory")
        assert {*(await engine.generate(request("a"))).policy_versions.tolist()} == {1}
        await sync(engine, backend, 4)
        assert {*(await engine.generate(request("a"))).policy_versions.tolist()} == {4}
        assert len(server.adapters) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
async def test_sglang_adapters_that_are_not_finite_leave_the_old_one(value: float, tiny_model: Path) -> None:
    """The largest number of float32 becomes infinite when it is multiplied by the scale."""
    backend = train(tiny_model)
    async with running(tiny_model) as (_, engine):
        await sync(engine, backend, 1)
        tensors = dict(backend.adapter_weights())
        name = next(name for name in tensors if name.endswith("lora_B.weight"))
        tensors[name] = torch.full_like(tensors[name], value)
        with pytest.raises(WeightSyncError, match=rf"'{name}' has NaN or infinite values in float32"):
            await send(engine, Weights(tensors), 2, "shared_memory")
        (found,) = await engine.logprobs([TEXT])
        np.testing.assert_allclose(found, merged_logprobs(backend, tiny_model, TEXT), atol=1e-5)
        assert {*(await engine.generate(request("a"))).policy_versions.tolist()} == {1}


async def test_sglang_adapters_of_an_earlier_run_are_unloaded(tiny_model: Path) -> None:
    backend = train(tiny_model)
    async with running(tiny_model) as (server, first):
        await sync(first, backend, 1)
        await first.close()
        assert len(server.adapters) == 1
        engine = SGLangEngine(spec_of(tiny_model, options={"url": server.url}))
        await engine.start()
        assert server.adapters == []
        await sync(engine, backend, 2)
        assert await version_of(engine) == {2} and len(server.adapters) == 1
        await engine.close()


async def test_sglang_adapters_whose_load_was_not_confirmed_are_unloaded(tiny_model: Path) -> None:
    """The server may have loaded an adapter although the reply was lost. Too many adapters would displace used ones."""
    backend = train(tiny_model)
    async with running(tiny_model) as (server, engine):
        await sync(engine, backend, 1)
        load = server.load_lora_adapter

        async def load_without_reply(body: dict[str, Any]) -> web.Response:
            await load(body)
            return web.Response(status=504, text="gateway timeout")

        server.load_lora_adapter = load_without_reply  # type: ignore[method-assign]
        with pytest.raises(WeightSyncError, match="cannot load policy version 2: gateway timeout"):
            await sync(engine, backend, 2)
        assert await version_of(engine) == {1} and numbers(server) == [1, 2]
        server.load_lora_adapter = load  # type: ignore[method-assign]
        await sync(engine, backend, 3)
        assert await version_of(engine) == {3} and numbers(server) == [3]


async def test_sglang_adapters_whose_unload_fails_are_unloaded_by_the_next_sync(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The new adapter is in use when the old one is unloaded, so the sync has succeeded."""
    backend = train(tiny_model)
    async with running(tiny_model) as (server, engine):
        await sync(engine, backend, 1)
        fail(server, "/unload_lora_adapter")
        assert (await sync(engine, backend, 2)).policy_version == 2
        assert "cannot unload 'roll-" in caplog.text and "(HTTP 503): busy" in caplog.text
        assert await version_of(engine) == {2} and numbers(server) == [1, 2]
        with pytest.raises(InfraError, match="cannot unload"):  # before the server has too many
            await sync(engine, backend, 3)
        assert await version_of(engine) == {2}
        server.failures.clear()
        await sync(engine, backend, 4)
        assert await version_of(engine) == {4} and len(server.adapters) == 1


async def test_sglang_adapters_that_cannot_replace_the_old_one_are_unloaded(tiny_model: Path) -> None:
    backend = train(tiny_model)
    async with running(tiny_model) as (server, engine):
        await sync(engine, backend, 1)
        fail(server, "/abort_request")
        answer = asyncio.create_task(engine.generate(request("long", max_new_tokens=60)))
        await has_generated(server.engine, 2)
        with pytest.raises(InfraError, match="busy"):
            await sync(engine, backend, 2)
        assert {*(await answer).policy_versions.tolist()} == {1} and len((await answer).token_ids) == 60
        server.failures.clear()
        await sync(engine, backend, 3)
        assert await version_of(engine) == {3} and numbers(server) == [3]


async def test_sglang_adapters_that_the_server_has_lost_are_a_dead_engine(tiny_model: Path) -> None:
    """A server that was started again has none of them; the engine's replacement sends them."""
    async with running(tiny_model) as (server, engine):
        await sync(engine, train(tiny_model), 1)
        text = f"Got LoRA adapter that has never been loaded: {server.adapters[0]}"
        server.failures["/generate"] = web.json_response({"error": {"message": text}}, status=400)
        with pytest.raises(EngineDiedError, match=r"its server does not have the adapter 'roll-.+' any more"):
            await engine.generate(request("a"))


async def test_sglang_adapters_are_lost_while_asleep(tiny_model: Path) -> None:
    backend = train(tiny_model)
    async with running(tiny_model, sleeps=True) as (server, engine):
        await sync(engine, backend, 1)
        await engine.sleep()
        await engine.wake()
        with pytest.raises(WeightSyncError, match="lost its weights while asleep"):
            await engine.generate(request("a"))
        await sync(engine, backend, 2)
        assert {*(await engine.generate(request("a"))).policy_versions.tolist()} == {2}
        assert numbers(server) == [2]


@pytest.mark.parametrize(
    "info", [{"enable_lora": None}, {"max_lora_rank": 2}, {"lora_target_modules": ["q_proj"]}, {"max_loaded_loras": 2}]
)
async def test_sglang_adapters_need_a_server_that_was_started_for_them(info: Any, tiny_model: Path) -> None:
    async with serving(tiny_model) as server:
        server.lora_info = INFO | info
        engine = SGLangEngine(spec_of(tiny_model, options={"url": server.url}))
        with pytest.raises(
            ModelError,
            match=r"cannot serve the run's adapters .* start it with --enable-lora --max-lora-rank 4 "
            r"--lora-target-modules down_proj q_proj v_proj --max-loras-per-batch 2 --max-loaded-loras 3",
        ):
            await engine.start()


def test_sglang_adapters_arguments_of_the_server(tiny_model: Path) -> None:
    arguments = build_arguments(spec_of(tiny_model, lora=PATTERNS, max_adapters=3, sleeps=True), 1)
    text = " ".join(arguments)
    assert "--max-lora-rank 4 --lora-target-modules down_proj q_proj v_proj --max-loras-per-batch 4" in text
    assert "--max-loaded-loras 5 --lora-strict-loading --enable-weights-cpu-backup" in text
    assert "lora" not in " ".join(build_arguments(spec_of(tiny_model, lora=None), 1))
    with pytest.raises(ModelError, match="SGLang does not support DoRA"):
        build_arguments(spec_of(tiny_model, lora=LORA.model_copy(update={"use_dora": True})), 1)


async def test_sglang_adapters_are_refused_without_lora(tiny_model: Path) -> None:
    backend = train(tiny_model)
    async with running(tiny_model, lora=None) as (_, engine):
        with pytest.raises(UnsupportedError, match="the sglang engine has no LoRA adapters, got adapter 'x'"):
            await engine.generate(dataclasses.replace(request("a"), adapter="x"))
        with pytest.raises(UnsupportedError, match="the sglang engine has no LoRA adapters, got adapter 'x'"):
            await sync(engine, backend, 1, "x")
