"""The hf engine as its users see it: requests, aborts, pauses, sleep, death."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_helpers import engine_spec, generate_all, has_generated, prompt, reference_logprobs, request, running, same

from roll.errors import EngineDiedError, ModelError, UserError
from roll.inference import EngineSpec, build_engine
from roll.inference.hf import HFEngine, get_partial_tokens
from roll.models import load_causal_lm
from roll.protocols import InferenceEngine
from roll.running import has_detached_threads


async def test_hf_engine_the_registry_builds_it_and_it_keeps_the_protocol(tiny_model: Path) -> None:
    engine = build_engine(engine_spec(tiny_model))
    assert isinstance(engine, HFEngine) and isinstance(engine, InferenceEngine)
    assert engine.engine_id == "e0"
    await engine.close()


async def test_hf_engine_a_start_that_is_cancelled_does_not_wait_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def load(spec: EngineSpec) -> None:
        begun.set()
        may_end.wait()

    monkeypatch.setattr("roll.inference.hf.build_decoder", load)
    engine = HFEngine(engine_spec(Path("tiny")))
    start = asyncio.create_task(engine.start())
    try:
        await asyncio.to_thread(begun.wait)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        await engine.close()
        assert has_detached_threads(0.0)
    finally:
        may_end.set()
    assert not has_detached_threads(10.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_hf_engine_log_probs_agree_with_teacher_forcing(tiny_model: Path, temperature: float) -> None:
    async with running(tiny_model) as engine:
        requests = [request(f"{i}", prompt(i, 5 + 3 * i), temperature=temperature) for i in range(12)]
        results = await generate_all(engine, requests)
        sequences = [np.concatenate([r.token_ids, g.token_ids]) for r, g in zip(requests, results, strict=True)]
        forced = await engine.logprobs(sequences)
    if temperature in (0.0, 1.0):
        for one, result, logprobs, tokens in zip(requests, results, forced, sequences, strict=True):
            reference = reference_logprobs(tiny_model, tokens)
            assert np.abs(reference - logprobs).max() < 1e-4 and logprobs.dtype == np.float32
            assert np.abs(logprobs[len(one.token_ids) :] - result.logprobs).mean() < 1e-4
    greedy = [bool((g.logprobs == 0).all()) for g in results]
    assert not any(greedy)  # log-probs of greedy rows are those of temperature 1, not 0


async def test_hf_engine_temperature_and_filters_are_those_of_the_sampling_distribution(tiny_model: Path) -> None:
    async with running(tiny_model) as engine:
        one = request("a", temperature=0.7, top_k=5)
        result = await engine.generate(one)
    tokens = torch.from_numpy(np.concatenate([one.token_ids, result.token_ids]).astype(np.int64))
    with torch.inference_mode():
        logits = load_causal_lm(tiny_model, "float32")(tokens[None]).logits[0].double().numpy() / 0.7
    for step, (token, logprob) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        row = logits[len(one.token_ids) - 1 + step]
        best = np.argsort(row)[-5:]
        assert token in best
        assert logprob == pytest.approx(row[token] - np.log(np.exp(row[best]).sum()), abs=1e-4)


async def test_hf_engine_what_is_made_of_an_answer_can_be_seen_while_it_is_made(tiny_model: Path) -> None:
    async with running(tiny_model) as engine:
        one = request("a")
        assert len(get_partial_tokens(engine, "a")) == 0
        work = asyncio.create_task(engine.generate(one))
        while not (seen := get_partial_tokens(engine, "a").tolist()) and not work.done():
            await asyncio.sleep(0)
        result = await work
        assert seen and seen == result.token_ids[: len(seen)].tolist()
        assert len(get_partial_tokens(engine, "a")) == 0


async def test_hf_engine_a_greedy_answer_is_the_most_likely_token_each_time(tiny_model: Path) -> None:
    one = request("a", temperature=0.0, max_new_tokens=10)
    async with running(tiny_model) as engine:
        result = await engine.generate(one)
    ids = torch.from_numpy(one.token_ids.astype(np.int64))[None]
    with torch.inference_mode():
        model = load_causal_lm(tiny_model, "float32")
        for _ in range(10):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert result.token_ids.tolist() == ids[0, len(one.token_ids) :].tolist()


async def test_hf_engine_an_answer_ends_with_its_stop_token_or_at_its_length(tiny_model: Path) -> None:
    every_even = tuple(range(4, 260, 2))
    async with running(tiny_model) as engine:
        results = await generate_all(engine, [request(f"{i}", stop_token_ids=every_even) for i in range(16)])
        unstopped = await engine.generate(request("x", max_new_tokens=5))
    for result in results:
        stops = [token in every_even for token in result.token_ids]
        assert result.finish_reason == "stop" and stops[-1] and not any(stops[:-1])
        assert len(result.token_ids) == len(result.logprobs) == len(result.policy_versions)
    assert unstopped.finish_reason == "length" and len(unstopped.token_ids) == 5
    assert unstopped.token_ids.dtype == unstopped.policy_versions.dtype == np.int32


async def test_hf_engine_a_seed_decides_the_answer_and_siblings_differ(tiny_model: Path) -> None:
    tokens = prompt(1)
    async with running(tiny_model) as engine:
        first, again, other = await generate_all(
            engine, [request(name, tokens, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
        )
    assert same(first, again) and first.token_ids.tolist() != other.token_ids.tolist()


async def test_hf_engine_more_requests_than_rows_are_all_answered_in_turn(tiny_model: Path) -> None:
    async with running(tiny_model, max_num_seqs=3) as engine:
        tasks = [asyncio.create_task(engine.generate(request(f"{i}"))) for i in range(10)]
        await has_generated(engine, 1)
        load = engine.load()
        assert (load.num_running, load.num_waiting, load.capacity) == (3, 7, 3)
        assert 0 < load.kv_used <= 1
        results = await asyncio.gather(*tasks)
        assert [result.request_id for result in results] == [str(i) for i in range(10)]
        assert (engine.load().num_running, engine.load().num_waiting, engine.load().kv_used) == (0, 0, 0.0)


async def test_hf_engine_priority_comes_before_arrival(tiny_model: Path) -> None:
    finished: list[str] = []
    async with running(tiny_model, max_num_seqs=1) as engine:

        async def run(name: str, priority: int) -> None:
            await engine.generate(dataclasses.replace(request(name, max_new_tokens=2), priority=priority))
            finished.append(name)

        await asyncio.gather(run("late", 5), run("first", -1), run("second", 0), run("third", 0))
    assert finished == ["first", "second", "third", "late"]


async def test_hf_engine_a_request_that_comes_during_a_wave_waits_for_the_next(tiny_model: Path) -> None:
    async with running(tiny_model) as engine:
        early = asyncio.create_task(engine.generate(request("early")))
        await has_generated(engine, 2)
        late = asyncio.create_task(engine.generate(request("late")))
        while not early.done():
            assert engine.load().num_running <= 1
            await asyncio.sleep(0)
        await late


async def test_hf_engine_continuous_admission_lets_it_join(tiny_model: Path) -> None:
    async with running(tiny_model, options={"admission": "continuous"}) as engine:
        early = asyncio.create_task(engine.generate(request("early", max_new_tokens=60)))
        await has_generated(engine, 2)
        late = asyncio.create_task(engine.generate(request("late", max_new_tokens=3)))
        await late
        assert not early.done()
        joined = await early
        alone = await engine.generate(request("early", max_new_tokens=60))
    assert same(joined, alone)


async def test_hf_engine_abort_returns_what_there_is(tiny_model: Path) -> None:
    async with running(tiny_model) as engine:
        one, two = (asyncio.create_task(engine.generate(request(n, max_new_tokens=60))) for n in ("one", "two"))
        await has_generated(engine, 3)
        await engine.abort(["one", "unknown"])
        partial = await one
        whole = await two
        undisturbed = await engine.generate(request("one", max_new_tokens=60))
    assert partial.finish_reason == "abort" and 3 <= len(partial.token_ids) < 60
    assert len(whole.token_ids) == 60
    made = len(partial.token_ids)
    assert partial.token_ids.tolist() == undisturbed.token_ids[:made].tolist()
    assert partial.logprobs.tolist() == undisturbed.logprobs[:made].tolist()


async def test_hf_engine_a_request_that_has_not_begun_can_be_aborted(tiny_model: Path) -> None:
    async with running(tiny_model, max_num_seqs=1) as engine:
        tasks = [asyncio.create_task(engine.generate(request(f"{i}"))) for i in range(3)]
        await has_generated(engine, 1)
        await engine.abort(["2"])
        result = await tasks[2]
        assert result.finish_reason == "abort" and len(result.token_ids) == 0
        assert [len((await task).token_ids) for task in tasks[:2]] == [16, 16]


async def test_hf_engine_a_cancelled_caller_frees_its_row(tiny_model: Path) -> None:
    async with running(tiny_model) as engine:
        task = asyncio.create_task(engine.generate(request("a", max_new_tokens=80)))
        await has_generated(engine, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.load().num_running == 0
        await engine.generate(request("a"))  # the id is free again


async def test_hf_engine_pause_keep_freezes_and_resume_goes_on_as_if_nothing_was(tiny_model: Path) -> None:
    async with running(tiny_model) as engine:
        undisturbed = await engine.generate(request("a", max_new_tokens=40))
        task = asyncio.create_task(engine.generate(request("a", max_new_tokens=40)))
        await has_generated(engine, 5)
        await engine.pause("keep")
        rows = engine._decoder.rows if engine._decoder else []
        made = rows[0].num_generated
        for _ in range(200):
            await asyncio.sleep(0)
        assert rows[0].num_generated == made and not task.done()
        waiting = asyncio.create_task(engine.generate(request("b")))
        await engine.resume()
        assert same(await task, undisturbed)
        await waiting


async def test_hf_engine_pause_abort_ends_everything_that_runs_or_waits(tiny_model: Path) -> None:
    async with running(tiny_model, max_num_seqs=1) as engine:
        tasks = [asyncio.create_task(engine.generate(request(f"{i}", max_new_tokens=60))) for i in range(2)]
        await has_generated(engine, 2)
        await engine.pause("abort")
        results = await asyncio.gather(*tasks)
        assert [r.finish_reason for r in results] == ["abort", "abort"]
        assert len(results[0].token_ids) >= 2 and len(results[1].token_ids) == 0
        later = asyncio.create_task(engine.generate(request("later")))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not later.done() and engine.load().num_waiting == 1
        await engine.resume()
        assert (await later).finish_reason == "length"


@pytest.mark.parametrize("kept_before", [False, True])
async def test_hf_engine_pause_drain_finishes_what_came_before_and_holds_what_comes_after(
    tiny_model: Path, kept_before: bool
) -> None:
    async with running(tiny_model, max_num_seqs=1) as engine:
        tasks = [asyncio.create_task(engine.generate(request(f"{i}"))) for i in range(3)]
        await has_generated(engine, 1)
        if kept_before:
            await engine.pause("keep")
        draining = asyncio.create_task(engine.pause("drain"))
        await asyncio.sleep(0)
        later = asyncio.create_task(engine.generate(request("later")))
        await draining
        assert all(task.done() for task in tasks) and not later.done()
        assert [len(task.result().token_ids) for task in tasks] == [16, 16, 16]
        await engine.resume()
        assert len((await later).token_ids) == 16


async def test_hf_engine_resume_calls_off_a_drain(tiny_model: Path) -> None:
    async with running(tiny_model) as engine:
        task = asyncio.create_task(engine.generate(request("a", max_new_tokens=50)))
        await has_generated(engine, 1)
        draining = asyncio.create_task(engine.pause("drain"))
        await asyncio.sleep(0)
        await engine.resume()
        later = await engine.generate(request("later"))
        await asyncio.gather(task, draining)
        assert len(later.token_ids) == 16
        await engine.generate(request("b"))  # not paused


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("a", prompt(0, 90)), "context length 96"),
        (request("a", np.array([260], np.int32)), "vocabulary size 260"),
        (request("a", np.array([], np.int32)), "0 prompt tokens"),
    ],
)
async def test_hf_engine_impossible_requests_are_refused_and_harm_nobody(
    tiny_model: Path, bad: object, message: str
) -> None:
    async with running(tiny_model) as engine:
        good = asyncio.create_task(engine.generate(request("good")))
        with pytest.raises(UserError, match=message):
            await engine.generate(bad)  # type: ignore[arg-type]
        assert len((await good).token_ids) == 16


async def test_hf_engine_an_id_in_use_is_refused(tiny_model: Path) -> None:
    async with running(tiny_model) as engine:
        first = asyncio.create_task(engine.generate(request("a")))
        await asyncio.sleep(0)
        with pytest.raises(UserError, match="in use"):
            await engine.generate(request("a"))
        await first


async def test_hf_engine_a_failure_in_the_computation_reaches_every_waiting_request(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tiny_model, max_num_seqs=1) as engine:
        tasks = [asyncio.create_task(engine.generate(request(f"{i}", max_new_tokens=60))) for i in range(3)]
        await has_generated(engine, 2)
        decoder = engine._decoder
        assert decoder is not None
        with torch.no_grad():
            decoder.model.get_output_embeddings().weight.fill_(float("nan"))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineDiedError] * 3
        assert "not finite" in str(outcomes[0]) and "e0" in str(outcomes[0])
        with pytest.raises(EngineDiedError, match="not finite"):
            await engine.generate(request("late"))
        with pytest.raises(EngineDiedError):
            await engine.pause("keep")
    assert any(record.levelno == logging.ERROR for record in caplog.records)


async def test_hf_engine_close_tells_those_who_wait_and_may_be_repeated(tiny_model: Path) -> None:
    engine = HFEngine(engine_spec(tiny_model))
    await engine.start()
    task = asyncio.create_task(engine.generate(request("a", max_new_tokens=80)))
    await has_generated(engine, 1)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineDiedError, match="closed"):
        await task
    with pytest.raises(EngineDiedError, match="closed"):
        await engine.generate(request("b"))


async def test_hf_engine_close_that_is_cancelled_leaves_neither_the_task_nor_the_thread_of_the_engine(
    tiny_model: Path,
) -> None:
    engine = HFEngine(engine_spec(tiny_model))
    await engine.start()
    server, thread = engine._server, engine._executor
    assert server is not None and thread is not None
    async with engine._device:  # a step is under way
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await engine.close()
    await asyncio.wait({server}, timeout=60)
    await asyncio.to_thread(thread.shutdown)  # comes back when it has ended
    assert server.cancelled()


async def test_hf_engine_nothing_works_before_start(tiny_model: Path) -> None:
    engine = HFEngine(engine_spec(tiny_model))
    with pytest.raises(EngineDiedError, match="not started"):
        await engine.generate(request("a"))
    await engine.close()


async def test_hf_engine_a_model_that_is_not_there_is_the_users_error(tmp_path: Path) -> None:
    engine = HFEngine(engine_spec(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="nothing"):
        await engine.start()
    await engine.close()


async def test_hf_engine_an_idle_engine_uses_no_cpu(tiny_model: Path) -> None:
    async with running(tiny_model) as engine:
        await engine.generate(request("a"))
        used = []
        for _ in range(10):
            before = time.process_time()
            await asyncio.sleep(0.1)
            used.append(time.process_time() - before)
        assert min(used) < 0.02 * 0.1  # what else this process does takes a moment, asking takes every one


async def test_hf_engine_the_loop_stays_free_while_the_engine_computes(tiny_model: Path) -> None:
    turns = 0
    async with running(tiny_model) as engine:
        task = asyncio.create_task(engine.generate(request("a", max_new_tokens=30)))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
    assert turns > 100  # many turns per token


async def test_hf_engine_its_messages_go_to_the_log_file(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "logs" / "engine.log"
    logging.getLogger("roll").setLevel(logging.INFO)
    try:
        async with running(tiny_model, log_path=file):
            pass
    finally:
        logging.getLogger("roll").setLevel(logging.NOTSET)
    assert "Engine e0 is ready" in file.read_text()
    assert not any(isinstance(h, logging.FileHandler) for h in logging.getLogger("roll.inference").handlers)
