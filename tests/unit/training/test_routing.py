"""Which experts are chosen is reported without another pass, and can be chosen again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from families import FAMILIES, write_model
from test_architectures import FLOAT64, InFull, WeightedLogprobs, make_trees, separate_logprobs
from training_helpers import grads_of, make_batch, make_spec, relative_error

from roll.algorithms.correction import Correction
from roll.algorithms.losses import PolicyLoss
from roll.config.algorithm import AlgorithmConfig
from roll.config.algorithm_parts import UpdateConfig
from roll.config.model import LoRAConfig
from roll.errors import ModelError, UnsupportedError
from roll.models import load_causal_lm
from roll.pipelines.learner import Learner
from roll.pipelines.learning.updates import _compute_logprobs
from roll.training import TorchBackend
from roll.training.network import routing
from roll.training.network.routing import compute_load_metrics
from roll.training.packing import blocks
from roll.types import TrainingBatch

FAST = ("qwen3-moe",)
REPLAYED = ("deepseek-v2", "deepseek-v3", "gpt-oss", "qwen3-moe", "mixtral", "glm4-moe", "qwen3-next", "llama4")
replayed = pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in REPLAYED]
)


def replaying(batch: TrainingBatch, experts: list[np.ndarray]) -> TrainingBatch:
    return replace(batch, samples=tuple(replace(s, experts=own) for s, own in zip(batch.samples, experts, strict=True)))


@pytest.fixture
def deep_sharing() -> Iterator[None]:
    with mock.patch.object(blocks, "MIN_SHARED_TOKENS", 3):
        yield


def test_router_replay_loads_by_hand() -> None:
    counts = np.array([[6, 2, 0, 0], [2, 2, 2, 2]])
    sums = np.array([[3.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    found = compute_load_metrics([(counts[:, :], sums), (np.zeros_like(counts), np.zeros_like(sums))])
    assert found["experts/load_ratio"] == pytest.approx((0.75 * 4 + 1) / 2)
    assert found["experts/load_ratio_worst"] == pytest.approx(3.0)
    assert found["experts/largest_share"] == pytest.approx((0.75 + 0.25) / 2)
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(4)
    assert found["experts/entropy"] == pytest.approx((entropy + 1) / 2)
    assert found["experts/idle"] == pytest.approx(0.25)
    assert found["experts/balance_loss"] == pytest.approx((4 * (0.75**2 + 0.25**2) + 1) / 2)
    assert compute_load_metrics([(np.zeros_like(counts), np.zeros_like(sums))]) == {}


@pytest.mark.usefixtures("deep_sharing")
@replayed
def test_router_replay_the_router_s_own_choice_replayed_changes_nothing(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    backend = TorchBackend(make_spec(write_model(tmp_path / name, tiny_model, FAMILIES[name])))
    batch, loss = make_trees(), WeightedLogprobs()
    experts = backend.forward(batch, ["logprobs", "experts"])["experts"]
    for sample, own in zip(batch.samples, experts, strict=True):
        assert own.shape[0] == len(sample) and (own[:-1] >= 0).all() and (own[-1] == -1).all()
    result = backend.measure(batch, loss)
    assert result.metrics["experts/load_ratio"] >= 1
    again = WeightedLogprobs()
    backend.measure(replaying(batch, experts), again)
    assert torch.equal(torch.cat(loss.seen), torch.cat(again.seen))


@pytest.mark.usefixtures("deep_sharing")
@replayed
def test_router_replay_replayed_experts_are_used_token_by_token_through_shared_prefixes(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """Random choices: packed and shared they give what they give text by text, and the router gets a gradient."""
    backend = TorchBackend(make_spec(write_model(tmp_path / name, tiny_model, FAMILIES[name])))
    batch, rng = make_trees(), np.random.default_rng(0)
    routing = backend.network.routing
    by_token = rng.permuted(np.tile(np.arange(4), (260, routing.num_layers, 1)), axis=-1)[..., : routing.num_chosen]
    experts = [by_token[s.token_ids].astype(np.int16) for s in batch.samples]
    own, chosen, apart = WeightedLogprobs(), WeightedLogprobs(), WeightedLogprobs()
    backend.measure(batch, own)
    backend.train_step(replaying(batch, experts), chosen)
    packed = grads_of(backend)
    assert sum(float(g.norm()) for n, g in packed.items() if n.endswith(("gate.weight", "router.weight"))) > 0
    used = backend.network.routing._chosen[0]
    assert used is not None
    other = TorchBackend(make_spec(tmp_path / name, share_prefix=False, max_tokens_per_micro_batch=20))
    other.train_step(replaying(batch, experts), apart)
    together, alone = (torch.cat(x.seen).sort().values for x in (chosen, apart))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert relative_error(packed, grads_of(other)) <= 1e-3
    assert not torch.allclose(together, torch.cat(own.seen).sort().values, atol=1e-2)


@pytest.mark.usefixtures("deep_sharing")
@pytest.mark.parametrize("known", ["all", "some", "few_samples"])
def test_router_replay_replayed_experts_on_which_a_group_disagrees_depend_on_no_packing(
    tiny_model: Path, tmp_path: Path, known: str
) -> None:
    """Every sample has its own random experts, also for tokens that it shares: the first that knows counts for all."""
    path = write_model(tmp_path / "moe", tiny_model, FAMILIES["qwen3-moe"])
    packings: list[dict[str, Any]] = [
        {},
        {"max_tokens_per_micro_batch": 20},
        {"max_tokens_per_micro_batch": 60},
        {"share_prefix": False},
    ]
    backends = [TorchBackend(make_spec(path, **packing), precision=FLOAT64) for packing in packings]
    batch, rng = make_trees(), np.random.default_rng(1)
    size = backends[0].network.routing.num_layers, backends[0].network.routing.num_chosen
    experts: list[Any] = []
    for i, sample in enumerate(batch.samples):
        own = rng.permuted(np.tile(np.arange(4), (len(sample), size[0], 1)), axis=-1)[..., : size[1]].astype(np.int16)
        if known == "some":
            own[rng.random(len(sample)) < 0.4] = -1
        experts.append(None if known == "few_samples" and i % 2 else own)
    given = replaying(batch, experts)
    said = [np.concatenate(b.forward(given, ["logprobs"])["logprobs"]) for b in backends]
    for other in said[1:]:
        np.testing.assert_allclose(other, said[0], rtol=0, atol=1e-6)
    plain = np.concatenate(backends[0].forward(batch, ["logprobs"])["logprobs"])
    assert np.abs(plain - said[0]).max() > 1e-2
    turned = replace(given, samples=given.samples[::-1])  # nor on the order of the batch
    back = backends[0].forward(turned, ["logprobs"])["logprobs"][::-1]
    np.testing.assert_allclose(np.concatenate(back), said[0], rtol=0, atol=1e-6)


def test_router_replay_load_figures_of_a_policy_with_adapters_do_not_count_its_reference(
    tiny_model: Path, tmp_path: Path
) -> None:
    """With the exact divergence, the policy without adapters goes through the same routers."""
    path = write_model(tmp_path / "moe", tiny_model, FAMILIES["qwen3-moe"])
    spec = make_spec(path, learning_rate=0.1, lora=LoRAConfig(rank=4), router_aux_loss=0.1)
    backend = TorchBackend(spec)
    batch = make_batch()
    for _ in range(3):  # the routers of policy and reference get other inputs
        backend.train_step(batch, PolicyLoss(correction=Correction(upper=None)))
    plain = backend.measure(batch, PolicyLoss())
    penalty = PolicyLoss(kl_coefficient=0.1, kl_estimator="full")
    found = backend.measure(batch, penalty)
    assert found.metrics["policy/kl_reference"] > 1e-3
    names = [name for name in plain.metrics if name.startswith("experts/")]
    assert len(names) >= 6
    for name in names:
        assert found.metrics[name] == plain.metrics[name], name
    assert backend.train_step(batch, penalty).metrics["experts/aux_loss"] == plain.metrics["experts/aux_loss"]


@pytest.mark.usefixtures("deep_sharing")
def test_router_replay_after_an_update_replay_keeps_the_old_pass_s_experts(tiny_model: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path / "moe", tiny_model, FAMILIES["qwen3-moe"])
    backend = TorchBackend(make_spec(path, learning_rate=0.05))
    batch = make_trees()
    experts = backend.forward(batch, ["logprobs", "experts"])["experts"]
    backend.train_step(batch, WeightedLogprobs())
    moved = backend.forward(batch, ["logprobs", "experts"])["experts"]
    assert any((a != b).any() for a, b in zip(experts, moved, strict=True))
    kept = backend.forward(replaying(batch, experts), ["logprobs", "experts"])["experts"]
    for a, b in zip(experts, kept, strict=True):
        assert (a == b).all()


@pytest.mark.usefixtures("deep_sharing")
def test_router_replay_experts_of_groups_that_are_out_now_are_weighed_by_their_own_scores() -> None:
    """Routers that choose groups first set the scores of the others to 0, and weigh by what `topk` answers."""
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]])
    out = torch.tensor([False, False, True, True])
    with routing._ReplayMode(torch.tensor([[3, 0], [-1, -1]]), 4) as replay:
        found = scores.masked_fill(out, 0.0).topk(2)
    assert replay.used
    assert found[1].tolist() == [[3, 0], [0, 1]]
    torch.testing.assert_close(found[0], torch.tensor([[0.1, 0.4], [0.4, 0.3]]))


def test_router_replay_tokens_of_unknown_experts_choose_their_own(tiny_model: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path / "moe", tiny_model, FAMILIES["qwen3-moe"])
    backend = TorchBackend(make_spec(path))
    batch = make_trees()
    unknown = [np.full((len(s), 2, 2), -1, dtype=np.int16) for s in batch.samples]
    own, again = (backend.forward(b, ["logprobs"])["logprobs"] for b in (batch, replaying(batch, unknown)))
    for a, b in zip(own, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda own: own[:, :1], r"shape \[tokens, layers, experts\] must be \["),
        (lambda own: own[..., :1], r"shape \[tokens, layers, experts\] must be \["),
        (lambda own: np.where(np.arange(own.shape[-1]) == 1, 99, own), r"token 0 has \[.*99\] in layer 0, expected"),
        (lambda own: np.zeros_like(own), r"token 0 has \[0, 0.*\] in layer 0, expected"),
        (lambda own: np.where(np.arange(own.shape[-1]) == 1, -1, own), r"token 0 has \[.*-1\] in layer 0, expected"),
    ],
)
def test_router_replay_experts_that_cannot_be_chosen_are_named(
    tiny_model: Path, tmp_path: Path, spoil: Any, said: str
) -> None:
    backend = TorchBackend(make_spec(write_model(tmp_path / "model", tiny_model, FAMILIES["qwen3-moe"])))
    batch = make_trees()
    experts = backend.forward(batch, ["experts"])["experts"]
    spoilt = replaying(batch, [*experts[:-1], spoil(experts[-1])])
    said = f"sample {re.escape(repr(batch.samples[-1].sample_id))} cannot be replayed: .*{said}"
    for go in (lambda: backend.measure(spoilt, WeightedLogprobs()), lambda: backend.forward(spoilt, ["logprobs"])):
        with pytest.raises(ModelError, match=said):
            go()


def test_router_replay_what_cannot_replay_says_so(tiny_model: Path, tmp_path: Path) -> None:
    batch = make_trees()
    with pytest.raises(UnsupportedError, match="does not compute experts"):
        TorchBackend(make_spec(tiny_model)).forward(batch, ["experts"])
    backend = TorchBackend(make_spec(write_model(tmp_path / "phi", tiny_model, FAMILIES["phi-moe"])))
    experts = backend.forward(batch, ["logprobs", "experts"])["experts"]
    with pytest.raises(ModelError, match="router replay is not supported"):
        backend.forward(replaying(batch, experts), ["logprobs"])


@pytest.mark.parametrize("replays", [True, False])
def test_router_replay_the_pass_before_several_updates_is_asked_for_experts(replays: bool) -> None:
    class Policy:
        async def forward(self, batch: TrainingBatch, outputs: list[str], options: object) -> dict[str, list[Any]]:
            return {name: [f"{name} of a sample"] for name in outputs}

    run: Any = SimpleNamespace(spans=SimpleNamespace(phase=lambda name: nullcontext()))
    learner: Any = Learner(policy=Policy(), replays_experts=replays)  # type: ignore[arg-type]
    algorithm = AlgorithmConfig(updates=UpdateConfig(num_minibatches=2))
    columns = asyncio.run(_compute_logprobs(run, learner, algorithm, make_trees(), {}))
    assert columns["old_logprobs"] == ["logprobs of a sample"]
    assert columns.get("experts") == (["experts of a sample"] if replays else None)


def test_router_replay_is_refused_where_nothing_chooses_experts(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="router_replay 'old'"):
        TorchBackend(make_spec(tiny_model, router_replay="old"))


def test_router_replay_a_router_that_cannot_be_replayed_is_refused_when_the_trainer_starts(
    tiny_model: Path, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "phi", tiny_model, FAMILIES["phi-moe"])
    with pytest.raises(ModelError, match="router replay is not supported"):
        TorchBackend(make_spec(path, router_replay="engine"))
    TorchBackend(make_spec(write_model(tmp_path / "qwen", tiny_model, FAMILIES["qwen3-moe"]), router_replay="engine"))


def choose(model: torch.nn.Module, given: torch.Tensor) -> None:
    """Let the routers of a plain model use these experts [layers, L, k]; written anew, after each family's paper."""
    routers = [m for m in model.modules() if type(m).__name__ in ("Qwen3MoeTopKRouter", "Llama4Router")]
    for router, chosen in zip(routers, given, strict=True):

        def forward(hidden: torch.Tensor, router: Any = router, chosen: torch.Tensor = chosen) -> Any:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
            if type(router).__name__ == "Llama4Router":
                return torch.zeros_like(logits).scatter(1, chosen, logits.gather(1, chosen).sigmoid()), logits
            weights = logits.softmax(-1).gather(1, chosen)
            if router.norm_topk_prob:
                weights = weights / weights.sum(1, keepdim=True)
            return logits, weights, chosen

        router.forward = forward


@pytest.mark.usefixtures("deep_sharing")
@pytest.mark.parametrize("name", ["qwen3-moe", pytest.param("llama4", marks=pytest.mark.slow)])
def test_router_replay_the_gradient_with_given_experts_is_the_model_s_own_with_them(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """In float64, packed and shared, against every text alone."""
    path, batch, loss = write_model(tmp_path / name, tiny_model, FAMILIES[name]), make_trees(), WeightedLogprobs()
    with InFull():
        model = load_causal_lm(path, torch.float64, attention="eager")
        backend = TorchBackend(make_spec(path), precision=FLOAT64)
        routing = backend.network.routing
        orders = np.random.default_rng(1).permuted(np.tile(np.arange(4), (260, routing.num_layers, 1)), axis=-1)
        experts = [orders[s.token_ids, :, : routing.num_chosen].astype(np.int8) for s in batch.samples]
        backend.train_step(replaying(batch, experts), loss)
        expected: list[torch.Tensor] = []
        for sample, own in zip(batch.samples, experts, strict=True):
            choose(model, torch.from_numpy(own.astype(np.int64)).transpose(0, 1))
            mask = torch.from_numpy(sample.loss_mask)
            (said,) = separate_logprobs(model, replace(batch, samples=(sample,)))
            expected.append(said.detach()[mask])
            (-(said * torch.from_numpy(sample.advantages).double())[mask].sum()).backward()
    found = torch.cat(loss.seen).sort().values
    assert float((found - torch.cat(expected).sort().values).abs().max()) <= 1e-9
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    packed = grads_of(backend)
    routers = [n for n in grads if n.endswith(("gate.weight", "router.weight"))]
    assert routers and all(float(grads[n].norm()) > 0 for n in routers)
    assert relative_error({n: packed[n] for n in grads}, grads) <= 1e-9
