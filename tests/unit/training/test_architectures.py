"""Every family of models: packed texts get what each gets alone, and weights travel under the checkpoint's names."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from families import FAMILIES, Family, write_model
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from training_helpers import branching_batch, grads_of, make_batch, make_spec, relative_error

from roll.algorithms.losses import PolicyLoss
from roll.errors import ModelError
from roll.inference import EngineSpec
from roll.inference.hf import HFEngine
from roll.models import load_causal_lm, mixers
from roll.protocols import WeightSource
from roll.training import TorchBackend
from roll.training.attention.packed import register_attention
from roll.training.network import packing_check
from roll.training.network.policy import PolicyNetwork
from roll.training.packing import blocks
from roll.training.precision import Precision
from roll.types import (
    Generation,
    GenerationRequest,
    LossInputs,
    LossOutputs,
    LossRequirements,
    SamplingParams,
    TrainingBatch,
    TrainingSample,
    WeightUpdate,
)
from roll.weights import Sender, send_weights

FAST = ("gemma2", "granite", "gpt-oss", "deepseek-v3")
FLOAT64 = Precision(compute=torch.float64, master=torch.float64)
families = pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)


class InFull(TorchFunctionMode):
    """HF's norms, attention and routers compute in float32 whatever they are given; here float64 stays float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        double = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if double and func is torch.Tensor.float:
            return args[0]
        if double and torch.float32 in (*args[1:], *kwargs.values()):
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        if double and func is torch._grouped_mm:
            starts = [0, *kwargs["offs"].tolist()]
            return torch.cat([args[0][a:b] @ w for a, b, w in zip(starts, starts[1:], args[1], strict=False)])
        return func(*args, **kwargs)


class WeightedLogprobs:
    """A loss of which nothing is rounded: log-probs times advantages. Remembers what it saw."""

    needs = LossRequirements()

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        assert inputs.logprobs is not None and inputs.advantages is not None
        self.seen.append(inputs.logprobs.detach())
        return LossOutputs(loss=-(inputs.logprobs * inputs.advantages).sum(), metrics={}, maxima={})


def separate_logprobs(model: torch.nn.Module, batch: TrainingBatch) -> list[torch.Tensor]:
    """Every sample by itself, through the model as it is."""
    found = []
    for sample in batch.samples:
        ids = torch.from_numpy(sample.token_ids.astype("int64"))[None]
        table = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1] / batch.temperature, dim=-1)
        own = table.gather(1, ids[0, 1:, None])[:, 0]
        found.append(torch.cat([own.new_zeros(1), own]))
    return found


def make_trees() -> TrainingBatch:
    """Every sample is a sequence of its own; some begin as others go on."""
    batch = branching_batch(3, units=2, size=5, grown=(2, 14))
    return replace(batch, samples=tuple(replace(s, sequence="") for s in batch.samples))


@families
def test_trainer_architecture_packed_texts_get_the_log_probs_and_gradient_that_each_gets_alone(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    path = write_model(tmp_path / name, tiny_model, FAMILIES[name])
    batch, loss = make_trees(), WeightedLogprobs()
    assert max(map(len, batch.samples)) > 12  # longer than the windows
    with InFull():
        model = load_causal_lm(path, torch.float64, attention="eager")
        alone = separate_logprobs(model, batch)
        masks = [torch.from_numpy(s.loss_mask) for s in batch.samples]
        weights = [torch.from_numpy(s.advantages).double() for s in batch.samples]
        (-sum((own * w)[mask].sum() for own, w, mask in zip(alone, weights, masks, strict=True))).backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        backend = TorchBackend(make_spec(path), precision=FLOAT64)
        with mock.patch.object(blocks, "MIN_SHARED_TOKENS", 3):
            backend.train_step(batch, loss)
    expected = torch.cat([own.detach()[mask] for own, mask in zip(alone, masks, strict=True)])
    found = torch.cat(loss.seen)
    assert float((found.sort().values - expected.sort().values).abs().max()) <= 1e-9
    own_grads = {n: g for n, g in grads_of(backend).items() if n in grads}
    assert relative_error(own_grads, grads) <= 1e-9


def test_trainer_architecture_a_text_that_would_change_the_rotation_of_others_is_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Beyond 16 tokens transformers turns a whole row by other frequencies, whatever else is in it."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    settings = {"rope_parameters": rope, "original_max_position_embeddings": 16}
    path = write_model(tmp_path / "phi3", tiny_model, Family(config="Phi3", settings=settings))
    backend, (text,) = TorchBackend(make_spec(path)), make_batch(groups=1, group_size=1, prompt=(20, 21)).samples

    def cut(length: int) -> TrainingBatch:
        ends = np.arange(length) == length - 1
        own = replace(
            text,
            token_ids=text.token_ids[:length],
            loss_mask=ends,
            advantages=ends.astype(np.float32),
            prefix_length=4,
            rollout_logprobs=None,
        )
        return TrainingBatch(samples=(own,))

    alone = separate_logprobs(load_causal_lm(path, torch.float32, attention="eager"), cut(16))[0]
    found = backend.forward(cut(16), ["logprobs"])["logprobs"][0]
    torch.testing.assert_close(torch.from_numpy(found), alone.detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ModelError, match="train on sequences of at most 16 tokens"):
        backend.forward(cut(18), ["logprobs"])


@families
def test_trainer_architecture_weights_have_the_checkpoint_s_names_and_an_export_says_the_same(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    path = write_model(tmp_path / name, tiny_model, FAMILIES[name])
    backend = TorchBackend(make_spec(path))
    saved = load_file(path / "model.safetensors")
    streamed = dict(backend.weights())
    assert list(streamed) == list(backend.weights().names())
    assert {n: t.shape for n, t in streamed.items()} == {n: t.shape for n, t in saved.items()}
    for weight, tensor in streamed.items():
        assert torch.equal(tensor, saved[weight]), weight
    batch = make_trees()
    backend.train_step(batch, PolicyLoss())
    expected = backend.forward(batch, ["logprobs"])["logprobs"]
    backend.export(tmp_path / "exported")
    again = separate_logprobs(load_causal_lm(tmp_path / "exported", torch.float32, attention="eager"), batch)
    for own, alone in zip(expected, again, strict=True):
        torch.testing.assert_close(torch.from_numpy(own), alone.detach(), rtol=2e-4, atol=2e-4)


@pytest.fixture
def llama(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model as the trainer loads it, tried anew."""
    monkeypatch.setattr(packing_check, "_passed_checks", set())
    monkeypatch.setattr(mixers, "_cached_mixers", {})
    return load_causal_lm(tiny_model, torch.float32, attention=register_attention())


def test_trainer_architecture_logits_that_are_changed_in_an_unknown_way_are_refused(llama: Any) -> None:
    llama.lm_head.register_forward_hook(lambda module, args, output: output.tanh())
    packing_check.make_packable(llama)
    with pytest.raises(ModelError, match="logits are changed"):
        PolicyNetwork(llama)


def test_trainer_architecture_a_state_that_passes_from_text_to_text_is_refused(llama: Any) -> None:
    llama.model.embed_tokens.register_forward_hook(lambda module, args, output: output.cumsum(1))
    packing_check.make_packable(llama)
    with pytest.raises(ModelError, match="a packed sequence depends on the one before it"):
        PolicyNetwork(llama)


def test_trainer_architecture_attention_with_an_unknown_term_is_refused(llama: Any) -> None:
    forward = llama.model.layers[0].self_attn.forward
    eager = lambda: llama.config._attn_implementation == "eager"  # noqa: E731
    llama.model.layers[0].self_attn.forward = lambda *a, **k: tuple(
        x if x is None else x * (2 if eager() else 1) for x in forward(*a, **k)
    )
    packing_check.make_packable(llama)
    with pytest.raises(ModelError, match="needs features that the trainer's packed attention does not support"):
        PolicyNetwork(llama)


def test_trainer_architecture_attention_of_a_model_s_own_is_computed_text_by_text(llama: Any) -> None:
    """It never calls the registered attention: a layer like any other that carries a state."""
    attention = llama.model.layers[1].self_attn

    def own(hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        return attention.o_proj(attention.v_proj(hidden_states).cumsum(1).repeat(1, 1, 2)), None

    attention.forward = own
    packing_check.make_packable(llama)
    PolicyNetwork(llama)


@families
def test_trainer_architecture_the_engine_takes_the_trainer_s_weights_and_finds_their_log_probs(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    path = write_model(tmp_path / name, tiny_model, FAMILIES[name])
    backend = TorchBackend(make_spec(path, learning_rate=1e-2))
    backend.train_step(make_trees(), PolicyLoss())
    generations = asyncio.run(rollouts(path, backend.weights()))
    samples = [
        TrainingSample(
            sample_id=str(i),
            unit=0,
            token_ids=np.concatenate([prompt, generation.token_ids]),
            loss_mask=np.arange(len(prompt) + len(generation.token_ids)) >= len(prompt),
        )
        for i, (prompt, generation) in enumerate(generations)
    ]
    found = backend.forward(TrainingBatch(samples=tuple(samples), temperature=1.0), ["logprobs"])["logprobs"]
    for own, (prompt, generation) in zip(found, generations, strict=True):
        np.testing.assert_allclose(own[len(prompt) :], generation.logprobs, atol=2e-4)


async def rollouts(path: Path, weights: WeightSource) -> list[tuple[np.ndarray, Generation]]:
    """Prompts and what the `hf` engine wrote after them with new weights."""
    spec = EngineSpec(
        engine_id="e", kind="hf", model_path=str(path), dtype="float32", max_context=64, max_num_seqs=4, num_threads=1
    )
    engine, sender = HFEngine(spec), Sender()
    await engine.start()
    try:

        async def deliver(update: WeightUpdate) -> None:
            await engine.update_weights(update)

        await send_weights(weights, 1, "in_process", deliver, sender=sender)
        prompts = [np.random.default_rng(i).integers(4, 260, 3 + 4 * i).astype(np.int32) for i in range(3)]
        sampling = SamplingParams(max_new_tokens=12, temperature=1.0, seed=1)
        requests = [GenerationRequest(request_id=str(i), token_ids=p, sampling=sampling) for i, p in enumerate(prompts)]
        answers = await asyncio.gather(*map(engine.generate, requests))
        return list(zip(prompts, answers, strict=True))
    finally:
        sender.close()
        await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_trainer_architecture_no_family_is_refused_in_bfloat16(tiny_model: Path, tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / name, tiny_model, FAMILIES[name])
    backend = TorchBackend(make_spec(path, dtype="bfloat16"))
    assert 0 < backend.train_step(make_trees(), PolicyLoss()).grad_norm < 1e3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_trainer_architecture_weights_that_are_no_numbers_are_refused(
    tiny_model: Path, tmp_path: Path, number: float, dtype: str
) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.0.input_layernorm.weight"].fill_(number)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    refused = pytest.raises(ModelError, match=r"weight .* has NaN or infinite values, so the model cannot be used")
    with mock.patch.object(packing_check, "_passed_checks", set()), refused:
        TorchBackend(make_spec(copy, dtype=dtype))
