"""The vllm engine's parts that need no vLLM process."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from roll.errors import ConfigError, DataError, InfraError, ModelError, WeightSyncError
from roll.inference import EngineSpec, build_engine, resolve_engine_kind
from roll.inference.manifests import check_manifest, read_checkpoint_shapes
from roll.inference.request_checks import check_length, check_tokens
from roll.inference.vllm import VLLMEngine
from roll.inference.vllm.arguments import build_engine_arguments
from roll.inference.vllm.child import LogStream
from roll.inference.vllm.conversion import to_generation
from roll.inference.vllm.direct import DirectLoader, TensorPlacement
from roll.inference.vllm.environment import prepare_environment
from roll.inference.vllm.launch import VLLMServer, _build_start_error
from roll.inference.vllm.stats import StatsCollector
from roll.inference.vllm.worker import check_weights_applied
from roll.types import GenerationRequest, SamplingParams, TensorSpec, WeightUpdate

SPEC = EngineSpec(engine_id="e", kind="vllm", model_path="/model", max_context=100, max_num_seqs=8, seed=3)


def request(num_prompt: int, max_new_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id="r", token_ids=np.ones(num_prompt, np.int32), sampling=SamplingParams(max_new_tokens=max_new_tokens)
    )


LOG_VARIABLE = """\
ValueError: of an earlier start
INFO 11-22 EngineCore pid=1 waits
(EngineCore pid=2) ERROR 11-22 [core.py:1] EngineCore encountered a fatal error.
(EngineCore pid=2) ERROR 11-22 [core.py:1] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-22 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
(EngineCore pid=2) ERROR 11-22 [async_llm.py:1] AsyncLLM output_handler failed.
(EngineCore pid=2) ERROR 11-22 vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
INFO 11-22 shutting down
"""


@pytest.mark.parametrize(("options", "said"), [({}, "'no_such'"), ({"a": 1, "b": 2}, "(inference.options sets a, b)")])
def test_vllm_what_vllm_refuses_names_the_options_that_the_user_set(
    tmp_path: Path, options: dict[str, int], said: str
) -> None:
    log = tmp_path / "engine.log"
    log.write_text("ValueError: no place for 'no_such'\n")
    spec = replace(SPEC, options=options, log_path=log)
    error = _build_start_error(spec, 0, RuntimeError("the child ended"))
    assert isinstance(error, ModelError) and str(error).endswith(f"{said} (see {log})")


def test_vllm_a_dead_engine_is_explained_by_its_root_cause_and_not_by_the_logs_end(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text(LOG_VARIABLE)
    spec = replace(SPEC, log_path=log)
    model = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 8))
    started = VLLMServer(spec, model, cpu=True, stats=StatsCollector(), log_size=LOG_VARIABLE.index("INFO"))
    said = started.find_cause_of_death()
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" in said
    assert str(log) in said and "EngineDeadError" not in said
    log.write_text(LOG_VARIABLE[: LOG_VARIABLE.index("(Engine")])
    assert VLLMServer(
        spec, model, cpu=True, stats=StatsCollector(), log_size=LOG_VARIABLE.index("INFO")
    ).find_cause_of_death() == (f"vLLM stopped serving (see {log})")


def test_vllm_an_engine_spec_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(SPEC)) == SPEC


def test_vllm_choosing_an_engine_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from roll.inference import resolve_engine_kind\n"
        "assert resolve_engine_kind('auto') in ('vllm', 'hf')\n"
        "import roll.inference.vllm; assert not {'vllm', 'ray', 'transformers', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": "src"}, timeout=60)


def test_vllm_a_misspelt_engine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'vllm'"):
        resolve_engine_kind("vlm")
    with pytest.raises(ConfigError, match="Did you mean 'vllm'"):
        build_engine(EngineSpec(engine_id="e", kind="vlm", model_path="/model", max_context=1))


def test_vllm_a_cpu_engine_never_chunks_a_prefill_and_fits_any_prompt_into_one_step() -> None:
    long = EngineSpec(engine_id="e", kind="vllm", model_path="/model", max_context=9000)
    arguments = build_engine_arguments(long, cpu=True)
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] >= arguments["max_model_len"] == 9001
    assert arguments["kv_cache_memory_bytes"] == 256 * 2**20
    assert arguments["distributed_executor_backend"] == "uni"


def test_vllm_an_engine_on_a_device_takes_its_own_share_and_sleeps_only_where_it_is_to() -> None:
    alone = build_engine_arguments(SPEC, cpu=False)
    assert alone["kv_cache_memory_bytes"] is None and alone["enable_sleep_mode"] is False
    assert "enforce_eager" not in alone and "enable_chunked_prefill" not in alone
    shared = EngineSpec(engine_id="e", kind="vllm", model_path="/model", max_context=1, sleeps=True)
    assert build_engine_arguments(shared, cpu=False)["enable_sleep_mode"] is True


class Client:
    """vLLM's, of an engine on a device: does as it is told."""

    errored = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **keys: Any) -> Any:
            self.told.append(name)
            return [{"checksums": {"w": 1}}] if name == "collective_rpc" else None

        return call

    async def generate(self, *args: Any, **keys: Any) -> AsyncIterator[Any]:
        raise RuntimeError("asked")
        yield


async def test_vllm_an_engine_that_slept_answers_only_after_a_weight_sync() -> None:
    engine, client = VLLMEngine(replace(SPEC, sleeps=True)), Client()
    stats = SimpleNamespace(steps=SimpleNamespace(begin=lambda: None))
    engine._launch = SimpleNamespace(llm=client, cpu=False, stats=stats, vocab_size=9)  # type: ignore[assignment]
    update = WeightUpdate(policy_version=3, manifest=(), transport="shared_memory", handle=None)
    await engine.sleep()
    await engine.sleep()
    assert client.told == ["sleep"]
    with pytest.raises(WeightSyncError, match=r"is asleep: call wake\(\)"):
        await engine.update_weights(update)
    await engine.wake()
    with pytest.raises(WeightSyncError, match="lost its weights while asleep: run a weight sync first"):
        await engine.generate(request(2, 3))
    assert (await engine.update_weights(update)).checksums == {"w": 1}
    with pytest.raises(InfraError, match="asked"):
        await engine.generate(request(2, 3))


def test_vllm_the_users_engine_options_win() -> None:
    spec = EngineSpec(engine_id="e", kind="vllm", model_path="/model", max_context=1, options={"block_size": 64})
    assert build_engine_arguments(spec, cpu=True)["block_size"] == 64


@given(prompt=st.integers(1, 120), answer=st.integers(-3, 120))
def test_vllm_a_request_is_refused_exactly_if_it_could_not_finish(prompt: int, answer: int) -> None:
    if answer >= 1 and prompt + answer <= 100:
        check_length(request(prompt, answer), 100)
    else:
        with pytest.raises(DataError, match="request r"):
            check_length(request(prompt, answer), 100)


@pytest.mark.parametrize(
    ("tokens", "message"), [([], "no tokens"), ([0, -1], "-1"), ([3, 10], "10"), ([10**6], "1000000")]
)
def test_vllm_tokens_outside_the_vocabulary_are_refused(tokens: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_tokens("prompt", np.array(tokens, np.int32), vocab_size=10)
    check_tokens("prompt", np.array([0, 9], np.int32), vocab_size=10)


def specs(shapes: dict[str, tuple[int, ...]]) -> list[TensorSpec]:
    return [TensorSpec(name=name, shape=shape, dtype="float32") for name, shape in shapes.items()]


CHECKPOINT = {"embed.weight": (8, 4), "lm_head.weight": (8, 4), "layer.weight": (4, 4), "rotary_emb.inv_freq": (2,)}


@pytest.mark.parametrize("tied", [False, True])
def test_vllm_a_manifest_lacks_what_the_engine_derives_and_nothing_else(tied: bool) -> None:
    accepted, refused = set(), set()
    for name in CHECKPOINT:
        shapes = {other: shape for other, shape in CHECKPOINT.items() if other != name}
        try:
            check_manifest(specs(shapes), CHECKPOINT, tied=tied, policy_version=4)
            accepted.add(name)
        except WeightSyncError as error:
            assert f"policy version 4: tensor '{name}' is missing" in str(error)
            refused.add(name)
    derived = {"rotary_emb.inv_freq", "lm_head.weight"} if tied else {"rotary_emb.inv_freq"}
    assert (accepted, refused) == (derived, CHECKPOINT.keys() - derived)


def test_vllm_an_unknown_tensor_and_another_shape_are_named() -> None:
    with pytest.raises(WeightSyncError, match=r"'other.weight' does not exist"):
        check_manifest(specs(CHECKPOINT | {"other.weight": (1,)}), CHECKPOINT, tied=False, policy_version=1)
    with pytest.raises(WeightSyncError, match=r"'layer.weight' must have shape \(4, 4\), got \(4, 5\)"):
        check_manifest(specs(CHECKPOINT | {"layer.weight": (4, 5)}), CHECKPOINT, tied=False, policy_version=1)


def test_vllm_shapes_are_read_from_all_files_of_a_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "model-00002-of-00002.safetensors")
    assert read_checkpoint_shapes(tmp_path) == {"a": (2, 3), "b": (4,)}
    assert read_checkpoint_shapes(tmp_path / "nowhere") is None


def test_vllm_a_tensor_that_arrived_but_was_not_applied_is_named() -> None:
    model = torch.nn.ModuleDict({"norm": torch.nn.RMSNorm(4), "embed": torch.nn.Embedding(6, 4)})
    plain = dict(model.named_parameters())
    padded = {"norm.weight": plain["norm.weight"].data.clone(), "embed.weight": plain["embed.weight"].data[:5].clone()}
    check_weights_applied(model, set(plain), plain, padded, 2)
    with pytest.raises(WeightSyncError, match=r"'norm\.weight' was received, but the engine contains different values"):
        check_weights_applied(model, set(plain), plain, {"norm.weight": torch.full((4,), 2.0)}, 2)
    with pytest.raises(WeightSyncError, match=r"vLLM's 'embed\.weight' was not loaded \(1 such parameters\)"):
        check_weights_applied(model, {"norm.weight"}, plain, {}, 2)


class Layer(torch.nn.Module):
    """A vLLM layer that packs its weight and drops it."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, 2), requires_grad=False)
        self.packed: list[torch.Tensor] = []
        self.quant_method = self

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.packed.append(self.weight.detach().clone())


def test_vllm_a_fused_layer_is_packed_once_with_its_parts_in_order() -> None:
    layer, shapes = Layer(0), ((2, 2), (1, 2), (1, 2))
    load = DirectLoader({name: TensorPlacement(layer, "weight", i, shapes, True) for i, name in enumerate("qkv")})
    q, k, v = torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[5.0, 6]]), torch.tensor([[7.0, 8]])
    load.load_tensor("k", k)
    load.load_tensor("q", q)
    assert layer.packed == [] and load.finish() == {"q", "k", "v"}
    load.load_tensor("v", v)
    assert load.finish() == set()
    (packed,) = layer.packed
    assert packed.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_vllm_other_parameters_keep_their_place_and_their_padding() -> None:
    embedding, output = Layer(3), Layer(2)
    held = embedding.weight
    load = DirectLoader({
        "embed": TensorPlacement(embedding, "weight", 0, ((2, 2),), False),
        "head": TensorPlacement(output, "weight", 0, ((2, 2),), False, True),
    })  # fmt: skip
    load.load_tensor("embed", torch.ones(2, 2))
    load.load_tensor("head", 2 * torch.ones(2, 2))
    load.load_tensor("derived.inv_freq", torch.ones(5))
    assert embedding.weight is held and held.tolist() == [[1, 1], [1, 1], [0, 0]] and embedding.packed == []
    assert [packed.tolist() for packed in output.packed] == [[[2, 2], [2, 2]]]


def test_vllm_environment_variables_of_the_user_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    prepare_environment()
    prepare_environment()
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork" and os.environ["VLLM_NO_USAGE_STATS"] == "1"


def test_vllm_the_log_stream_appends_and_can_change_its_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old\n")
    stream = LogStream(tmp_path / "a")
    print("one", file=stream)
    stream.redirect(tmp_path / "b")
    print("two", file=stream)
    assert (tmp_path / "a").read_text() == "old\none\n" and (tmp_path / "b").read_text() == "two\n"


def finished(logprobs: list[float], num_tokens: int = 3) -> Any:
    """What vLLM says of a request that it ended."""
    flat = SimpleNamespace(logprobs=logprobs, start_indices=list(range(len(logprobs))))
    completion = SimpleNamespace(
        token_ids=[5] * num_tokens, finish_reason="stop", logprobs=flat, weight_versions=(), routed_experts=None
    )
    return SimpleNamespace(outputs=[completion])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_vllm_engine_log_probs_that_are_not_finite_are_an_infrastructure_error_that_names_the_engine(
    wrong: float,
) -> None:
    with pytest.raises(
        InfraError, match=rf"engine 'vllm-3' returned 1 of 3 .* request r \(the first is {wrong}, of token 1"
    ):
        to_generation(request(2, 3), finished([-1.0, wrong, -2.0]), "vllm-3")
    assert to_generation(request(2, 3), finished([-1.0, -80.0, 0.0]), "vllm-3").logprobs.tolist() == [-1.0, -80.0, 0.0]


def test_vllm_engine_log_probs_that_are_missing_are_an_infrastructure_error_that_names_the_engine() -> None:
    with pytest.raises(InfraError, match="engine 'vllm-3': vLLM returned 2 log-probs for the 3 tokens of request r"):
        to_generation(request(2, 3), finished([-1.0, -2.0]), "vllm-3")


async def test_vllm_whose_close_is_cancelled_ends_its_processes_all_the_same() -> None:
    ended: list[str] = []
    engine = VLLMEngine(SPEC)
    llm: Any = SimpleNamespace(abort=lambda ids: asyncio.sleep(60))
    engine._launch = SimpleNamespace(llm=llm, shutdown=lambda: ended.append("all"))  # type: ignore[assignment]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await engine.close()
    assert ended == ["all"]
