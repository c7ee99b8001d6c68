"""Experts are kept even by a loss over the whole batch, or by a bias that moves after every update."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, write_model
from parallel_ranks import DOUBLE
from test_architectures import InFull, WeightedLogprobs, make_trees
from training_helpers import grads_of, make_spec, relative_error
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from roll.config.parallel import ParallelConfig
from roll.config.training import TrainingConfig
from roll.errors import ModelError
from roll.models import check_experts, load_causal_lm
from roll.training import TorchBackend

COEFFICIENT = 0.5


def aux_loss_of_hf(path: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """`load_balancing_loss_func` of each layer by itself, mean over layers, of texts that nothing is shared between."""
    model: Any = load_causal_lm(path, torch.float32, attention="eager")
    by_text = []
    for sample in make_trees().samples:
        text = sample.token_ids[: np.flatnonzero(sample.loss_mask)[-1]].astype(np.int64)
        by_text.append(model(torch.from_numpy(text)[None], output_router_logits=True).router_logits)
    layers = [torch.cat(of_layer) for of_layer in zip(*by_text, strict=True)]
    config = model.config
    losses = [load_balancing_loss_func((x,), config.num_experts, config.num_experts_per_tok) for x in layers]
    loss: Any = COEFFICIENT * torch.stack(losses).mean()
    loss.backward()
    return float(loss.detach()), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def test_load_balancing_the_auxiliary_loss_is_that_of_transformers_whatever_is_packed_or_shared(
    tiny_model: Path, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "moe", tiny_model, FAMILIES["qwen3-moe"])
    expected, gradient = aux_loss_of_hf(path)
    found: dict[str, Any] = {}
    for name, settings in {
        "off": {},
        "packed": {"router_aux_loss": COEFFICIENT},
        "apart": {"router_aux_loss": COEFFICIENT, "share_prefix": False, "max_tokens_per_micro_batch": 20},
    }.items():
        with InFull():
            backend = TorchBackend(make_spec(path, **settings), precision=DOUBLE)
            result = backend.train_step(make_trees(), WeightedLogprobs())
        found[name] = result, grads_of(backend)
    (off, plain), (packed, own), (apart, other) = found.values()
    assert packed.metrics["experts/aux_loss"] == pytest.approx(expected, rel=1e-5)
    assert packed.loss - off.loss == pytest.approx(expected, rel=1e-4)
    added = {name: own[name] - plain[name] for name in gradient}
    assert relative_error(added, gradient) <= 1e-4
    assert relative_error(own, other) <= 1e-9
    assert packed.metrics == pytest.approx(apart.metrics, rel=1e-6)
    assert "experts/aux_loss" not in off.metrics


def test_load_balancing_biases_move_towards_an_even_choice_and_are_saved_and_sent(
    tiny_model: Path, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "moe", tiny_model, FAMILIES["deepseek-v3"])
    spec = make_spec(path, router_bias_rate=0.01)
    backend = TorchBackend(spec)
    before = [bias.clone() for bias in backend.network.routing.biases]
    backend.train_step(make_trees(), WeightedLogprobs())
    counts = backend.network.routing._totals
    for bias, was, chosen in zip(backend.network.routing.biases, before, counts, strict=True):
        assert len(set(chosen)) > 1
        moved = 0.01 * torch.from_numpy(np.sign(chosen.mean() - chosen)).float()
        torch.testing.assert_close(bias - was, moved)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(dict(backend.weights())[name], backend.network.routing.biases[0])
    backend.save(tmp_path / "saved")
    unmoved = TorchBackend(dataclasses.replace(spec, training=make_spec(path).training))
    unmoved.load(tmp_path / "saved")
    assert torch.equal(unmoved.network.routing.biases[0], backend.network.routing.biases[0])
    result = unmoved.train_step(make_trees(), WeightedLogprobs())
    assert torch.equal(unmoved.network.routing.biases[0], backend.network.routing.biases[0])
    assert result.metrics["experts/bias_range"] == pytest.approx(
        float(np.ptp(backend.network.routing.biases[0].numpy()))
    )


def test_load_balancing_what_cannot_be_divided_or_kept_even_says_so(tiny_model: Path, tmp_path: Path) -> None:
    moe = write_model(tmp_path / "moe", tiny_model, FAMILIES["qwen3-moe"])
    check_experts(moe, 2)
    for path, reason in ((moe, "has 4 experts, which is not a multiple"), (tiny_model, "is not a mixture of experts")):
        with pytest.raises(ModelError, match=reason):
            check_experts(path, 3)
    with pytest.raises(ValueError, match="deepspeed back-end does not support training"):
        TrainingConfig(num_steps=1, backend="deepspeed", parallel=ParallelConfig(ep=2))
    assert ParallelConfig(tp=2, ep=4).find_layout_problem(8) is None
    assert "must be a multiple of 4" in str(ParallelConfig(tp=2, ep=4).find_layout_problem(6))
    for name, setting, reason in (
        ("deepseek-v3", {"router_aux_loss": 0.1}, "router_aux_loss_coef"),
        ("qwen3-moe", {"router_bias_rate": 0.1}, "e_score_correction_bias"),
        ("llama3", {"router_aux_loss": 0.1}, "not a mixture of experts"),
    ):
        path = write_model(tmp_path / name, tiny_model, FAMILIES[name])
        with pytest.raises(ModelError, match=reason):
            TorchBackend(make_spec(path, **setting))
    with pytest.raises(ValueError, match="does not support load balancing of experts"):
        TrainingConfig(num_steps=1, backend="deepspeed", router_aux_loss=0.1)


def test_load_balancing_biases_are_those_of_the_routers_also_after_the_network_was_moved(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A module that goes to another device has new buffers there."""
    path = write_model(tmp_path / "moe", tiny_model, FAMILIES["deepseek-v3"])
    backend = TorchBackend(make_spec(path, router_bias_rate=0.01))
    backend.network._apply(torch.clone)
    held = [b for n, b in backend.network.root.named_buffers() if n.endswith("e_score_correction_bias")]
    before = [bias.clone() for bias in held]
    backend.train_step(make_trees(), WeightedLogprobs())
    moves = torch.stack([now - then for now, then in zip(held, before, strict=True)])
    assert moves.any() and set(np.round(moves.abs().flatten().tolist(), 6)) <= {0.0, 0.01}
    saved = [backend._router_biases, backend.network.routing.biases]
    assert all(a is b for found in saved for a, b in zip(found, held, strict=True))
