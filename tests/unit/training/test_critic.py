"""A critic says the value of the state before each token, and learns it the same however its batch is cut."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critic_helpers import VALUE_LOSS, critic_spec, reference_gradient, run_critic_rank, valued
from safetensors.torch import load_file
from training_helpers import grads_of, logprobs_of, make_batch, make_spec, relative_error, values_of
from transformers import AutoModelForTokenClassification
from worlds.ranks import run_ranks
from worlds.tiny_model import write_tiny_model

from roll.algorithms.losses import PolicyLoss, ValueLoss
from roll.config.model import LoRAConfig
from roll.errors import CheckpointError, UnsupportedError
from roll.models import load_causal_lm
from roll.training import Schedule, TorchBackend
from roll.training.network.distributions import Predictions
from roll.training.network.loss_inputs import build_loss_inputs
from roll.training.packing.layout import build_layout
from roll.training.packing.micro_batches import pack
from roll.training.precision import Precision
from roll.types import TrainingBatch

DOUBLE = Precision.from_name("float64")
LAYOUTS: list[dict[str, Any]] = [
    {"share_prefix": True},
    {"share_prefix": False},
    {"share_prefix": True, "max_tokens_per_micro_batch": 45},
    {"share_prefix": True, "max_tokens_per_micro_batch": 24},  # groups are split
    {"share_prefix": False, "max_tokens_per_micro_batch": 1},  # every sample alone
    {"share_prefix": True, "activation_checkpointing": True},
]


def set_head(backend: TorchBackend, seed: int = 0) -> tuple[torch.Tensor, float]:
    """Give a critic of one rank a random head; returns its weight [H] and bias."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(1, 32, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        backend.masters.get_full("score.weight").copy_(weight)
        backend.masters.get_full("score.bias").fill_(0.25)
    backend.masters.refresh()
    return weight[0], 0.25


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("settings", LAYOUTS[:5], ids=str)
def test_critic_values_are_the_head_on_the_models_own_hidden_states(
    tmp_path: Path, settings: dict[str, Any], tied: bool
) -> None:
    path = write_tiny_model(tmp_path / "model", tied=tied, seed=4)
    batch = make_batch(1)
    backend = TorchBackend(critic_spec(path, **settings), precision=DOUBLE)
    weight, bias = set_head(backend)
    model = load_causal_lm(path, torch.float64, attention="sdpa")  # the eager softmax is one of float32
    assert max(float(np.abs(v).max()) for v in values_of(backend, batch)) > 1
    for found, sample in zip(values_of(backend, batch), batch.samples, strict=True):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
        expected = (hidden @ weight + bias).numpy()
        assert found.dtype == np.float32
        assert found.shape == sample.token_ids.shape
        assert not found[~sample.loss_mask].any()
        before = np.flatnonzero(sample.loss_mask) - 1  # V(s_t): everything before token t, and nothing of it
        np.testing.assert_allclose(found[sample.loss_mask], expected[before], rtol=1e-6, atol=1e-6)


def test_critic_a_value_does_not_see_the_token_that_it_comes_before(tiny_model: Path) -> None:
    backend = TorchBackend(critic_spec(tiny_model))
    set_head(backend)
    batch = make_batch(2, groups=1, group_size=1, response=(6, 7))
    (sample,) = batch.samples
    last = sample.token_ids.copy()
    last[-1] = last[-1] + 1 if last[-1] < 259 else 4
    changed = TrainingBatch(samples=(dataclasses.replace(sample, token_ids=last),))
    assert np.array_equal(values_of(backend, batch)[0], values_of(backend, changed)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_critic_a_fresh_head_says_zero(tiny_model: Path, dtype: str) -> None:
    backend = TorchBackend(critic_spec(tiny_model, dtype=dtype))
    assert not any(values.any() for values in values_of(backend, make_batch()))
    result = backend.train_step(valued(make_batch()), ValueLoss())
    assert result.metrics["value/mean"] == 0.0
    assert result.metrics["value/error"] == pytest.approx(result.metrics["value/return_squared"])
    assert any(values.any() for values in values_of(backend, make_batch()))


@pytest.mark.parametrize(("precision", "limit"), [(DOUBLE, 1e-9), (None, 1e-5)])
@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_critic_packing_sharing_and_micro_batches_do_not_change_loss_or_gradient(
    tiny_model: Path, settings: dict[str, Any], precision: Precision | None, limit: float
) -> None:
    batch = valued(make_batch(3))
    backend = TorchBackend(critic_spec(tiny_model, **settings), precision=precision)
    weight, bias = set_head(backend)
    loss, grads = reference_gradient(tiny_model, batch, weight, bias, clip=VALUE_LOSS.clip)
    result = backend.train_step(batch, VALUE_LOSS)
    assert 0 < result.metrics["value/clip_fraction"] < 1
    assert result.loss == pytest.approx(loss, rel=max(limit, 1e-6))
    assert relative_error(grads_of(backend), grads) <= max(limit, 1e-7)
    assert result.logprobs == ()


@pytest.fixture(scope="module", name="found")
def _found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What two ranks found, and where."""
    directory = tmp_path_factory.mktemp("critic ranks")
    one = TorchBackend(critic_spec(tiny_model))
    one.train_step(valued(make_batch(3)), VALUE_LOSS)
    one.save(directory / "saved by one")
    run_ranks(run_critic_rank, (directory, tiny_model), 2)
    first, second = (torch.load(directory / f"found-{rank}.pt", weights_only=False) for rank in (0, 1))
    for mine, twin in zip(first["values"], second["values"], strict=True):
        assert np.array_equal(mine, twin)
    return first, directory


@pytest.mark.slow
def test_critic_two_ranks_find_the_gradient_of_one(found: tuple[dict[str, Any], Path], tiny_model: Path) -> None:
    for name, precision, limit in (("float64", DOUBLE, 1e-7), ("float32", None, 1e-5)):
        one = TorchBackend(critic_spec(tiny_model), precision=precision)
        for seed in (3, 4):  # the second step has a head that is not 0
            result = one.train_step(valued(make_batch(seed)), VALUE_LOSS)
        assert found[0][name]["result"].loss == pytest.approx(result.loss, rel=max(limit, 1e-6))
        assert relative_error(found[0][name]["grads"], grads_of(one)) <= limit
        assert float(grads_of(one)["model.layers.0.mlp.up_proj.weight"].norm()) > 0


@pytest.mark.slow
def test_critic_values_of_two_ranks_are_those_of_one(found: tuple[dict[str, Any], Path], tiny_model: Path) -> None:
    one = TorchBackend(critic_spec(tiny_model))
    for seed in (3, 4):
        one.train_step(valued(make_batch(seed)), VALUE_LOSS)
    for mine, expected in zip(found[0]["values"], values_of(one, make_batch(5)), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-5)


@pytest.mark.slow
def test_critic_a_critics_checkpoint_loads_under_another_number_of_ranks(
    found: tuple[dict[str, Any], Path], tiny_model: Path
) -> None:
    results, directory = found
    one = TorchBackend(critic_spec(tiny_model))
    one.load(directory / "saved by two")
    for mine, expected in zip(values_of(one, make_batch(5)), results["values"], strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-6)
    exported = load_file(directory / "export" / "model.safetensors")
    assert exported.keys() == dict(one.weights()).keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in one.weights())
    one.load(directory / "saved by one")
    for mine, expected in zip(values_of(one, make_batch(5)), results["values after loading one"], strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_critic_two_steps_and_two_after_resuming_equal_four(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    spec = dataclasses.replace(
        critic_spec(tiny_model, dtype=dtype), schedule=Schedule(peak=1e-3, num_updates=6, shape="cosine")
    )
    batches = [valued(make_batch(seed)) for seed in range(4)]
    straight = TorchBackend(spec)
    expected = [straight.train_step(batch, VALUE_LOSS) for batch in batches]
    first, second = TorchBackend(spec), TorchBackend(spec)
    for batch in batches[:2]:
        first.train_step(batch, VALUE_LOSS)
    first.save(tmp_path / "critic-0")
    second.load(tmp_path / "critic-0")
    found = [second.train_step(batch, VALUE_LOSS) for batch in batches[2:]]
    assert [(r.loss, r.grad_norm, r.learning_rate) for r in found] == [
        (r.loss, r.grad_norm, r.learning_rate) for r in expected[2:]
    ]
    for name in straight.masters.parameters:
        assert torch.equal(second.masters.get_full(name), straight.masters.get_full(name)), name


def test_critic_a_policys_checkpoint_is_not_a_critics(tiny_model: Path, tmp_path: Path) -> None:
    TorchBackend(make_spec(tiny_model)).save(tmp_path / "trainer")
    with pytest.raises(CheckpointError, match=r"missing tensors .*score"):
        TorchBackend(critic_spec(tiny_model)).load(tmp_path / "trainer")


def test_critic_a_critic_learns_its_returns(tiny_model: Path) -> None:
    backend = TorchBackend(critic_spec(tiny_model, learning_rate=3e-3))
    batch = valued(make_batch(6, groups=2))
    errors = [backend.train_step(batch, ValueLoss()).metrics["value/error"] for _ in range(30)]
    assert errors[-1] < 0.1 * errors[0]


@pytest.mark.parametrize("tied", [True, False])
def test_critic_an_export_is_a_token_classifier_with_the_critics_values(tmp_path: Path, tied: bool) -> None:
    path = write_tiny_model(tmp_path / "model", tied=tied)
    backend = TorchBackend(critic_spec(path))
    batch = valued(make_batch(7))
    for _ in range(2):
        backend.train_step(batch, VALUE_LOSS)
    backend.export(tmp_path / "export")
    assert "lm_head.weight" not in load_file(tmp_path / "export" / "model.safetensors")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    assert type(model).__name__ == "LlamaForTokenClassification"
    for found, sample in zip(values_of(backend, batch), batch.samples, strict=True):
        with torch.no_grad():
            said = model(input_ids=torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0, :, 0].numpy()
        before = np.flatnonzero(sample.loss_mask) - 1
        np.testing.assert_allclose(found[sample.loss_mask], said[before], atol=1e-5)


def test_critic_the_vocabulary_projection_is_let_go(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "untied", tied=False)
    policy, critic = set(TorchBackend(make_spec(path)).masters.parameters), TorchBackend(critic_spec(path))
    assert policy - set(critic.masters.parameters) == {"lm_head.weight"}
    assert set(critic.masters.parameters) - policy == {"score.weight", "score.bias"}
    assert not any(p.shape[0] == 260 for n, p in critic.network.named_parameters() if "embed" not in n)


def test_critic_with_adapters_a_critic_trains_them_and_its_head(tiny_model: Path) -> None:
    backend = TorchBackend(critic_spec(tiny_model, lora=LoRAConfig(rank=2)))
    assert all("lora_" in n or n.startswith("score.") for n in backend.masters.parameters)
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    batch = valued(make_batch(8))
    errors = [backend.train_step(batch, ValueLoss()).metrics["value/error"] for _ in range(4)]
    assert errors[-1] < errors[0]
    after = dict(backend.weights())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "score.weight" in changed
    assert "model.layers.0.self_attn.q_proj.weight" in changed
    assert "model.embed_tokens.weight" not in changed


def test_critic_learning_rate_and_optimiser_are_the_critics_own(tiny_model: Path) -> None:
    spec = dataclasses.replace(
        critic_spec(tiny_model, learning_rate=1.0), schedule=Schedule(peak=2e-3, num_updates=4, shape="linear")
    )
    backend = TorchBackend(spec)
    rates = [backend.train_step(valued(make_batch()), VALUE_LOSS).learning_rate for _ in range(4)]
    assert rates == pytest.approx([2e-3, 1.5e-3, 1e-3, 5e-4])


def test_critic_each_role_refuses_what_it_does_not_have(tiny_model: Path) -> None:
    batch = valued(make_batch())
    critic, policy = TorchBackend(critic_spec(tiny_model)), TorchBackend(make_spec(tiny_model))
    with pytest.raises(UnsupportedError, match="role 'critic' does not compute logprobs"):
        logprobs_of(critic, batch)
    with pytest.raises(UnsupportedError, match="role 'policy' does not compute values: use a critic"):
        values_of(policy, batch)
    with pytest.raises(ValueError, match="this loss requires returns"):
        critic.train_step(make_batch(), VALUE_LOSS)
    with pytest.raises(ValueError, match="this loss requires values"):
        policy.train_step(batch, VALUE_LOSS)


def test_critic_some_samples_without_targets_are_refused(tiny_model: Path) -> None:
    batch = valued(make_batch())
    critic = TorchBackend(critic_spec(tiny_model))
    for name, message in (
        ("returns", "`returns` must be set for all samples"),
        ("old_values", "`old"),
    ):
        first = dataclasses.replace(batch.samples[0], **{name: None})
        mixed = dataclasses.replace(batch, samples=(first, *batch.samples[1:]))
        with pytest.raises(ValueError, match=message):
            critic.train_step(mixed, VALUE_LOSS)


def test_critic_every_array_of_a_sample_reaches_its_tokens_in_the_loss() -> None:
    """Arrays that spell their own place: sample + position / 1000."""
    batch = valued(make_batch(9, groups=2, group_size=3))
    marked = []
    for index, sample in enumerate(batch.samples):
        place = (index + np.arange(len(sample)) / 1000).astype(np.float32)
        turns = np.where(sample.loss_mask, np.arange(len(sample)) // 4 + 5, -1).astype(np.int32)
        marked.append(
            dataclasses.replace(
                sample,
                returns=place,
                old_values=place + 10,
                advantages=place + 20,
                rollout_logprobs=place - 30,
                chunk_ids=turns,
                entropy_mask=np.arange(len(sample)) % 2 == 0,
                expert=index == 2,
            )
        )
    batch = dataclasses.replace(batch, samples=tuple(marked))
    ((blocks,),) = pack(batch.samples, max_tokens=4096)
    layout = build_layout(blocks)
    predicted = torch.from_numpy(layout.token_ids[layout.rows]).double()  # as if a state's value were its last token
    inputs = build_loss_inputs(layout, batch, Predictions(values=predicted), batch.counts)
    order = [(span.index, int(token)) for span in layout.spans for token in span.token_index]
    assert sorted(order) == [
        (i, int(t)) for i, s in enumerate(batch.samples) for t in np.flatnonzero(s.loss_mask) if t > 0
    ]
    place = torch.tensor([np.float32(i + t / 1000) for i, t in order], dtype=torch.float64)
    assert inputs.returns is not None and inputs.old_values is not None and inputs.chunk_ids is not None
    assert inputs.expert is not None and inputs.entropy_mask is not None and inputs.values is not None
    torch.testing.assert_close(inputs.returns, place, atol=0, rtol=0)
    torch.testing.assert_close(inputs.old_values, place + 10, atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs.advantages, place + 20, atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs.rollout_logprobs, place - 30, atol=1e-5, rtol=0)
    assert inputs.logprobs is None and inputs.old_logprobs is None
    assert inputs.entropy_mask.tolist() == [t % 2 == 0 for _, t in order]
    assert inputs.expert.tolist() == [i == 2 for i, _ in order]
    chunks = [(i, t // 4) for i, t in order]
    numbered = {chunk: number for number, chunk in enumerate(dict.fromkeys(chunks))}
    assert inputs.chunk_ids.tolist() == [numbered[chunk] for chunk in chunks]
    assert inputs.values.tolist() == [float(batch.samples[i].token_ids[t - 1]) for i, t in order]
    plain = build_loss_inputs(layout, batch, Predictions(logprobs=predicted), batch.counts)
    assert plain.values is None and plain.returns is None and plain.old_values is None


def test_critic_a_step_of_a_critic_whose_loss_is_not_finite_changes_nothing(tiny_model: Path) -> None:
    backend = TorchBackend(critic_spec(tiny_model))
    batch = valued(make_batch())
    endless = tuple(dataclasses.replace(s, returns=s.returns + np.inf) for s in batch.samples if s.returns is not None)
    result = backend.train_step(dataclasses.replace(batch, samples=endless), ValueLoss())
    assert not result.stepped
    assert not any(values.any() for values in values_of(backend, batch))


def test_critic_a_policys_loss_is_no_critics(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="requires logprobs"):
        TorchBackend(critic_spec(tiny_model)).train_step(valued(make_batch()), PolicyLoss())
