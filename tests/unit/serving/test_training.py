"""Training through the API: losses, gradients and updates are those of `transformers`, peft and PyTorch alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from api_client import ADAM, ApiFailure, client, datum, gather, serving
from peft import PeftModel

from roll.models import load_causal_lm

LossFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def clip(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return ratio.clamp(low, high)


FORMULAS: dict[str, tuple[LossFn, dict[str, float]]] = {
    "cross_entropy": (lambda p, q, a: -(p * a).sum(), {}),
    "importance_sampling": (lambda p, q, a: -(torch.exp(p - q) * a).sum(), {}),
    "ppo": (
        lambda p, q, a: -torch.min(torch.exp(p - q) * a, clip(torch.exp(p - q), 0.9, 1.1) * a).sum(),
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    ),
    "cispo": (lambda p, q, a: -(clip(torch.exp(p - q), 0.8, 1.2).detach() * p * a).sum(), {}),
    "dro": (lambda p, q, a: -(p * a - 0.5 * 0.1 * (p - q) ** 2).sum(), {"beta": 0.1}),
}
Rows = list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]


def make_rows(seed: int, count: int = 3) -> Rows:
    """(tokens, targets, q, a) of each datum. Targets of prompts are 0; weights are any numbers, also negative."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in rng.integers(6, 20, count):
        tokens = rng.integers(4, 260, length)
        targets = np.where(np.arange(length) < 3, 0, rng.integers(4, 260, length))
        a = np.where(np.arange(length) < 3, 0, rng.normal(size=length) * 3).astype(np.float32)
        rows.append((tokens, targets, rng.normal(-5, 1, length).astype(np.float32), a))
    return rows


def make_data(rows: Rows, loss: str) -> list[Any]:
    if loss == "cross_entropy":
        return [datum(tokens, targets, weights=a) for tokens, targets, _, a in rows]
    return [datum(tokens, targets, logprobs=q, advantages=a) for tokens, targets, q, a in rows]


class Reference:
    """The same model and adapter in `transformers` and peft, one sequence at a time, with PyTorch's AdamW."""

    def __init__(self, model: Path, adapter: Path, **adam: float) -> None:
        base = load_causal_lm(str(model), "float32", attention="eager")
        self.network = PeftModel.from_pretrained(base, adapter, is_trainable=True)
        self.trained = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained,
            lr=adam["learning_rate"],
            betas=(adam["beta1"], adam["beta2"]),
            eps=adam["eps"],
            weight_decay=adam["weight_decay"],
        )
        self.clip = adam["grad_clip_norm"]

    def logprobs(self, tokens: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        logits = self.network(input_ids=torch.from_numpy(tokens)[None]).logits[0].log_softmax(-1)
        return logits.gather(-1, torch.from_numpy(targets)[:, None])[:, 0]

    def backward(self, rows: Rows, formula: LossFn) -> tuple[float, list[np.ndarray]]:
        total, outputs = 0.0, []
        for tokens, targets, q, a in rows:
            p = self.logprobs(tokens, targets)
            loss = formula(p, torch.from_numpy(q), torch.from_numpy(a))
            loss.backward()
            total += float(loss.detach())
            outputs.append(p.detach().numpy())
        return total, outputs

    def step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.trained, self.clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


@pytest.mark.parametrize("loss", FORMULAS)
async def test_serving_losses_gradients_and_updates_equal_pytorch(tiny_model: Path, tmp_path: Path, loss: str) -> None:
    formula, config = FORMULAS[loss]
    adam = ADAM | {"weight_decay": 0.1, "beta2": 0.99, "grad_clip_norm": 0.0 if loss == "cispo" else 2.0}
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        start = await one.save(model, "start")
        reference = Reference(tiny_model, tmp_path / start.removeprefix("tinker://"), **adam)
        for number in range(3):
            for part in range(2):  # two requests are one gradient
                rows = make_rows(10 * number + part)
                expected, outputs = reference.backward(rows, formula)
                got, logprobs = await one.forward_backward(model, make_data(rows, loss), loss, config=config)
                assert got == pytest.approx(expected, rel=1e-5, abs=1e-4)
                for mine, theirs in zip(logprobs, outputs, strict=True):
                    np.testing.assert_allclose(mine, theirs, atol=2e-5)
            metrics = await one.step(model, **adam)
            assert metrics["grad_norm"] == pytest.approx(reference.step(), rel=1e-4)
            assert metrics["learning_rate"] == 0.01


async def test_serving_zero_weights_return_all_logprobs_and_no_gradient(tiny_model: Path, tmp_path: Path) -> None:
    rows = [(tokens, targets, q, 0 * a) for tokens, targets, q, a in make_rows(1)]
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        start = await one.save(model, "start")
        reference = Reference(tiny_model, tmp_path / start.removeprefix("tinker://"), **ADAM)
        loss, logprobs = await one.forward_backward(model, make_data(rows, "cross_entropy"), forward_only=True)
        assert loss == 0
        for (tokens, targets, *_), got in zip(rows, logprobs, strict=True):
            np.testing.assert_allclose(got, reference.logprobs(tokens, targets).detach().numpy(), atol=2e-5)
        with pytest.raises(ApiFailure, match="requires gradients"):
            await one.step(model)


async def run_client(one: Any, number: int, seed: int) -> list[float]:
    """Losses of a few steps, with its own rank, learning rate and data."""
    model = await one.create_model(number, rank=2 + seed, seed=seed)
    losses = []
    for index in range(4):
        data = make_data(make_rows(100 * seed + index), "cross_entropy")
        losses.append((await one.forward_backward(model, data))[0])
        await one.step(model, learning_rate=0.01 * seed)
    return losses


async def test_serving_concurrent_clients_train_independently(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one, client(server, "tml-bob-00001") as two:
        alone = [await run_client(one, 0, 1), await run_client(two, 0, 2)]
        together = await gather(run_client(one, 1, 1), run_client(two, 1, 2), run_client(one, 2, 1))
    assert alone[0] != alone[1]
    assert together == [alone[0], alone[1], alone[0]]
