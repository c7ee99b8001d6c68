"""The engine `sglang` with the real server of SGLang 0.5.23, on a CPU.

SGLang's kernels have no build for CPUs. The server computes with SGLang's own PyTorch code instead, and the package of
kernels is replaced by names (`tests/extras/sglang`). Everything else is the server that a GPU would run: its HTTP
application, its scheduler, its caches, its sampling and its loading of weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from worlds.sglang import CPU_OPTIONS, write_sglang_python
from worlds.weight_sync import Weights, send

from roll.errors import DataError, EngineDiedError, WeightSyncError
from roll.inference import EngineSpec
from roll.inference.hf import HFEngine
from roll.inference.sglang.engine import SGLangEngine
from roll.models import load_causal_lm
from roll.types import GenerationRequest, IntArray, SamplingParams

pytestmark = [pytest.mark.extras, pytest.mark.timeout(900)]


@dataclass
class Engines:
    """The engine `sglang`, and `hf` with the same weights. `run` runs a coroutine on the event loop of both."""

    runner: asyncio.Runner
    sglang: SGLangEngine
    hf: HFEngine
    weights: Mapping[str, torch.Tensor]

    @property
    def run(self) -> Any:
        return self.runner.run

    async def wait_until_running(self) -> None:
        """Return when the server has decoded some tokens of the requests that were sent before."""
        for number in range(2):
            await asyncio.sleep(0)  # the tasks of those requests begin
            await self.sglang.generate(request(f"marker-{number}", prompt(99), max_new_tokens=4))

    def score(
        self, tokens: IntArray, weights: Mapping[str, torch.Tensor] | None = None, temperature: float = 1.0
    ) -> np.ndarray:
        """Return the log-probs [L] of tokens with plain `transformers`; entry 0 is 0."""
        network = load_causal_lm(self.hf._spec.model_path, "float32", attention="eager")
        ids = torch.from_numpy(np.asarray(tokens, np.int64))
        with torch.inference_mode():
            for name, tensor in (weights or self.weights).items():
                network.get_parameter(name).copy_(tensor)
            table = (network(ids[None]).logits[0].double() / temperature).log_softmax(-1)
        return np.concatenate([[0.0], table[:-1].gather(-1, ids[1:, None])[:, 0].numpy()])


@pytest.fixture(scope="module")
def sglang_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with SGLang and the package that stands for its kernels."""
    return write_sglang_python(tmp_path_factory.mktemp("sglang"))


def spec_of(model: Path, python: Path, log: Path, **changes: Any) -> EngineSpec:
    settings: dict[str, Any] = {"dtype": "float32", "max_context": 96, "max_num_seqs": 8, "num_threads": 1, **changes}
    options = {**CPU_OPTIONS, "python": str(python), **settings.pop("options", {})}
    return EngineSpec(engine_id="e0", kind="sglang", model_path=str(model), log_path=log, options=options, **settings)


@pytest.fixture(scope="module")
def engines(tiny_model: Path, sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Both engines; ROLL's engine starts the server of SGLang."""
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    spec = spec_of(tiny_model, sglang_python, log)
    engine = SGLangEngine(spec)
    hf = HFEngine(dataclasses.replace(spec, kind="hf", options={}, log_path=None))
    with asyncio.Runner() as runner:
        runner.run(hf.start())
        runner.run(engine.start())
        try:
            network = load_causal_lm(tiny_model, "float32")
            weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
            yield Engines(runner, engine, hf, weights)
        finally:
            runner.run(engine.close())
            runner.run(hf.close())


def prompt(seed: int, length: int = 12) -> IntArray:
    return np.random.default_rng(seed).integers(4, 260, length).astype(np.int32)


def request(name: str, tokens: IntArray, **sampling: Any) -> GenerationRequest:
    settings = SamplingParams(**{"max_new_tokens": 16, **sampling})
    return GenerationRequest(request_id=name, token_ids=tokens, sampling=settings)


def test_sglang_real_greedy_tokens_and_log_probs_are_those_of_hf(engines: Engines) -> None:
    async def main() -> None:
        requests = [request(f"greedy-{i}", prompt(i, 5 + 7 * i), temperature=0.0) for i in range(4)]
        found, expected = [
            await asyncio.gather(*map(engine.generate, requests)) for engine in (engines.sglang, engines.hf)
        ]
        for got, want in zip(found, expected, strict=True):
            assert got.token_ids.tolist() == want.token_ids.tolist()
            np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
            assert {*got.policy_versions.tolist()} == {0} and got.finish_reason == "length"

    engines.run(main())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sglang_real_log_probs_of_samples_are_those_of_hf(engines: Engines, temperature: float) -> None:
    """The engines have random numbers of their own, so a plain forward pass scores the tokens of the server."""

    async def main() -> None:
        own = [request(f"sample-{i}", prompt(i), temperature=temperature, seed=i) for i in range(4)]
        found = await asyncio.gather(*map(engines.sglang.generate, own))
        for one, got in zip(own, found, strict=True):
            assert len(got.token_ids) == 16
            want = engines.score(np.concatenate([one.token_ids, got.token_ids]), temperature=temperature)
            np.testing.assert_allclose(got.logprobs, want[len(one.token_ids) :], atol=1e-4)
        assert len({tuple(each.token_ids.tolist()) for each in found}) == 4

    engines.run(main())


def test_sglang_real_several_samples_of_one_prompt_differ(engines: Engines) -> None:
    async def main() -> None:
        own = [request(f"group-{i}", prompt(7)) for i in range(6)]
        found = await asyncio.gather(*map(engines.sglang.generate, own))
        assert len({tuple(each.token_ids.tolist()) for each in found}) == 6
        assert [each.request_id for each in found] == [each.request_id for each in own]

    engines.run(main())


def test_sglang_real_stop_tokens_end_answers_and_are_part_of_them(engines: Engines) -> None:
    async def main() -> None:
        free = await engines.sglang.generate(request("free", prompt(1), temperature=0.0))
        stop = int(free.token_ids[3])
        expected = free.token_ids.tolist()[: free.token_ids.tolist().index(stop) + 1]
        own = request("stopped", prompt(1), temperature=0.0, stop_token_ids=(stop,))
        found = await engines.sglang.generate(own)
        assert (found.token_ids.tolist(), found.finish_reason) == (expected, "stop")
        assert len(found.logprobs) == len(expected)

    engines.run(main())


def test_sglang_real_requests_may_fill_the_context(engines: Engines) -> None:
    """SGLang shortens answers and rejects prompts at the end of its context, which is longer than ROLL's."""

    async def main() -> None:
        for length in (95, 90, 80, 1):
            found = await engines.sglang.generate(request("full", prompt(1, length), max_new_tokens=96 - length))
            assert (len(found.token_ids), found.finish_reason) == (96 - length, "length")

    engines.run(main())


def test_sglang_real_aborted_requests_return_their_tokens_and_no_others_end(engines: Engines) -> None:
    async def main() -> None:
        names = ["t.1", "t.10", "t.1.x"]
        answers = [
            asyncio.create_task(engines.sglang.generate(request(name, prompt(i), max_new_tokens=80)))
            for i, name in enumerate(names)
        ]
        await engines.wait_until_running()
        await engines.sglang.abort(["t.1", "unknown"])
        found = await asyncio.gather(*answers)
        assert [each.finish_reason for each in found] == ["abort", "length", "length"]
        assert 0 < len(found[0].token_ids) < 80 and len(found[0].logprobs) == len(found[0].token_ids)

    engines.run(main())


def test_sglang_real_paused_requests_continue_and_those_that_arrive_wait(engines: Engines) -> None:
    async def main() -> None:
        engine = engines.sglang
        first = asyncio.create_task(engine.generate(request("first", prompt(1), max_new_tokens=80, temperature=0.0)))
        lost = asyncio.create_task(engine.generate(request("lost", prompt(3), max_new_tokens=80)))
        await engines.wait_until_running()
        await engine.pause("keep")
        await engine.abort(["lost"])
        assert (await lost).finish_reason == "abort" and len((await lost).token_ids) == 0  # SGLang does not send them
        later = [asyncio.create_task(engine.generate(request(name, prompt(2)))) for name in ("wanted", "unwanted")]
        await asyncio.sleep(0)
        await engine.abort(["unwanted"])
        assert (await later[1]).finish_reason == "abort"
        assert not first.done() and not later[0].done()
        await engine.resume()
        found = await first
        assert len(found.token_ids) == 80 and len((await later[0]).token_ids) == 16
        want = engines.score(np.concatenate([prompt(1), found.token_ids]))
        np.testing.assert_allclose(found.logprobs, want[12:], atol=1e-4)

    engines.run(main())


@pytest.mark.parametrize("mode", ["abort", "drain"])
def test_sglang_real_pauses_that_end_requests(engines: Engines, mode: Any) -> None:
    async def main() -> None:
        answer = asyncio.create_task(engines.sglang.generate(request("ends", prompt(1), max_new_tokens=80)))
        await engines.wait_until_running()
        await engines.sglang.pause(mode)
        found = await answer
        assert found.finish_reason == {"abort": "abort", "drain": "length"}[mode]
        assert len(found.token_ids) < 80 if mode == "abort" else len(found.token_ids) == 80
        await engines.sglang.resume()

    engines.run(main())


def test_sglang_real_weight_sync_during_a_request(engines: Engines) -> None:
    """Tokens before the sync have the log-probs of the old weights, those after it of the new ones, and no KV cache
    of the old weights is used again."""

    async def main() -> None:
        engine = engines.sglang
        old, new = engines.weights, {name: tensor + 0.01 for name, tensor in engines.weights.items()}
        answer = asyncio.create_task(engine.generate(request("long", prompt(1), max_new_tokens=80, temperature=0.0)))
        await engines.wait_until_running()
        receipt = await send(engine, Weights(new), 7, "shared_memory")
        assert receipt.policy_version == 7
        found = await answer
        versions = found.policy_versions.tolist()
        assert versions == sorted(versions) and {*versions} == {0, 7} and len(versions) == 80
        tokens = np.concatenate([prompt(1), found.token_ids])
        for version, weights in ((0, old), (7, new)):
            want, of_version = engines.score(tokens, weights)[12:], found.policy_versions == version
            np.testing.assert_allclose(found.logprobs[of_version], want[of_version], atol=1e-4)
        (scores,) = await engine.logprobs([prompt(1)])  # the cache has this prompt
        np.testing.assert_allclose(scores, engines.score(prompt(1), new), atol=1e-4)
        again = await engine.generate(request("again", prompt(1), temperature=0.0))
        want = engines.score(np.concatenate([prompt(1), again.token_ids]), new)
        np.testing.assert_allclose(again.logprobs, want[12:], atol=1e-4)
        await send(engine, Weights(old), 8, "shared_memory")
        (scores,) = await engine.logprobs([prompt(1)])
        np.testing.assert_allclose(scores, engines.score(prompt(1), old), atol=1e-4)

    engines.run(main())


def test_sglang_real_weights_of_other_shapes_are_refused_and_the_server_lives(engines: Engines) -> None:
    async def main() -> None:
        with pytest.raises(WeightSyncError, match=r"'model\.norm\.weight' must have shape \(32,\), got \(3,\)"):
            await send(
                engines.sglang, Weights({**engines.weights, "model.norm.weight": torch.ones(3)}), 9, "shared_memory"
            )
        assert len((await engines.sglang.generate(request("after", prompt(1)))).token_ids) == 16

    engines.run(main())


def test_sglang_real_sleep_and_wake(engines: Engines) -> None:
    """Without its memory saver, which needs CUDA, the server frees nothing; the calls are the same."""

    async def main() -> None:
        engine, spec = engines.sglang, engines.sglang._spec
        engine._spec = dataclasses.replace(spec, sleeps=True)
        answer = asyncio.create_task(engine.generate(request("ends", prompt(1), max_new_tokens=80)))
        await engines.wait_until_running()
        await engine.sleep()
        assert (await answer).finish_reason == "abort"
        await engine.wake()
        with pytest.raises(WeightSyncError, match="lost its weights while asleep"):
            await engine.generate(request("early", prompt(1)))
        await send(engine, Weights(engines.weights), 10, "shared_memory")
        assert {*(await engine.generate(request("late", prompt(1)))).policy_versions.tolist()} == {10}
        engine._spec = spec

    engines.run(main())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": [5] * 200}, r"rejected request 'x' \(HTTP 400\): The input \(200 tokens\) is longer than"),
        ({"sampling_params": {"max_new_tokens": 200}}, "Requested token count exceeds the model's maximum context"),
        ({"sampling_params": {"nonsense": 1}}, "unknown field `nonsense`"),
        ({"input_ids": []}, "input_ids cannot be empty"),
        ({"lora_path": "other"}, "LoRA is not enabled"),
    ],
)
def test_sglang_real_errors_of_the_server_are_one_clear_line(engines: Engines, changes: Any, words: str) -> None:
    body = {"rid": "x", "input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}, **changes}
    with pytest.raises(DataError, match=words) as caught:
        engines.run(engines.sglang._run("x", body, None))
    assert "\n" not in str(caught.value)


def test_sglang_real_token_outside_the_vocabulary_never_reaches_the_server(engines: Engines) -> None:
    """It would end the server's process."""
    own = request("foreign", np.array([5, 100_000], np.int32))
    with pytest.raises(DataError, match="token id 100000, which is out of range"):
        engines.run(engines.sglang.generate(own))
    with pytest.raises(DataError, match="token id 100000, which is out of range"):
        engines.run(engines.sglang.logprobs([own.token_ids]))


def test_sglang_real_scores_of_prompts_are_those_of_hf(engines: Engines) -> None:
    async def main() -> None:
        sequences = [prompt(seed, length) for seed, length in ((1, 2), (2, 30), (3, 95), (4, 1), (2, 40))]
        found, expected = await engines.sglang.logprobs(sequences), await engines.hf.logprobs(sequences)
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-4)

    engines.run(main())


def test_sglang_real_server_that_is_killed_is_a_dead_engine(engines: Engines) -> None:
    """The last test of this file: the scheduler's process ends, and SGLang's main process ends with it."""

    async def main() -> None:
        server = engines.sglang._server
        assert server is not None
        answer = asyncio.create_task(engines.sglang.generate(request("lost", prompt(1), max_new_tokens=80)))
        await engines.wait_until_running()
        schedulers = [
            child
            for child in psutil.Process(server.process.pid).children(recursive=True)
            if "scheduler" in child.name() or "scheduler" in " ".join(child.cmdline())
        ]
        assert schedulers
        schedulers[0].kill()
        with pytest.raises(EngineDiedError):
            await answer
        await asyncio.to_thread(server.process.wait, 60)
        with pytest.raises(EngineDiedError, match="its server ended with exit code"):
            await engines.sglang.generate(request("late", prompt(1)))

    engines.run(main())
