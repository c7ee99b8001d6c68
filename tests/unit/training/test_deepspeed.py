"""What is DeepSpeed's own: bfloat16 beside float32 masters, weights that are spread at stage 3, its refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, write_model
from training_helpers import logprobs_of, make_batch, make_spec, relative_error

from roll.algorithms.losses import PolicyLoss
from roll.config.deepspeed import DeepSpeedConfig
from roll.errors import CheckpointError, ModelError, UnsupportedError
from roll.training import TorchBackend
from roll.types import LossInputs

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make setup DEEPSPEED=yes")

from roll.training.deepspeed import initialize
from roll.training.deepspeed.backend import DeepSpeedBackend

pytestmark = pytest.mark.slow
SETTINGS = {"max_tokens_per_micro_batch": 30, "epsilon": 1.0, "learning_rate": 1.0}


def built(model: Path, stage: int, **settings: Any) -> DeepSpeedBackend:
    zero = DeepSpeedConfig(zero_stage=stage)  # type: ignore[arg-type]
    return DeepSpeedBackend(make_spec(model, backend="deepspeed", deepspeed=zero, **settings))


@pytest.fixture(autouse=True)
def _spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialize, "PERSISTENT_NUMEL", 50)  # else a tiny model's weights all stay whole


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_bfloat16_gradients_are_added_up_in_float32_and_move_float32_masters(
    tiny_model: Path, stage: int
) -> None:
    torch_backend = TorchBackend(make_spec(tiny_model, dtype="bfloat16", **SETTINGS))
    mine = built(tiny_model, stage, dtype="bfloat16", **SETTINGS)
    assert mine.full_weights is not None
    before = {name: mine.full_weights.read_full(name).clone() for name in mine.full_weights.parameters}
    expected, found = (backend.train_step(make_batch(7), PolicyLoss()) for backend in (torch_backend, mine))
    assert found.loss == pytest.approx(expected.loss, rel=1e-3)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
    masters = {name: mine.full_weights.read_full(name) for name in before}
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    moves = {name: masters[name] - before[name] for name in before}
    others = {name: torch_backend.masters.get_full(name) - before[name] for name in before}
    assert relative_error(moves, others) <= 1e-3
    for name, tensor in mine.weights():
        assert torch.equal(tensor, masters[name].bfloat16()), name


def test_deepspeed_stage_0_is_for_float32_alone(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match=r"zero_stage 0 supports only float32, got .* 'bfloat16'"):
        built(tiny_model, 0, dtype="bfloat16")


def test_deepspeed_at_stage_3_a_step_leaves_nothing_gathered_and_loading_is_seen(
    tiny_model: Path, tmp_path: Path
) -> None:
    """DeepSpeed may keep weights gathered after a forward pass, for the next one."""
    backend, batch = built(tiny_model, 3), make_batch(1)
    backend.save(tmp_path / "fresh")
    first = logprobs_of(backend, batch)
    backend.train_step(make_batch(), PolicyLoss())
    list(backend.weights())
    assert all(p.numel() == 0 for p in backend.network.parameters() if p.ds_numel > initialize.PERSISTENT_NUMEL)
    moved = logprobs_of(backend, batch)
    backend.load(tmp_path / "fresh")
    again = logprobs_of(backend, batch)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, moved, strict=True))


def test_deepspeed_a_loss_that_fails_halfway_is_told_apart_from_one_that_fails_at_once(tiny_model: Path) -> None:
    """DeepSpeed keeps gradients that no step took; what was drawn and saved is as before."""

    class FailsAt(PolicyLoss):
        def __call__(self, inputs: LossInputs) -> Any:
            if not calls:
                raise RuntimeError("a test breaks it")
            calls.pop()
            return super().__call__(inputs)

    backend, calls = built(tiny_model, 2, max_tokens_per_micro_batch=30), list[int]()
    with pytest.raises(RuntimeError, match="a test breaks it"):
        backend.train_step(make_batch(), FailsAt())
    assert backend.train_step(make_batch(), PolicyLoss()).stepped
    calls.append(1)
    with pytest.raises(RuntimeError, match="a test breaks it"):
        backend.train_step(make_batch(), FailsAt())
    with pytest.raises(UnsupportedError, match="resume from a checkpoint"):
        backend.train_step(make_batch(), PolicyLoss())


def test_deepspeed_a_checkpoint_of_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    critic = DeepSpeedBackend(dataclasses.replace(make_spec(tiny_model), role="critic"))
    critic.save(tmp_path / "critic")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        built(tiny_model, 2).load(tmp_path / "critic")
    with pytest.raises(CheckpointError, match="cannot be read"):
        built(tiny_model, 2).load(tmp_path / "nothing")


def test_deepspeed_a_mixture_of_experts_is_streamed_as_its_checkpoint_has_it(tiny_model: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path / "mixture", tiny_model, FAMILIES["deepseek-v3"])
    expected, found = dict(TorchBackend(make_spec(path)).weights()), dict(built(path, 2).weights())
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
