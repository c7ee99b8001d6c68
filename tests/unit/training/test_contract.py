"""Every train back-end does what `torch` does on one rank with whole batches; that one does what transformers does.

A back-end under test gets micro-batches of 30 tokens, on one rank or two, so groups are split and ranks share them.
Everything is in float32, and gradients must agree within 1e-5; what follows from several steps, within 2e-4.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import COURSE, Place, course, perform
from test_same_gradient import Reference, reference
from training_helpers import make_spec, relative_error
from worlds.ranks import run_ranks

from roll.config.deepspeed import DeepSpeedConfig
from roll.config.parallel import ParallelConfig
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.types import StepResult

pytestmark = pytest.mark.integration

TORCH, DEEPSPEED = "roll.training.backend:TorchBackend", "roll.training.deepspeed.backend:DeepSpeedBackend"
MEGATRON = "roll.training.megatron.backend:MegatronBackend"
CUT = {"max_tokens_per_micro_batch": 30}


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"backend": "deepspeed", "deepspeed": DeepSpeedConfig(zero_stage=stage, **settings)}  # type: ignore[arg-type]


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make setup DEEPSPEED=yes"
)
slow_deepspeed = (pytest.mark.slow, needs_deepspeed)
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="Megatron is not installed: make setup MEGATRON=yes"
)
slow_megatron = (pytest.mark.slow, needs_megatron)
MEGATRON_LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "megatron": (1, {}),
    "megatron on two data ranks": (2, {}),
    "megatron with tp 2": (2, {"tp": 2}),
    "megatron with pp 2": (2, {"pp": 2}),
    "megatron with cp 2": (2, {"cp": 2}),
}
"""By name, how many ranks, and what they divide."""


def divided(**sizes: int) -> dict[str, Any]:
    return {"backend": "megatron", "parallel": ParallelConfig(**sizes)}


BACKENDS = [
    pytest.param((TORCH, 1, {}), id="torch"),
    pytest.param((TORCH, 2, {}), id="torch on two ranks", marks=pytest.mark.slow),
    pytest.param((DEEPSPEED, 1, zero(2)), id="deepspeed", marks=slow_deepspeed),
    *(
        pytest.param((DEEPSPEED, 2, zero(stage)), id=f"ZeRO-{stage} on two ranks", marks=slow_deepspeed)
        for stage in range(4)
    ),
    pytest.param((DEEPSPEED, 2, zero(2, offload_optimizer=True)), id="ZeRO-2 with offload", marks=slow_deepspeed),
    pytest.param(
        (DEEPSPEED, 2, zero(3, offload_optimizer=True, offload_parameters=True)),
        id="ZeRO-3 with offload",
        marks=slow_deepspeed,
    ),
    *(
        pytest.param((MEGATRON, ranks, divided(**sizes)), id=name, marks=slow_megatron)
        for name, (ranks, sizes) in MEGATRON_LAYOUTS.items()
    ),
]


@pytest.fixture(scope="module", name="gradient")
def _gradient(tiny_model: Path) -> Reference:
    return reference(tiny_model, 0, torch.float32)


@pytest.fixture(scope="module", name="expected")
def _expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, gradient: Reference) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("expected")
    return _performed((TORCH, 1, {}), directory, tiny_model, gradient, {})[0]


@pytest.fixture(scope="module", name="ranks", params=BACKENDS)
def _ranks(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, gradient: Reference
) -> list[dict[str, Any]]:
    """What each rank found, with the directory that it wrote to."""
    return _performed(request.param, tmp_path_factory.mktemp("contract"), tiny_model, gradient, CUT)


@pytest.fixture(name="found")
def _found(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return ranks[0]


def _performed(
    backend: tuple[str, int, dict[str, Any]], directory: Path, model: Path, gradient: Reference, cut: dict[str, Any]
) -> list[dict[str, Any]]:
    one = TorchBackend(make_spec(model, **COURSE))
    course(one, (0,))
    one.save(directory / "by torch")
    name, num_ranks, settings = backend
    place = Place(model=model, directory=directory, off_policy=gradient.batch)
    arguments = (num_ranks, name, settings | cut, place)
    if num_ranks == 1:
        perform(0, *arguments)
    else:
        run_ranks(perform, arguments, num_ranks)
    found = [torch.load(directory / f"found-{rank}.pt", weights_only=False) for rank in range(num_ranks)]
    return [each | {"directory": directory} for each in found]


def same_steps(found: list[Any], expected: list[Any]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=2e-4, abs=2e-5)
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=2e-4)
        assert (mine.learning_rate, mine.stepped) == (other.learning_rate, other.stepped)
        assert mine.num_loss_tokens == other.num_loss_tokens
        assert mine.metrics == pytest.approx(other.metrics, rel=1e-3, abs=1e-4)
        assert mine.maxima == pytest.approx(other.maxima, rel=1e-3, abs=1e-4)
        same_arrays(mine.logprobs, other.logprobs)


def same_arrays(found: Any, expected: Any, limit: float = 2e-4) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(mine, other, atol=limit)


def same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=5e-5, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


def moved_by(gradient: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: -g / (g.abs() + 1) for name, g in gradient.items()}


@pytest.mark.parametrize("scenario", ["one_step", "checkpointed_step"])
def test_train_backend_loss_and_gradient_are_those_of_a_padded_pass_by_transformers(
    found: dict[str, Any], gradient: Reference, tiny_model: Path, scenario: str
) -> None:
    result, weights = found[scenario]["result"], found[scenario]["weights"]
    before = load_causal_lm(tiny_model, torch.float32).state_dict()
    moves = {name: weights[name] - before[name] for name in gradient.grads}
    assert abs(result.loss - gradient.loss) <= 1e-5 * result.metrics["policy/loss_scale"]
    assert relative_error(moves, moved_by(gradient.grads)) <= 1e-5
    norm = torch.stack([g.double().norm() for g in gradient.grads.values()]).norm()
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize(
    "scenario", ["several_steps", "little_work", "with_adapters", "critic", "reward_model", "divergence"]
)
def test_train_backend_steps_are_those_of_one_rank(
    found: dict[str, Any], expected: dict[str, Any], scenario: str
) -> None:
    """With decay, clipping, a schedule; a rank without work; adapters; other roles; a second model beside."""
    same_steps(found[scenario]["results"], expected[scenario]["results"])
    same_weights(found[scenario]["weights"], expected[scenario]["weights"])


def test_train_backend_forward_backward_adds_up_to_the_gradient_of_one_batch(
    found: dict[str, Any], expected: dict[str, Any]
) -> None:
    mine, step = found["accumulated"], expected["one_step"]
    if "raised" in mine:  # DeepSpeed
        assert "must know the last batch" in mine["raised"]
        return
    assert sum(r.loss for r in mine["results"]) == pytest.approx(step["result"].loss, rel=1e-5, abs=1e-6)
    assert sum(r.num_loss_tokens for r in mine["results"]) == step["result"].num_loss_tokens
    for update in mine["updates"]:
        assert update.stepped and update.learning_rate == step["result"].learning_rate
        assert update.grad_norm == pytest.approx(step["result"].grad_norm, rel=1e-5)
    for weights in mine["weights"]:
        same_weights(weights, step["weights"])


def test_train_backend_samples_that_fork_go_through_once(found: dict[str, Any], expected: dict[str, Any]) -> None:
    same_steps([found["branching"]["result"]], [expected["branching"]["result"]])
    same_weights(found["branching"]["weights"], expected["branching"]["weights"])


def test_train_backend_clipping_was_at_work(expected: dict[str, Any]) -> None:
    assert min(result.grad_norm for result in expected["several_steps"]["results"]) > COURSE["max_grad_norm"]


def test_train_backend_a_step_that_is_not_finite_changes_nothing(
    found: dict[str, Any], expected: dict[str, Any]
) -> None:
    mine, other = found["not_finite"], expected["not_finite"]
    assert mine["skipped"] == [False, False]
    assert mine["unchanged"] == [True, True]
    assert "2 consecutive steps" in mine["raised"]
    same_steps(mine["results"], other["results"])
    same_weights(mine["weights"], other["weights"])


def test_train_backend_adapters_are_merged_switched_off_and_exported(
    found: dict[str, Any], expected: dict[str, Any]
) -> None:
    mine, other = found["with_adapters"], expected["with_adapters"]
    for switch in (True, False):
        same_arrays(mine["logprobs"][switch], other["logprobs"][switch])
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(mine["logprobs"][True], mine["logprobs"][False], strict=True))
    assert mine["written"] == ["adapter", "model"]


def test_train_backend_questions_are_answered_and_change_nothing(
    found: dict[str, Any], expected: dict[str, Any]
) -> None:
    mine, other = found["asking"], expected["asking"]
    same_steps(*([r for r in side["results"] if isinstance(r, StepResult)] for side in (mine, other)))
    for a, b in zip(mine["results"], other["results"], strict=True):
        assert a.loss == pytest.approx(b.loss, rel=2e-4, abs=2e-5)
    same_weights(mine["weights"], other["weights"])
    for a, b in zip(mine["said"], other["said"], strict=True):
        for output in ("logprobs", "values"):
            same_arrays(a[output], b[output], 1e-3)
        for tops, others in zip(a["top_logprobs"], b["top_logprobs"], strict=True):
            np.testing.assert_allclose(tops.logprobs, others.logprobs, atol=1e-3)


def test_train_backend_a_critics_values_and_a_references_logprobs(
    found: dict[str, Any], expected: dict[str, Any]
) -> None:
    same_arrays(found["critic"]["values"], expected["critic"]["values"])
    same_arrays(found["frozen"]["logprobs"], expected["frozen"]["logprobs"])
    assert "role 'reference' does not support train_step" in found["frozen"]["raised"]


def test_train_backend_a_saved_trainer_goes_on_as_if_nothing_had_happened(
    found: dict[str, Any], expected: dict[str, Any]
) -> None:
    straight, resumed = found["state"]["straight"], found["state"]["resumed"]
    assert found["state"]["written"]
    for a, b in zip(straight["results"], resumed["results"], strict=True):
        assert (a.loss, a.grad_norm, a.learning_rate) == (b.loss, b.grad_norm, b.learning_rate)
    assert all(torch.equal(tensor, resumed["weights"][name]) for name, tensor in straight["weights"].items())
    same_steps(straight["results"], expected["state"]["straight"]["results"])


def test_train_backend_what_torch_saved_on_one_rank_is_loaded_and_torch_loads_what_was_saved(
    found: dict[str, Any], expected: dict[str, Any], tiny_model: Path
) -> None:
    same_steps(found["state"]["from torch"]["results"], expected["state"]["straight"]["results"])
    same_weights(found["state"]["from torch"]["weights"], expected["state"]["straight"]["weights"])
    one = TorchBackend(make_spec(tiny_model, **COURSE))
    one.load(found["directory"] / "saved")
    assert one.num_steps == 1
    same_steps(course(one, (1, 2)), expected["state"]["straight"]["results"])


def test_train_backend_an_export_holds_the_weights_of_the_stream(
    found: dict[str, Any], expected: dict[str, Any]
) -> None:
    exported = load_causal_lm(found["directory"] / "export", torch.float32).state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in found["export"]["weights"].items())
    same_steps(found["export"]["results"], expected["export"]["results"])


def test_train_backend_every_rank_returns_the_same_and_the_first_alone_gets_weights(
    ranks: list[dict[str, Any]],
) -> None:
    first, *others = ranks
    assert first["one_step"]["weights"]
    for other in others:
        assert not other["one_step"]["weights"]
        for a, b in zip(first["several_steps"]["results"], other["several_steps"]["results"], strict=True):
            assert (a.loss, a.grad_norm, a.metrics, a.num_tokens) == (b.loss, b.grad_norm, b.metrics, b.num_tokens)
