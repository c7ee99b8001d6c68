"""What a trainer draws is its own, whatever else happens in its process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_helpers import logprobs_of, make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.training import TorchBackend
from roll.training.distributed import Ranks
from roll.training.packing.layout import build_layout
from roll.training.random_states import RandomStates
from roll.types import LossRequirements

DROPOUT = LoRAConfig(rank=2, dropout=0.3)


def test_trainer_random_states_a_block_draws_from_its_own_generator_and_leaves_the_processs_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = torch.rand(2), torch.rand(2)
    own = RandomStates(5, torch.device("cpu"))
    torch.manual_seed(7)
    with own.activate():
        assert torch.equal(torch.rand(2), first)
    assert torch.equal(torch.rand(3), expected)
    with own.activate():
        assert torch.equal(torch.rand(2), second)
    own.restart(5)
    with own.activate():
        assert torch.equal(torch.rand(2), first)


def test_trainer_random_states_trainers_of_one_process_do_not_move_each_others_dropout(tiny_model: Path) -> None:
    spec, batch = make_spec(tiny_model, lora=DROPOUT), make_batch()
    alone = TorchBackend(spec)
    expected = [alone.train_step(batch, PolicyLoss()) for _ in range(3)]
    mine = TorchBackend(spec)
    other = TorchBackend(make_spec(tiny_model, lora=DROPOUT, seed=9))
    for result in expected:
        torch.rand(3)
        assert mine.train_step(batch, PolicyLoss()).loss == result.loss
        other.train_step(batch, PolicyLoss())


def test_trainer_random_states_a_step_that_failed_drew_nothing(tiny_model: Path) -> None:
    """A run that it ends is saved as it was before, so the resumed run makes the step as if it had not failed."""

    class FailsOnce(PolicyLoss):
        def __call__(self, inputs: Any) -> Any:
            raise RuntimeError("a test breaks it")

    spec, batch = make_spec(tiny_model, lora=DROPOUT, learning_rate=0.01), make_batch()
    losses = []
    for fails in (False, True):
        backend = TorchBackend(spec)
        backend.train_step(batch, PolicyLoss())
        if fails:
            with pytest.raises(RuntimeError, match="a test breaks it"):
                backend.train_step(batch, FailsOnce())
        losses.append([backend.train_step(batch, PolicyLoss()).loss for _ in range(2)])
    assert losses[0] == losses[1]


def test_trainer_random_states_dropout_differs_from_step_to_step(tiny_model: Path) -> None:
    backend = TorchBackend(make_spec(tiny_model, lora=DROPOUT, learning_rate=0.01))
    for _ in range(2):  # B begins at 0
        backend.train_step(make_batch(), PolicyLoss())
    backend.network.train()
    once, again = (logprobs_of(backend, make_batch(1)) for _ in range(2))
    assert all((a == b).all() for a, b in zip(once, again, strict=True))  # scoring has none
    (micro_batch,) = backend._passes._build_micro_batches(make_batch(1), every_token=True, needs=LossRequirements())
    layout = build_layout(micro_batch.blocks, every_token=True)
    backend.network.train()
    first, second = (
        backend._passes._predict(layout, make_batch(1), LossRequirements(), None, None).logprobs for _ in range(2)
    )
    assert not torch.equal(first, second)


def test_trainer_random_states_adapters_begin_from_the_seed_alone_also_when_built_side_by_side(
    tiny_model: Path,
) -> None:
    def adapters(seed: int) -> dict[str, torch.Tensor]:
        return dict(TorchBackend(make_spec(tiny_model, lora=LoRAConfig(rank=2), seed=seed)).model.named_parameters())

    with ThreadPoolExecutor(4) as threads:
        built = list(threads.map(adapters, [0, 1, 0, 1, 0, 1]))
    for weights in built[2:]:
        twin = built[0] if torch.equal(weights[NAME], built[0][NAME]) else built[1]
        assert all(torch.equal(weights[name], twin[name]) for name in weights)
    assert torch.equal(built[0][NAME], built[4][NAME])
    assert not torch.equal(built[0][NAME], built[1][NAME])
    assert built[0][NAME].abs().max() <= 1 / 32**0.5  # kaiming with a = sqrt 5: uniform in +- 1 / sqrt(inputs)
    assert built[0][NAME].abs().max() > 0.8 / 32**0.5
    assert not built[0][NAME.replace("lora_A", "lora_B")].any()


NAME = "model.layers.0.self_attn.q_proj.lora_A.default.weight"


def test_trainer_random_states_ranks_of_another_share_or_stage_draw_other_numbers_and_those_of_one_the_same() -> None:
    def stream(data_rank: int, stage: int | None) -> int:
        ranks = object.__new__(Ranks)
        ranks.data_rank, ranks.data_size = data_rank, 2
        ranks.stage = None if stage is None else SimpleNamespace(number=stage)  # type: ignore[assignment]
        return ranks.stream

    assert [stream(data_rank, None) for data_rank in range(2)] == [0, 1]
    assert sorted(stream(data_rank, stage) for data_rank in range(2) for stage in range(3)) == list(range(6))
