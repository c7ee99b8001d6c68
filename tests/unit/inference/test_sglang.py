"""The engine `sglang`: the engine behind its HTTP interface, and through it, are the same."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch
from aiohttp import web
from chaos.harness import tiny_config
from hf_helpers import Weights, engine_spec, has_generated, request, send
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_server import SGLangServer, serving

import roll
from roll.config.engines import resolve_engine_kind
from roll.config.load import load_config
from roll.config.rollout_run import RolloutRunConfig
from roll.errors import (
    ConfigError,
    DataError,
    EngineDiedError,
    InfraError,
    ModelError,
    UnsupportedError,
    WeightSyncError,
)
from roll.inference.sglang import client as sglang_client
from roll.inference.sglang import launch
from roll.inference.sglang.conversion import build_request, to_generation
from roll.inference.sglang.engine import SGLangEngine
from roll.inference.sglang.launch import build_arguments
from roll.inference.spec import EngineSpec
from roll.models import load_causal_lm
from roll.pipelines.engine_checks import check_engines
from roll.protocols import InferenceEngine, SupportsPrefetch
from roll.types import WeightStore, WeightUpdate
from roll.weights import Sender, send_weights


def spec_of(model: Path, **options: Any) -> EngineSpec:
    return dataclasses.replace(engine_spec(model), kind="sglang", options=options)


@asynccontextmanager
async def running(model: Path, **options: Any) -> AsyncIterator[tuple[SGLangServer, SGLangEngine]]:
    async with serving(model) as server:
        engine = SGLangEngine(spec_of(model, url=server.url, **options))
        await engine.start()
        try:
            yield server, engine
        finally:
            await engine.close()


def changed_weights(model: Path, shift: float) -> dict[str, torch.Tensor]:
    return {name: tensor + shift for name, tensor in load_causal_lm(model, "float32").named_parameters()}


def test_sglang_answers_are_those_of_the_engine_behind_it(tiny_model: Path) -> None:
    async def main() -> None:
        async with running(tiny_model) as (server, engine):
            assert isinstance(engine, InferenceEngine)
            for sampling in ({}, {"temperature": 0.0}, {"temperature": 0.7}, {"stop_token_ids": tuple(range(4, 60))}):
                own = request("a", **sampling)
                expected, found = await server.engine.generate(own), await engine.generate(own)
                assert found.token_ids.tolist() == expected.token_ids.tolist()
                np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-6)
                assert (found.finish_reason, found.engine_id) == (expected.finish_reason, "e0")
            sequences = [request("a").token_ids, request("b").token_ids[:5]]
            for got, want in zip(
                await engine.logprobs(sequences), await server.engine.logprobs(sequences), strict=True
            ):
                np.testing.assert_allclose(got, want, rtol=1e-6)
            assert engine.load().num_running == 0

    asyncio.run(main())


def test_sglang_weight_sync_pauses_running_requests_which_continue_with_the_new_version(tiny_model: Path) -> None:
    async def main() -> None:
        async with running(tiny_model) as (server, engine):
            server.calls.clear()
            answer = asyncio.create_task(engine.generate(request("long", max_new_tokens=60)))
            await has_generated(server.engine, 3)
            receipt = await send(engine, Weights(changed_weights(tiny_model, 0.01)), 7, "shared_memory")
            found = await answer
            versions = found.policy_versions.tolist()
            assert versions == sorted(versions) and {*versions} == {0, 7} and len(found.token_ids) == 60
            assert receipt.policy_version == 7
            paths = [path for path, _ in server.calls if path not in ("/health_generate", "/server_info", "/generate")]
            assert paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
            tokens = request("x").token_ids
            weights = changed_weights(tiny_model, 0.01)
            network = load_causal_lm(tiny_model, "float32", attention="eager")
            with torch.inference_mode():
                for name, tensor in weights.items():
                    network.get_parameter(name).copy_(tensor)
                table = network(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].log_softmax(-1)
            expected = [0.0, *table[:-1].gather(-1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]]
            np.testing.assert_allclose((await engine.logprobs([tokens]))[0], expected, atol=1e-4)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.norm.weight", torch.ones(3), r"'model\.norm\.weight' must have shape \(32,\), got \(3,\)"),
        ("model.norm.weight", None, r"'model\.norm\.weight' is missing"),
        ("model.other.weight", torch.ones(3), r"'model\.other\.weight' does not exist"),
    ],
)
def test_sglang_weight_sync_of_other_tensors_is_refused_before_the_server_changes(
    tiny_model: Path, name: str, tensor: torch.Tensor | None, words: str
) -> None:
    """SGLang itself ignores unknown and missing tensors, and ends at a wrong shape."""

    async def main() -> None:
        async with running(tiny_model) as (server, engine):
            before = await engine.logprobs([request("a").token_ids])
            weights = {**changed_weights(tiny_model, 0.01), name: tensor}
            wrong = Weights({key: value for key, value in weights.items() if value is not None})
            with pytest.raises(WeightSyncError, match=words):
                await send(engine, wrong, 2, "shared_memory")
            assert "/update_weights_from_disk" not in [path for path, _ in server.calls]
            assert (await engine.logprobs([request("a").token_ids]))[0].tolist() == before[0].tolist()

    asyncio.run(main())


def test_sglang_weight_sync_that_fails_midway_makes_the_engine_unusable(tiny_model: Path) -> None:
    async def main() -> None:
        async with running(tiny_model) as (server, engine):
            server.failures["/update_weights_from_disk"] = web.Response(status=500, text="out of memory")
            weights = Weights(changed_weights(tiny_model, 0.0))
            with pytest.raises(WeightSyncError, match="out of memory"):
                await send(engine, weights, 2, "shared_memory")
            with pytest.raises(WeightSyncError, match="has a mixture of old and new weights: run a weight sync"):
                await engine.generate(request("a"))
            with pytest.raises(WeightSyncError, match="mixture"):
                await engine.resume()
            server.failures.clear()
            await send(engine, weights, 3, "shared_memory")
            await engine.resume()
            assert {*(await engine.generate(request("a"))).policy_versions.tolist()} == {3}

    asyncio.run(main())


def test_sglang_abort_pause_and_drain(tiny_model: Path) -> None:
    async def main() -> None:
        async with running(tiny_model) as (server, engine):
            answers = [
                asyncio.create_task(engine.generate(request(name, max_new_tokens=60))) for name in ("one", "two")
            ]
            await has_generated(server.engine, 2)
            await engine.abort(["one", "unknown"])
            assert (await answers[0]).finish_reason == "abort"
            await engine.pause("drain")
            assert answers[1].done() and answers[1].result().finish_reason == "length"
            await engine.resume()
            answer = asyncio.create_task(engine.generate(request("three", max_new_tokens=60)))
            await has_generated(server.engine, 2)
            await engine.pause("abort")
            assert (await answer).finish_reason == "abort"

    asyncio.run(main())


def test_sglang_requests_that_arrive_during_a_pause_wait_and_can_be_aborted(tiny_model: Path) -> None:
    async def main() -> None:
        async with running(tiny_model) as (_, engine):
            await engine.pause("keep")
            answers = [asyncio.create_task(engine.generate(request(name))) for name in ("one", "two")]
            while engine.load().num_waiting < 2:
                await asyncio.sleep(0)
            await engine.abort(["one"])
            aborted = await answers[0]
            assert (aborted.finish_reason, len(aborted.token_ids), aborted.request_id) == ("abort", 0, "one")
            assert not answers[1].done()
            await engine.resume()
            assert len((await answers[1]).token_ids) == 16

    asyncio.run(main())


def test_sglang_running_request_that_is_aborted_during_a_pause_has_no_tokens(tiny_model: Path) -> None:
    async def main() -> None:
        async with running(tiny_model) as (server, engine):
            answer = asyncio.create_task(engine.generate(request("one", max_new_tokens=60)))
            await has_generated(server.engine, 2)
            await engine.pause("keep")
            await engine.abort(["one"])
            found = await answer
            assert (found.finish_reason, len(found.token_ids), len(found.logprobs)) == ("abort", 0, 0)
            await engine.resume()

    asyncio.run(main())


def test_sglang_requests_that_wait_in_a_pause_end_when_the_engine_is_closed(tiny_model: Path) -> None:
    async def main() -> None:
        async with running(tiny_model) as (_, engine):
            await engine.pause("keep")
            answer = asyncio.create_task(engine.generate(request("one")))
            while not engine.load().num_waiting:
                await asyncio.sleep(0)
            await engine.close()
            with pytest.raises(EngineDiedError, match="it was closed"):
                await answer

    asyncio.run(main())


def test_sglang_answer_that_ends_at_a_token_which_is_no_stop_token_is_refused(tiny_model: Path) -> None:
    """SGLang cannot ignore the end-of-sequence tokens of the model's configuration, except with all stop tokens."""

    async def main() -> None:
        async with running(tiny_model) as (server, engine):
            server.eos_token_ids = tuple(range(4, 260))
            assert len((await engine.generate(request("a"))).token_ids) == 16
            with pytest.raises(UnsupportedError, match=r"an end-of-sequence token .* stop tokens are \[3\]: add it"):
                await engine.generate(request("a", stop_token_ids=(3,)))

    asyncio.run(main())


def test_sglang_sleep_drops_the_weights_until_the_next_sync(tiny_model: Path) -> None:
    async def main() -> None:
        async with running(tiny_model) as (_, engine):
            with pytest.raises(UnsupportedError, match="without `sleeps`"):
                await engine.sleep()
            engine._spec = dataclasses.replace(engine._spec, sleeps=True)
            await engine.sleep()
            with pytest.raises(WeightSyncError, match="is asleep"):
                await send(engine, Weights(changed_weights(tiny_model, 0.0)), 1, "shared_memory")
            await engine.wake()
            with pytest.raises(WeightSyncError, match="lost its weights while asleep"):
                await engine.generate(request("a"))
            await send(engine, Weights(changed_weights(tiny_model, 0.0)), 1, "shared_memory")
            assert len((await engine.generate(request("a"))).token_ids) == 16

    asyncio.run(main())


def test_sglang_a_server_that_is_gone_is_a_dead_engine(tiny_model: Path) -> None:
    async def main() -> None:
        async with serving(tiny_model) as server:
            engine = SGLangEngine(spec_of(tiny_model, url=server.url))
            await engine.start()
        try:
            with pytest.raises(EngineDiedError, match="does not answer"):
                await engine.generate(request("a"))
        finally:
            await engine.close()
        with pytest.raises(EngineDiedError, match="it was closed"):
            await engine.generate(request("a"))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"top_p": 0.9}, UnsupportedError, "top_p 0.9 and top_k 0, but SGLang returns log-probs without them"),
        ({"top_k": 5}, UnsupportedError, "top_k 5"),
        ({"choices": (4, 5)}, UnsupportedError, "has choices, which the engine sglang does not support"),
        ({"max_new_tokens": 0}, DataError, "max_new_tokens must be at least 1, got 0"),
        ({"tokens": np.array([4, 300], np.int32)}, DataError, "token id 300, which is out of range for the vocabulary"),
        ({"max_new_tokens": 90}, DataError, "exceed the engine's context length 96"),
    ],
)
def test_sglang_requests_that_cannot_be_served_are_refused(changes: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(")):
        build_request(request("a", **changes), 96, 300)


def test_sglang_a_request_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="has no tokens"):
        build_request(request("a", np.zeros(0, np.int32)), 96, 300)


GOOD = {
    "output_ids": [5, 6],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 2},
        "weight_version": "3",
        "output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]],
    },
}


def test_sglang_reply_versions_follow_its_spans() -> None:
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}]
    reply = {**GOOD, "meta_info": {**GOOD["meta_info"], "weight_versions": spans}}
    found = to_generation(request("a"), reply, "e0")
    assert found.policy_versions.tolist() == [0, 3] and found.logprobs.tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    "changes",
    [
        {"output_ids": [5]},
        {"output_ids": [5, 7]},
        {"output_ids": None},
        {"meta_info": None},
        {"meta_info": {**GOOD["meta_info"], "output_token_logprobs": None}},
        {"meta_info": {**GOOD["meta_info"], "output_token_logprobs": [[None, 5], [-1.0, 6]]}},
        {"meta_info": {**GOOD["meta_info"], "output_token_logprobs": [[float("nan"), 5], [-1.0, 6]]}},
        {"meta_info": {**GOOD["meta_info"], "weight_version": "v3"}},
        {"meta_info": {**GOOD["meta_info"], "finish_reason": {"type": "abort", "status_code": 500, "message": "boom"}}},
        {"meta_info": {**GOOD["meta_info"], "finish_reason": "length"}},
    ],
)
def test_sglang_reply_that_does_not_fit_together_is_a_failure_of_the_engine(changes: dict[str, Any]) -> None:
    with pytest.raises(InfraError):
        to_generation(request("a"), {**GOOD, **changes}, "e0")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "version", "start"]), inner),
    max_leaves=8,
)  # fmt: skip


@given(
    reply=st.dictionaries(st.sampled_from([*GOOD, "error"]), JSON),
    meta=st.dictionaries(st.sampled_from([*GOOD["meta_info"], "weight_versions"]), JSON),
)
@settings(max_examples=200)
def test_sglang_any_other_reply_is_a_failure_of_the_engine(reply: Any, meta: Any) -> None:
    """Whatever a server writes is a generation, or an error that the scheduler retries."""
    for body in (reply, {**GOOD, "meta_info": {**GOOD["meta_info"], **meta}}):
        try:
            to_generation(request("a"), body, "e0")
        except InfraError:
            continue


def test_sglang_arguments_of_the_server(tiny_model: Path) -> None:
    spec = dataclasses.replace(
        spec_of(tiny_model, attention_backend="torch_native", disable_cuda_graph=True, python="/x/python", chat=None),
        tensor_parallel=2,
        sleeps=True,
    )
    arguments = build_arguments(spec, 30001)
    given_values = dict(pairwise(arguments))
    assert given_values["--model-path"] == str(tiny_model) and given_values["--port"] == "30001"
    assert given_values["--tp-size"] == "2" and given_values["--context-length"] == "103"
    assert given_values["--attention-backend"] == "torch_native" and given_values["--weight-version"] == "0"
    assert {"--skip-tokenizer-init", "--enable-memory-saver", "--disable-cuda-graph"} <= {*arguments}
    assert not {"--python", "--chat", "--trust-remote-code", "None", "True", "False"} & {*arguments}


def test_sglang_without_sglang_the_start_says_what_to_do(tiny_model: Path, tmp_path: Path) -> None:
    async def start(**options: Any) -> None:
        spec = dataclasses.replace(spec_of(tiny_model, **options), log_path=tmp_path / "engine.log")
        await SGLangEngine(spec).start()

    with pytest.raises(ModelError, match=r"No module named 'sglang'.*set inference.options.python to the Python"):
        asyncio.run(start())
    with pytest.raises(ModelError, match="'/nowhere/python' cannot be started"):
        asyncio.run(start(python="/nowhere/python"))


def test_sglang_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """A parent that is killed leaves no server: it is in a process group of its own, and watches its parent."""
    package = tmp_path / "sglang" / "srt"
    (package / "entrypoints").mkdir(parents=True)
    for directory in (tmp_path / "sglang", package, package / "entrypoints"):
        (directory / "__init__.py").touch()
    (package / "server_args.py").write_text("def prepare_server_args(argv):\n    return argv\n")
    (package / "entrypoints" / "http_server.py").write_text(
        "import os, pathlib, time\n"
        "def launch_server(args):\n"
        "    pathlib.Path(args[0] + '.part').write_text(str(os.getpid()))\n"
        "    os.rename(args[0] + '.part', args[0])\n"
        "    time.sleep(600)\n"
    )
    ready = tmp_path / "pid"
    command = [sys.executable, str(Path(launch.__file__).with_name("server.py"))]
    program = (
        "import os, pathlib, subprocess, time\n"
        f"subprocess.Popen([*{command!r}, str(os.getpid()), {str(ready)!r}], start_new_session=True)\n"
        f"while not pathlib.Path({str(ready)!r}).exists(): time.sleep(0.05)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=False, timeout=120)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(ready.read_text())).wait(60)


@pytest.mark.parametrize(
    ("info", "words"), [({"model_path": "/models/other"}, "serves '/models/other'"), ({}, "serves ''")]
)
def test_sglang_server_of_another_model_is_refused(tiny_model: Path, info: dict[str, Any], words: str) -> None:
    async def main() -> None:
        async with serving(tiny_model) as server:
            server.failures["/server_info"] = web.json_response(info)
            await SGLangEngine(spec_of(tiny_model, url=server.url)).start()

    with pytest.raises(ModelError, match=words):
        asyncio.run(main())


def test_sglang_server_with_too_short_a_context_is_refused(tiny_model: Path) -> None:
    async def main() -> None:
        async with serving(tiny_model) as server:
            info = {"model_path": str(tiny_model), "skip_tokenizer_init": True, "max_req_input_len": 96}
            server.failures["/server_info"] = web.json_response(info)
            await SGLangEngine(spec_of(tiny_model, url=server.url)).start()

    with pytest.raises(ModelError, match=r"accepts 95 tokens of context only, but the run needs 96 .*length 103"):
        asyncio.run(main())


def test_sglang_is_never_chosen_by_auto() -> None:
    assert resolve_engine_kind("auto") != "sglang" and resolve_engine_kind("sglang") == "sglang"


def test_sglang_abort_ends_no_request_whose_id_only_begins_with_the_given_one(tiny_model: Path) -> None:
    async def main() -> None:
        async with running(tiny_model) as (server, engine):
            names = ["train-1.1", "train-1.10", "train-1.1.t1"]
            answers = [asyncio.create_task(engine.generate(request(name, max_new_tokens=40))) for name in names]
            await has_generated(server.engine, 2)
            await engine.abort(["train-1.1"])
            found = await asyncio.gather(*answers)
            assert [answer.finish_reason for answer in found] == ["abort", "length", "length"]
            assert [answer.request_id for answer in found] == names

    asyncio.run(main())


def test_sglang_start_continues_a_server_that_an_earlier_run_left_paused(tiny_model: Path) -> None:
    async def main() -> None:
        async with serving(tiny_model) as server:
            await server.engine.pause("keep")
            engine = SGLangEngine(spec_of(tiny_model, url=server.url))
            async with asyncio.timeout(60):
                await engine.start()
                assert len((await engine.generate(request("a"))).token_ids) == 16
            await engine.close()

    asyncio.run(main())


def test_sglang_start_ends_if_a_server_that_runs_is_never_ready(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(tiny_model) as server:
            server.failures["/health_generate"] = web.Response(status=503)
            await SGLangEngine(spec_of(tiny_model, url=server.url)).start()

    monkeypatch.setattr(sglang_client, "START_TIMEOUT_S", 0.0)
    with pytest.raises(ModelError, match=r"no SGLang server is ready at http://.* \(HTTP 503\): start it"):
        asyncio.run(main())


@pytest.mark.parametrize("size", [None, "4096", 0])
def test_sglang_reports_the_capacity_of_its_kv_cache_if_the_server_does(tiny_model: Path, size: Any) -> None:
    async def main() -> None:
        async with running(tiny_model) as (server, engine):
            assert engine.load().kv_capacity == 4096
            info = {"model_path": str(tiny_model), "skip_tokenizer_init": True, "max_total_num_tokens": size}
            server.failures["/server_info"] = web.json_response(info)
            other = SGLangEngine(spec_of(tiny_model, url=server.url))
            await other.start()
            assert other.load().kv_capacity is None
            await other.close()

    asyncio.run(main())


def test_sglang_fetches_weights_of_a_store_before_it_is_paused(tiny_model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        store = WeightStore(url=str(tmp_path / "store"), session="run-1", local_dir=str(tmp_path))
        async with running(tiny_model) as (server, engine):
            assert isinstance(engine, SupportsPrefetch)

            async def deliver(update: WeightUpdate) -> None:
                await engine.prefetch_weights(update)
                assert "/pause_generation" not in [path for path, _ in server.calls]
                (tmp_path / "store").rename(tmp_path / "away")
                await engine.update_weights(update)
                (tmp_path / "away").rename(tmp_path / "store")

            sender = Sender()
            weights = Weights(changed_weights(tiny_model, 0.01))
            await send_weights(weights, 4, "store", deliver, sender=sender, store=store)
            sender.close()
            assert {*(await engine.generate(request("a"))).policy_versions.tolist()} == {4}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (
            {"type": "ray", "device_mapping": {"actor_train": "0", "actor_infer": "1-2"}},
            "the run has 2 engines: map one",
        ),
        ({"type": "ray", "address": "auto", "elastic": {"max_engines": 2}}, "the run has cluster.elastic: map one"),
    ],
)
def test_sglang_one_server_for_several_engines_is_refused(cluster: dict[str, Any], words: str) -> None:
    config = {
        "pipeline": "rlvr",
        "name": "run",
        "model": "tiny",
        "data": [{"source": "arithmetic", "reward": "math"}],
        "training": {"num_steps": 1},
        "inference": {"engine": "sglang", "options": {"url": "http://host:30000"}},
    }
    check_engines(cast(RolloutRunConfig, load_config(config)))
    with pytest.raises(ConfigError, match=rf"inference\.options\.url http://host:30000 is one server, but {words}"):
        check_engines(cast(RolloutRunConfig, load_config(config | {"cluster": cluster})))


def test_sglang_check_says_what_it_has_run_on(tiny_model: Path) -> None:
    config = tiny_config(tiny_model)
    note = "The engine sglang has run on a CPU with placeholder kernels, not on a GPU."
    assert note not in roll.check(config).notes
    config["inference"] = {"engine": "sglang", "options": {"url": "http://127.0.0.1:30000"}}
    assert note in roll.check(config).notes


def test_sglang_abort_that_arrives_before_its_request_is_repeated(tiny_model: Path) -> None:
    async def main() -> None:
        async with running(tiny_model) as (server, engine):
            server.early_aborts = 2
            answer = asyncio.create_task(engine.generate(request("a", max_new_tokens=80)))
            await has_generated(server.engine, 1)
            await engine.abort(["a"])
            assert (await answer).finish_reason == "abort"
            await engine.abort(["a", "unknown"])

    asyncio.run(main())


def test_sglang_requests_do_not_share_connections_that_the_server_may_close(tiny_model: Path) -> None:
    """uvicorn closes idle connections after 5 s; a request that is sent at that moment would fail."""

    async def main() -> None:
        async with running(tiny_model) as (server, engine):
            for name in "ab":
                await engine.generate(request(name))
            assert len(server.connections) == len(server.calls)

    asyncio.run(main())
