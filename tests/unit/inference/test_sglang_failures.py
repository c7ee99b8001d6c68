"""The engine `sglang` if a call fails, a server dies, or calls meet at a bad moment."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hf_helpers import Weights, engine_spec, has_generated, request, send
from safetensors import SafetensorError
from sglang_helpers import LORA, TEXT, running, spec_of, sync, train, version_of
from sglang_server import serving

from roll.errors import ConfigError, DataError, EngineDiedError, InfraError, WeightSyncError
from roll.inference.sglang import engine as sglang_engine
from roll.inference.sglang import running_requests
from roll.inference.sglang.client import SGLangClient
from roll.inference.sglang.conversion import build_request, build_scoring_request, to_generation, to_logprobs
from roll.inference.sglang.engine import SGLangEngine
from roll.inference.sglang.installation import check_options
from roll.inference.sglang.launch import Server
from roll.inference.sglang.pause_queue import PauseQueue
from roll.models import load_causal_lm


async def test_sglang_sync_that_fails_midway_keeps_the_engine_paused_until_the_next_sync(tiny_model: Path) -> None:
    weights = Weights(dict(load_causal_lm(tiny_model, "float32").named_parameters()))
    async with running(tiny_model, lora=None) as (server, engine):
        server.failures["/update_weights_from_disk"] = web.Response(status=500, text="out of memory")
        with pytest.raises(WeightSyncError, match="out of memory"):
            await send(engine, weights, 2, "shared_memory")
        server.failures.clear()
        await send(engine, weights, 3, "shared_memory")
        async with asyncio.timeout(60):
            assert await version_of(engine) == {3}


async def test_sglang_resume_waits_for_a_sync_that_loads_weights(tiny_model: Path) -> None:
    """Requests must not run while the server replaces its weights."""
    weights = Weights(dict(load_causal_lm(tiny_model, "float32").named_parameters()))
    async with running(tiny_model, lora=None) as (server, engine):
        load, loading, go_on = server.update_weights_from_disk, asyncio.Event(), asyncio.Event()

        async def load_slowly(body: dict[str, Any]) -> web.Response:
            loading.set()
            await go_on.wait()
            return await load(body)

        server.update_weights_from_disk = load_slowly  # type: ignore[method-assign]
        await engine.pause("keep")
        update = asyncio.create_task(send(engine, weights, 2, "shared_memory"))
        await loading.wait()
        resume, answer = asyncio.create_task(engine.resume()), asyncio.create_task(version_of(engine))
        while not engine.load().num_waiting:
            await asyncio.sleep(0)
        assert not resume.done()
        go_on.set()
        await asyncio.gather(update, resume)
        assert await answer == {2}


async def test_sglang_sync_leaves_an_engine_paused_that_was_paused_by_its_caller(tiny_model: Path) -> None:
    async with running(tiny_model) as (_, engine):
        backend = train(tiny_model)
        await sync(engine, backend, 1)
        await engine.pause("keep")
        answer = asyncio.create_task(version_of(engine))
        await sync(engine, backend, 2)
        assert engine.load().num_waiting == 1 and not answer.done()
        await engine.resume()
        assert await answer == {2}


async def test_sglang_pause_that_aborts_ends_requests_that_an_earlier_pause_has_frozen(tiny_model: Path) -> None:
    async with running(tiny_model) as (server, engine):
        await sync(engine, train(tiny_model), 1)
        answer = asyncio.create_task(engine.generate(request("a", max_new_tokens=60)))
        await has_generated(server.engine, 3)
        await engine.pause("keep")
        assert not answer.done()
        await engine.pause("abort")
        async with asyncio.timeout(60):
            found = await answer
        assert found.finish_reason == "abort" and 3 <= len(found.token_ids) < 60


@pytest.mark.parametrize("lora", [LORA, None], ids=["adapter", "weights"])
async def test_sglang_pause_that_aborts_does_not_end_scoring(lora: Any, tiny_model: Path) -> None:
    """Log-probs have no part that an aborted request could return."""
    async with running(tiny_model, lora=lora) as (server, engine):
        if lora is not None:
            await sync(engine, train(tiny_model), 1)
        expected = await engine.logprobs([TEXT])
        replied, abort = asyncio.Event(), {"finish_reason": {"type": "abort"}, "weight_version": "0"}
        generate = server.generate

        async def end_with_abort(body: dict[str, Any]) -> web.Response:
            await replied.wait()
            return web.json_response({"output_ids": [], "meta_info": abort})

        server.generate = end_with_abort  # type: ignore[method-assign]
        running_one = asyncio.create_task(engine.logprobs([TEXT]))
        while not engine.load().num_running:
            await asyncio.sleep(0)
        pause = asyncio.create_task(engine.pause("abort"))
        while not engine._pause_queue.is_paused:
            await asyncio.sleep(0)
        waiting_one = asyncio.create_task(engine.logprobs([TEXT]))
        replied.set()
        await pause
        server.generate = generate  # type: ignore[method-assign]
        while engine.load().num_waiting < 2:
            await asyncio.sleep(0)
        await engine.resume()
        for found in await asyncio.gather(running_one, waiting_one):
            np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)


async def test_sglang_abort_does_not_end_a_later_request_with_the_same_id(tiny_model: Path) -> None:
    """A caller may send a request again as soon as its abort has ended it."""
    async with running(tiny_model, lora=None) as (server, engine):
        answer = asyncio.create_task(engine.generate(request("a", max_new_tokens=60)))
        await has_generated(server.engine, 2)
        abort = asyncio.create_task(engine.abort(["a"]))
        assert (await answer).finish_reason == "abort"
        again = asyncio.create_task(engine.generate(request("a", max_new_tokens=80)))
        await abort
        assert (await again).finish_reason == "length"


async def test_sglang_abort_that_the_server_loses_ends_the_request(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang ignores every later abort of a request if the first one overtakes the request on its way."""
    monkeypatch.setattr(running_requests, "ABORT_TIMEOUT_S", 0.0)
    async with running(tiny_model, lora=None) as (server, engine):
        await server.engine.pause("keep")  # never answers
        server.early_aborts = 10**6
        answer = asyncio.create_task(engine.generate(request("a")))
        while not server.engine._futures:
            await asyncio.sleep(0)
        await engine.abort(["a"])
        found = await answer
        assert (found.finish_reason, len(found.token_ids)) == ("abort", 0)
        assert engine.load().num_running == 0
        await server.engine.resume()
        assert len((await engine.generate(request("a"))).token_ids) == 16  # the server may still run the first one


async def test_sglang_abort_directly_after_the_end_of_a_pause_is_not_lost() -> None:
    """The request has been woken, but does not run yet."""
    queue = PauseQueue()
    queue.pause()
    waiting = asyncio.create_task(queue.wait("a"))
    await asyncio.sleep(0)
    queue.resume()
    queue.abort(["a"])
    assert await waiting is False and len(queue) == 0


@pytest.mark.parametrize(
    ("tokens", "reason"), [([5, 6], "abort"), ([5, 9], "stop"), ([5, 6, 7], "length"), ([], "abort")]
)
def test_sglang_aborted_answer_whose_last_token_ends_it_is_complete(tokens: list[int], reason: str) -> None:
    """SGLang samples another token for an aborted request. A pause must not continue an answer after its end."""
    meta = {
        "finish_reason": {"type": "abort"},
        "weight_version": "3",
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
    }
    reply = {"output_ids": tokens, "meta_info": meta}
    found = to_generation(request("a", max_new_tokens=3, stop_token_ids=(9,)), reply, "e0")
    assert found.finish_reason == reason


async def test_sglang_pause_does_not_continue_an_answer_whose_last_token_ends_it(tiny_model: Path) -> None:
    async with running(tiny_model) as (server, engine):
        await sync(engine, train(tiny_model), 1)
        paused, pairs = asyncio.Event(), [[-1.0, 5, None]] * 16
        meta = {"finish_reason": {"type": "abort"}, "weight_version": "0", "output_token_logprobs": pairs}

        async def end_with_abort(body: dict[str, Any]) -> web.Response:
            await paused.wait()
            return web.json_response({"output_ids": [5] * 16, "meta_info": meta})

        server.generate = end_with_abort  # type: ignore[method-assign]
        answer = asyncio.create_task(engine.generate(request("a")))
        while not engine.load().num_running:
            await asyncio.sleep(0)
        pause = asyncio.create_task(engine.pause("keep"))
        while not engine._pause_queue.is_paused:
            await asyncio.sleep(0)
        paused.set()
        await pause
        found = await answer
        assert (found.finish_reason, len(found.token_ids)) == ("length", 16)


@pytest.mark.parametrize("reply", [b"\xff\xfe{", b"[]", b"busy", b""])
async def test_sglang_reply_that_is_no_json_object_is_a_failure_of_the_engine(reply: bytes, tiny_model: Path) -> None:
    async with running(tiny_model, lora=None) as (server, engine):
        server.failures["/generate"] = web.Response(body=reply, content_type="application/json")
        with pytest.raises(InfraError, match="cannot be read"):
            await engine.generate(request("a"))
        with pytest.raises(InfraError, match="cannot be read"):
            await engine.logprobs([TEXT])


@pytest.mark.parametrize("entries", [[[None, 5], ["x", 6]], [[None, 5], 7], "ab", 3])
def test_sglang_logprobs_that_cannot_be_read_are_a_failure_of_the_engine(entries: Any) -> None:
    with pytest.raises(InfraError):
        to_logprobs({"meta_info": {"input_token_logprobs": entries}}, 3, "e0")


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_sglang_request_with_an_impossible_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(DataError, match=f"request a has temperature {temperature:g}, but it must be finite and at"):
        build_request(request("a", temperature=temperature), 96, 300)


async def test_sglang_sequence_that_is_too_long_is_refused_before_others_are_sent(tiny_model: Path) -> None:
    async with running(tiny_model, lora=None) as (server, engine):
        with pytest.raises(DataError, match="sequence 1 has 97 tokens, which exceed the engine's context length 96"):
            await engine.logprobs([TEXT, np.full(97, 5, np.int32)])
        assert "/generate" not in [path for path, _ in server.calls]
    assert build_scoring_request("0", np.full(96, 5, np.int32), 96, 300)["input_ids"] == [5] * 96


async def test_sglang_start_that_is_canceled_starts_no_server(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Server] = []
    building = asyncio.Event()
    loop = asyncio.get_running_loop()

    def build(*_: Any) -> list[str]:
        loop.call_soon_threadsafe(building.set)
        return []

    monkeypatch.setattr(sglang_engine, "build_arguments", build)
    monkeypatch.setattr(sglang_engine, "Server", lambda *arguments: started.append(Server(*arguments)))
    engine = SGLangEngine(dataclasses.replace(engine_spec(tiny_model), kind="sglang"))
    start = asyncio.create_task(engine.start())
    await building.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    other = SGLangEngine(dataclasses.replace(engine_spec(tiny_model), kind="sglang"))
    building.clear()
    start = asyncio.create_task(other.start())
    await building.wait()
    await other.close()
    with pytest.raises(EngineDiedError, match="it was closed"):
        await start
    assert not started


async def test_sglang_close_ends_a_start_that_waits_for_the_server(tiny_model: Path) -> None:
    async with serving(tiny_model) as server:
        server.failures["/health_generate"] = web.Response(status=503)
        engine = SGLangEngine(spec_of(tiny_model, lora=None, options={"url": server.url}))
        start = asyncio.create_task(engine.start())
        while not server.calls:
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineDiedError, match="it was closed"):
            await start


async def test_sglang_sync_of_a_closed_engine_leaves_no_files(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model) as server:
        options = {"url": server.url, "weights_dir": str(tmp_path)}
        engine = SGLangEngine(spec_of(tiny_model, lora=None, options=options))
        await engine.start()
        await engine.close()
        with pytest.raises(EngineDiedError, match="it was closed"):
            await send(
                engine, Weights(dict(load_causal_lm(tiny_model, "float32").named_parameters())), 1, "shared_memory"
            )
    assert not [*tmp_path.iterdir()]


async def test_sglang_death_is_reported_with_the_last_error_although_the_process_ends_later(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The connections of a server end before its process does."""
    log = tmp_path / "server.log"
    log.write_text("ValueError: bad adapter\n")
    spec = dataclasses.replace(engine_spec(tiny_model), kind="sglang", log_path=log, options={"python": sys.executable})
    server = Server(spec, [], 1)
    server.process.kill()
    server.process.wait()
    log.write_text("ValueError: bad adapter\n")
    server.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    client = SGLangClient("e0", "http://127.0.0.1:1", server)
    call = asyncio.create_task(client.post("/generate", {}, None))
    find, looks = server.find_cause_of_death, asyncio.Event()

    def look() -> str:
        looks.set()
        return find()

    server.find_cause_of_death = look  # type: ignore[method-assign]
    await looks.wait()
    assert server.process.stdin is not None
    server.process.stdin.close()
    with pytest.raises(EngineDiedError, match=r"its server ended with exit code 1: ValueError: bad adapter \(see"):
        await call
    await client.close()


@pytest.mark.parametrize("lora", [LORA, None], ids=["adapter", "weights"])
async def test_sglang_files_that_do_not_fit_leave_the_old_weights(
    lora: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors has an error class of its own for a full disk."""
    backend = train(tiny_model)
    weights = (
        backend.adapter_weights() if lora else Weights(dict(load_causal_lm(tiny_model, "float32").named_parameters()))
    )
    async with running(tiny_model, lora=lora) as (_, engine):
        await send(engine, weights, 1, "shared_memory")

        def fail_to_save(*_: Any) -> None:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        with monkeypatch.context() as patch:
            patch.setattr("safetensors.torch.save_file", fail_to_save)
            with pytest.raises(
                WeightSyncError,
                match=r"version 2 cannot be written to .*No space left on device .* GiB free\): set infer",
            ):
                await send(engine, weights, 2, "shared_memory")
        assert await version_of(engine) == {1}


@pytest.mark.parametrize("url", ["10.0.0.5:30000", "localhost:30000", "http://", "ftp://host", 30000])
def test_sglang_address_that_is_no_url_is_refused(url: Any) -> None:
    """The engine would wait half an hour for such a server."""
    with pytest.raises(ConfigError, match=rf"inference\.options\.url is '{url}', which is not an HTTP address: set it"):
        check_options({"url": url})
    check_options({"url": "https://host/path"})
