"""The engine `sglang` with the real server of SGLang 0.5.23, on a CPU.

SGLang's kernels have no build for CPUs. The server computes with SGLang's own PyTorch code instead, and the package of
kernels is replaced by names (`tests/extras/sglang`). Everything else is the server that a GPU would run: its HTTP
application, its scheduler, its caches, its sampling and its loading of weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds.extras import extra_python

from roll.inference import EngineSpec
from roll.inference.hf import HFEngine
from roll.inference.sglang.engine import SGLangEngine
from roll.types import GenerationRequest, IntArray, SamplingParams

pytestmark = [pytest.mark.extras, pytest.mark.timeout(900)]

CPU_OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "max_total_tokens": 4096,
    "disable_overlap_schedule": True,
}


@dataclass
class Engines:
    """The engine `sglang`, and `hf` with the same weights. `run` runs a coroutine on the event loop of both."""

    runner: asyncio.Runner
    sglang: SGLangEngine
    hf: HFEngine

    @property
    def run(self) -> Any:
        return self.runner.run


@pytest.fixture(scope="module")
def sglang_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with SGLang and the package that stands for its kernels."""
    program = tmp_path_factory.mktemp("sglang") / "python"
    kernels = Path(__file__).parent / "sglang"
    program.write_text(
        f'#!/bin/sh\nexport PYTHONPATH={kernels} SGLANG_USE_CPU_ENGINE=1\nexec {extra_python("sglang")} "$@"\n'
    )
    program.chmod(0o755)
    return program


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
            yield Engines(runner, engine, hf)
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
    """The tokens differ, since each engine has random numbers of its own; `hf` scores the tokens of the server."""

    async def main() -> None:
        requests = [request(f"sample-{i}", prompt(i), temperature=temperature, seed=i) for i in range(4)]
        for own, got in zip(requests, await asyncio.gather(*map(engines.sglang.generate, requests)), strict=True):
            tokens = np.concatenate([own.token_ids, got.token_ids])
            if temperature == 1.0:
                (want,) = await engines.hf.logprobs([tokens])
                np.testing.assert_allclose(got.logprobs, want[len(own.token_ids) :], atol=1e-4)

    engines.run(main())


def test_sglang_real_scores_of_prompts_are_those_of_hf(engines: Engines) -> None:
    async def main() -> None:
        sequences = [prompt(seed, length) for seed, length in ((1, 2), (2, 30), (3, 95), (4, 1), (2, 40))]
        found, expected = await engines.sglang.logprobs(sequences), await engines.hf.logprobs(sequences)
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-4)

    engines.run(main())
