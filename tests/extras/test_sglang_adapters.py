"""Adapters of the engine `sglang` with the real server of SGLang 0.5.23, on a CPU; see `test_sglang.py`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds.sglang import CPU_OPTIONS, write_sglang_python
from worlds.weight_sync import Weights, send

from roll.config.model import LoRAConfig
from roll.errors import EngineDiedError, WeightSyncError
from roll.inference import EngineSpec
from roll.inference.sglang.engine import SGLangEngine
from roll.models import list_adapted_layers, load_causal_lm
from roll.types import GenerationRequest, IntArray, SamplingParams
from roll.weights.adapters import name_adapter_tensor

pytestmark = [pytest.mark.extras, pytest.mark.timeout(900)]

LORA = LoRAConfig(rank=8, alpha=12.0, use_rslora=True, rank_pattern={"down_proj": 4}, alpha_pattern={"o_proj": 5})
TEXT = np.random.default_rng(0).integers(4, 260, 90).astype(np.int32)


@dataclass
class Served:
    """The engine with the real server. `run` runs a coroutine on the engine's event loop."""

    runner: asyncio.Runner
    engine: SGLangEngine
    model: Path

    @property
    def run(self) -> Any:
        return self.runner.run

    def score(
        self, tokens: IntArray, adapter: Mapping[str, torch.Tensor] | None, lora: LoRAConfig = LORA
    ) -> np.ndarray:
        """Return the log-probs [L] of tokens with plain `transformers` and merged weights; entry 0 is 0."""
        network = load_causal_lm(self.model, "float32", attention="eager")
        ids = torch.from_numpy(np.asarray(tokens, np.int64))
        with torch.inference_mode():
            for layer in list_layers(self.model, lora) if adapter is not None else ():
                a, b = (adapter[name_adapter_tensor(layer, f"lora_{part}.weight")] for part in "AB")
                network.get_parameter(f"{layer}.weight").add_(lora.compute_scale(layer) * (b @ a))
            table = network(ids[None]).logits[0].double().log_softmax(-1)
        return np.concatenate([[0.0], table[:-1].gather(-1, ids[1:, None])[:, 0].numpy()])


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("sglang")
    options = {**CPU_OPTIONS, "python": str(write_sglang_python(place)), "lora_backend": "torch_native"}
    engine = SGLangEngine(
        EngineSpec(
            engine_id="e0",
            kind="sglang",
            model_path=str(tiny_model),
            dtype="float32",
            max_context=128,
            max_num_seqs=8,
            num_threads=1,
            lora=LORA,
            max_adapters=2,
            options=options,
            log_path=place / "engine.log",
        )
    )
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        try:
            yield Served(runner, engine, tiny_model)
        finally:
            runner.run(engine.close())


def list_layers(model: Path, lora: LoRAConfig) -> Mapping[str, tuple[int, int]]:
    targets = lora.target_modules
    return list_adapted_layers(str(model), "all-linear" if targets == "all-linear" else tuple(targets))


def make_adapter(model: Path, seed: int, lora: LoRAConfig = LORA) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer, (outputs, inputs) in list_layers(model, lora).items():
        rank = lora.get_rank(layer)
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[name_adapter_tensor(layer, f"lora_{part}.weight")] = 0.1 * torch.randn(shape, generator=numbers)
    return tensors


def request(name: str, tokens: IntArray, adapter: str | None = None, **sampling: Any) -> GenerationRequest:
    settings = SamplingParams(**{"max_new_tokens": 16, **sampling})
    return GenerationRequest(request_id=name, token_ids=tokens, sampling=settings, adapter=adapter)


def test_sglang_real_adapters_replaced_three_times_with_a_common_prefix(served: Served) -> None:
    """No sync leaves an entry of the old adapter in the KV cache, and a third adapter has room after each."""

    async def main() -> None:
        engine, seen = served.engine, []
        for version in (1, 2, 3):
            adapter = make_adapter(served.model, version)
            await send(engine, Weights(adapter), version, "shared_memory")
            (scores,) = await engine.logprobs([TEXT])
            np.testing.assert_allclose(scores, served.score(TEXT, adapter), atol=1e-5)
            made = await engine.generate(request(f"a{version}", TEXT[:64]))
            whole = np.concatenate([TEXT[:64], made.token_ids])
            np.testing.assert_allclose(made.logprobs, served.score(whole, adapter)[64:], atol=1e-5)
            assert {*made.policy_versions.tolist()} == {version}
            seen.append(scores)
        assert np.abs(seen[0] - seen[1]).max() > 1e-2 < np.abs(seen[1] - seen[2]).max()

    served.run(main())


def test_sglang_real_adapters_rows_of_one_batch_have_their_own_or_none(served: Served) -> None:
    async def main() -> None:
        engine, adapters = (
            served.engine,
            {name: make_adapter(served.model, seed) for seed, name in ((7, None), (8, "x"))},
        )
        for version, (name, adapter) in enumerate(adapters.items(), start=10):
            await send(engine, Weights(adapter), version, "shared_memory", name)
        rows = [request(f"r{i}", TEXT[i : i + 20], name) for i, name in enumerate((None, "x", None, "x"))]
        found = await asyncio.gather(*map(engine.generate, rows))
        for row, made in zip(rows, found, strict=True):
            whole = np.concatenate([row.token_ids, made.token_ids])
            np.testing.assert_allclose(made.logprobs, served.score(whole, adapters[row.adapter])[20:], atol=1e-5)
        scores = await engine.logprobs([TEXT, TEXT[:40]], adapter="x")
        np.testing.assert_allclose(scores[1], served.score(TEXT, adapters["x"])[:40], atol=1e-5)
        # A request without any adapter, next to one with an adapter, computes what the model alone computes.
        plain, _ = await asyncio.gather(
            engine._run("p", {**engine_body("p"), "logprob_start_len": 0}, None), engine.generate(rows[0])
        )
        logprobs = [entry[0] for entry in plain[0]["meta_info"]["input_token_logprobs"][1:]]
        np.testing.assert_allclose(logprobs, served.score(TEXT, None)[1:], atol=1e-5)
        with pytest.raises(WeightSyncError, match="adapter 'y' cannot be added"):
            await send(engine, Weights(adapters[None]), 12, "shared_memory", "y")

    served.run(main())


def engine_body(name: str) -> dict[str, Any]:
    return {
        "rid": name,
        "input_ids": TEXT.tolist(),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
    }


def test_sglang_real_adapters_running_request_continues_with_the_new_one(served: Served) -> None:
    async def main() -> None:
        engine, adapters = served.engine, {version: make_adapter(served.model, version) for version in (20, 21)}
        await send(engine, Weights(adapters[20]), 20, "shared_memory")
        answer = asyncio.create_task(engine.generate(request("long", TEXT[:8], max_new_tokens=110)))
        for number in range(2):  # the server has decoded some tokens of the answer when these have ended
            await asyncio.sleep(0)
            await engine.generate(request(f"marker-{number}", TEXT[:9], max_new_tokens=4))
        await send(engine, Weights(adapters[21]), 21, "shared_memory")
        found = await answer
        versions = found.policy_versions
        assert len(found.token_ids) == 110 and {*versions.tolist()} == {20, 21} and np.all(np.diff(versions) >= 0)
        whole = np.concatenate([TEXT[:8], found.token_ids])
        for version, adapter in adapters.items():
            expected = served.score(whole, adapter)[8:]
            np.testing.assert_allclose(found.logprobs[versions == version], expected[versions == version], atol=1e-5)

    served.run(main())


def test_sglang_real_adapters_hundred_syncs_leave_one_adapter_per_name(served: Served) -> None:
    async def main() -> None:
        adapter, old = make_adapter(served.model, 1), None
        for version in range(100, 200):
            await send(served.engine, Weights(adapter), version, "shared_memory")
            old = served.engine._adapters.get_served(None) if version == 100 else old
        with pytest.raises(EngineDiedError, match="its server does not have the adapter 'roll-"):
            await served.engine._run("old", engine_body("old"), old)
        (scores,) = await served.engine.logprobs([TEXT])
        np.testing.assert_allclose(scores, served.score(TEXT, adapter), atol=1e-5)

    served.run(main())


@pytest.mark.parametrize("targets", [["q_proj"], ["k_proj"], ["up_proj"], ["v_proj", "gate_proj"]], ids=str)
def test_sglang_real_adapters_of_some_parts_of_a_fused_layer(served: Served, targets: list[str]) -> None:
    """An engine of another run finds the server as the first one has left it, also with adapters of the same names."""

    async def main() -> None:
        lora = LORA.model_copy(update={"target_modules": targets})
        options = {"url": served.engine._url}
        spec = dataclasses.replace(served.engine._spec, engine_id="e1", lora=lora, options=options)
        adapter, other = make_adapter(served.model, 3, lora), make_adapter(served.model, 4)
        await send(served.engine, Weights(other), 200, "shared_memory")
        engine = SGLangEngine(spec)
        await engine.start()
        assert await engine._connection.list_models() == [str(served.model)]
        await send(engine, Weights(adapter), 1, "shared_memory")
        (scores,) = await engine.logprobs([TEXT])
        np.testing.assert_allclose(scores, served.score(TEXT, adapter, lora), atol=1e-5)
        await engine.close()
        await send(served.engine, Weights(other), 201, "shared_memory")
        (scores,) = await served.engine.logprobs([TEXT])
        np.testing.assert_allclose(scores, served.score(TEXT, other), atol=1e-5)

    served.run(main())
