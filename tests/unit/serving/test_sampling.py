"""Sampling through the API: snapshots that never change, log-probs, stops, and more snapshots than the engine holds."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_client import OTHER_KEY, ApiFailure, client, datum, gather, read_sequences, serving

from roll.serving import sampling

PROMPT = list(range(10, 22))


def learn(seed: int) -> Any:
    targets = np.random.default_rng(seed).integers(4, 260, len(PROMPT))
    return datum(PROMPT, targets, weights=np.ones(len(PROMPT)))


async def test_serving_snapshots_do_not_change_during_training(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path, max_adapters=2) as server, client(server) as one:
        model, sessions, expected = await one.create_model(), [], []
        base = (
            await one.send(
                "create_sampling_session",
                {"session_id": one.session_id, "sampling_session_seq_id": 99, "base_model": "tiny"},
            )
        )["sampling_session_id"]
        plain = read_sequences(await one.sample(base, 0, PROMPT, 3))
        for number in range(4):  # two more than the engine holds
            sessions.append(await one.snapshot(model, number))
            expected.append(read_sequences(await one.sample(sessions[-1], 0, PROMPT, 3)))
            data = []
            for tokens, logprobs, _ in expected[-1]:  # the trainer agrees with the log-probs of the sampler
                whole, zeros = PROMPT + tokens, np.zeros(len(PROMPT) - 1)
                q, a = np.concatenate([zeros, logprobs]), np.concatenate([zeros, np.ones(len(tokens))])
                data.append(datum(whole[:-1], whole[1:], logprobs=q, advantages=a))
            _, found = await one.forward_backward(model, data, "importance_sampling", forward_only=True)
            for (_, logprobs, _), row in zip(expected[-1], found, strict=True):
                np.testing.assert_allclose(row[len(PROMPT) - 1 :], logprobs, atol=1e-5)
            await one.forward_backward(model, [learn(number)])
            await one.step(model, learning_rate=0.05)
        assert len({str([tokens for tokens, *_ in each]) for each in expected}) == 4
        assert [each[0] for each in expected[0]] == [each[0] for each in plain]  # B begins at 0
        work = [one.sample(session, 1, PROMPT, 3) for session in [*sessions, base]]  # all at once, on two slots
        for message, known in zip(await gather(*work), [*expected, plain], strict=True):
            again = read_sequences(message)
            assert [tokens for tokens, *_ in again] == [tokens for tokens, *_ in known]
            for (_, mine, _), (_, theirs, _) in zip(again, known, strict=True):
                np.testing.assert_allclose(mine, theirs, atol=1e-5)
        named = {"model_id": model, "seq_id": one.next_seq(model), "path": "final"}
        path = (await one.result(await one.send("save_weights_for_sampler", named)))["path"]
        body = {"session_id": one.session_id, "sampling_session_seq_id": 50, "model_path": path}
        session = (await one.send("create_sampling_session", body))["sampling_session_id"]
        sampler = await one.get(f"samplers/{session}")
        assert sampler == {"sampler_id": session, "base_model": "tiny", "model_path": path}
        assert len(read_sequences(await one.sample(session, 0, PROMPT, 2))) == 2


async def test_serving_sampling_settings_are_applied_or_rejected(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "FIRST_SLICE", 3)
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        body = {"session_id": one.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
        session = (await one.send("create_sampling_session", body))["sampling_session_id"]
        number = iter(range(1000))

        async def sample(count: int = 1, **params: Any) -> Any:
            return read_sequences(await one.sample(session, next(number), PROMPT, count, params=params))

        (free,) = await sample(max_tokens=24, stop=[])
        tokens, logprobs, reason = free
        assert (len(tokens), reason) == (24, 1)
        assert await sample(2, max_tokens=24, stop=[]) != await sample(2, max_tokens=24, stop=[], seed=2)
        a, b = await sample(2, max_tokens=24, stop=[])
        assert a[0] == tokens and b[0] != tokens  # each sequence has a seed of its own

        (stopped,) = await sample(max_tokens=24, stop=[tokens[6]])
        end = tokens.index(tokens[6]) + 1
        assert (stopped[0], stopped[2]) == (tokens[:end], 0)
        text = server.service._sampler._decode(np.array(tokens[7:9]))
        (cut,) = await sample(max_tokens=24, stop=[text, "never said"])
        assert cut[2] == 0 and cut[0] == tokens[: len(cut[0])]
        assert text in server.service._sampler._decode(np.array(cut[0]))
        assert text not in server.service._sampler._decode(np.array(cut[0][:-1]))
        np.testing.assert_allclose(cut[1], logprobs[: len(cut[0])], atol=1e-5)
        (whole,) = await sample(max_tokens=24, stop="never said")
        np.testing.assert_allclose(whole[1], logprobs[: len(whole[1])], atol=1e-5)  # slices change nothing

        message = await one.sample(session, next(number), PROMPT, prompt_logprobs=True, params={"max_tokens": 1})
        scores = np.frombuffer(message.prompt_logprobs, "<f4")
        assert np.isnan(scores[0]) and (scores[1:] < 0).all() and len(scores) == len(PROMPT)
        some = {"prompt_logprobs": True, "prompt_logprobs_last_n": 3, "params": {"max_tokens": 1}}
        message = await one.sample(session, next(number), PROMPT, **some)
        last = np.frombuffer(message.prompt_logprobs, "<f4")
        assert np.isnan(last[:-3]).all()
        np.testing.assert_allclose(last[-3:], scores[-3:], atol=1e-6)

        for more, field in (
            ({"topk_prompt_logprobs": 2}, "topk_prompt_logprobs: top-k"),
            ({"topk_sample_logprobs": 2}, "topk_sample_logprobs: top-k"),
            ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k: alternatives"),
            ({"target_prompt_logprobs": [[5, 6]]}, "target_prompt_logprobs: log-probs of other tokens"),
            ({"record_stability_info": True}, "record_stability_info: the loss stable_reinforce"),
            ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n: it needs prompt_logprobs"),
            ({"params": {"top_k": 0}}, "sampling_params.top_k"),
            ({"params": {"top_p": 0.0}}, "sampling_params.top_p"),
            ({"params": {"max_tokens": 96}}, "sampling_params.max_tokens: the prompt has 12 tokens"),
            ({"params": {"temperature": -1.0}}, "sampling_params.temperature"),
            ({"params": {"stop": [1000]}}, "sampling_params.stop"),
        ):
            with pytest.raises(ApiFailure, match=field) as failure:
                await one.sample(session, next(number), PROMPT, **more)
            assert failure.value.status == 400
        with pytest.raises(ApiFailure, match="prompt: token 260 is not in the vocabulary"):
            await one.sample(session, next(number), [5, 260])


async def test_serving_samples_during_training(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        session = await one.snapshot(model, 0)
        promise = await one.submit(model, [learn(seed) for seed in range(400)])
        replies = await gather(*(one.sample(session, index, PROMPT, params={"seed": index}) for index in range(50)))
        assert isinstance(await one.result(promise), bytes)
        assert len({str(read_sequences(each)[0][0]) for each in replies}) > 20
        again = await one.sample(session, 7, PROMPT, params={"seed": 7})  # a repeated request is not run again
        assert read_sequences(again)[0][0] == read_sequences(replies[7])[0][0]


async def test_serving_samples_200_sequences_at_once_during_a_forward_backward(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        session = await one.snapshot(model, 0)
        group, samples_are_done = server.service.trainer._group, asyncio.Event()
        original = group.forward_backward

        async def compute(*arguments: Any) -> Any:
            await samples_are_done.wait()
            return await original(*arguments)

        monkeypatch.setattr(group, "forward_backward", compute)
        promise = await one.submit(model, [datum([5, 6, 7], [6, 7, 8], weights=np.ones(3))])
        replies = await gather(
            *(one.sample(session, number, [5, 6, number], params={"max_tokens": 4}) for number in range(4, 204))
        )
        assert len(replies) == 200 and server.service.promises.find(promise["request_id"], "alice").outcome is None
        samples_are_done.set()
        assert isinstance(await one.result(promise), bytes)


async def test_serving_sampling_continues_while_another_snapshot_loads_or_fails(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one, client(server, OTHER_KEY) as two:
        model = await one.create_model()
        mine, others = await one.snapshot(model, 0), [await two.snapshot(await two.create_model(), 0)]
        others.append(await two.snapshot(f"{two.session_id}:train:0", 1))
        expected = read_sequences(await one.sample(mine, 0, PROMPT))[0][0]
        decoder = server.service._sampler._engines.members[0]._running.engine._decoder  # type: ignore[attr-defined]
        update, entered, go_on = decoder.update_weights, threading.Event(), threading.Event()

        def wait_and_update(received: Any) -> Any:
            entered.set()
            assert go_on.wait(30)
            return update(received)

        decoder.update_weights = wait_and_update
        loading = asyncio.ensure_future(two.sample(others[0], 0, PROMPT))
        await asyncio.to_thread(entered.wait, 30)
        sampling_meanwhile = asyncio.ensure_future(one.sample(mine, 1, PROMPT, prompt_logprobs=True))
        while server.service._sampler._engines.members[0].num_sequences < 2:
            await asyncio.sleep(0)
        for _ in range(50):  # until the engine has the request
            await asyncio.sleep(0)
        go_on.set()
        assert read_sequences(await sampling_meanwhile)[0][0] == expected
        assert read_sequences(await loading)

        def fail(received: Any) -> Any:
            raise RuntimeError("there is no memory")

        decoder.update_weights = fail
        with pytest.raises(ApiFailure, match="there is no memory"):
            await two.sample(others[1], 0, PROMPT)
        assert read_sequences(await one.sample(mine, 2, PROMPT))[0][0] == expected
        decoder.update_weights = update
        assert read_sequences(await two.sample(others[1], 1, PROMPT))
