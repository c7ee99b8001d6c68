"""A dry run says what a real one would hold and send."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from training_helpers import make_batch, make_spec
from transformers import LlamaConfig
from worlds.tiny_model import write_tiny_model
from worlds.vision_models import write_vision_model

from roll.algorithms.losses import PolicyLoss
from roll.config.estimate import estimate_trained_bytes
from roll.config.model import LoRAConfig
from roll.config.parallel import ParallelConfig
from roll.errors import ModelError
from roll.models import describe_model
from roll.models.loading import build_random_lm
from roll.training import TorchBackend
from roll.training.dry_run import Collective, DryRun, dry_run
from roll.training.network import logprobs
from roll.training.spec import TrainerSpec
from roll.types import LossRequirements

pytestmark = pytest.mark.integration

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, WORDS = 4, 32, 64, 4, 2, 256
VOCABULARY = 1500


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration alone."""
    directory = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)
    return directory


def spec_of(model: Path, rank: int = 0, **parallel: int) -> TrainerSpec:
    spec = make_spec(model, dtype="bfloat16", parallel=ParallelConfig(**parallel))
    return dataclasses.replace(spec, rank=rank, world_size=4, device="cpu")


def tried(model: Path, rank: int = 0, **parallel: int) -> DryRun:
    return dry_run(spec_of(model, rank, **parallel), make_batch(0, vocab=256), LossRequirements())


def test_dry_run_a_rank_holds_its_share_of_masters_and_moments(model: Path) -> None:
    found = tried(model, tp=2)
    head = HIDDEN // HEADS
    divided = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * head + 3 * HIDDEN * INNER) + 2 * WORDS * HIDDEN
    norms = (2 * LAYERS + 1) * HIDDEN
    own = (divided / 2 + norms) / 2
    counters = 4 * (9 * LAYERS + 3)  # AdamW's steps
    assert 0 <= found.between_steps - 12 * own - counters <= 128  # and the angles of rotary embeddings
    assert found.gradients == 4 * own
    assert found.peak > found.between_steps + found.gradients


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("parallel", [{"pp": 2}, {"pp": 2, "vpp": 2}, {"pp": 4}])
def test_dry_run_the_fullest_stage_holds_what_is_estimated(
    tmp_path: Path, parallel: dict[str, int], tied: bool
) -> None:
    """The first, of a vocabulary that weighs as much as five layers: more layers than the last has, and embeddings."""
    model = write_tiny_model(tmp_path, layers=12, tied=tied)
    spec = dataclasses.replace(make_spec(model, parallel=ParallelConfig(**parallel)), world_size=4, device="cpu")
    sizes = dataclasses.replace(describe_model(model), vocab_size=VOCABULARY)
    more = (VOCABULARY - 260) * HIDDEN * (1 if tied else 2)
    sizes = dataclasses.replace(sizes, num_parameters=sizes.num_parameters + more)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": VOCABULARY}))
    holds = [
        dry_run(dataclasses.replace(spec, rank=rank), None, LossRequirements()).between_steps
        for rank in range(0, 4, 4 // parallel["pp"])
    ]
    parts = estimate_trained_bytes(spec.model, spec.training, sizes, 4, on_accelerator=True)
    assert max(holds) == pytest.approx(parts["weights"] + parts["AdamW"], rel=0.01)
    assert max(holds) == holds[0] > 1.1 * sum(holds) / len(holds)


@pytest.mark.parametrize("family", ["qwen3-vl", "smolvlm"])
def test_dry_run_vision_language_models_hold_their_towers(family: str, tmp_path: Path) -> None:
    directory = write_vision_model(tmp_path, family)
    with torch.device("meta"):
        network = build_random_lm(directory, torch.bfloat16, attention="sdpa", trust_remote_code=False)
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    assert any("vis" in name for name, _ in network.named_parameters())
    found = tried(directory)
    assert 0 <= found.between_steps - 12 * num_parameters / 4 <= 0.02 * 12 * num_parameters  # and steps and buffers


def test_dry_run_adapters_alone_have_moments_and_gradients(model: Path) -> None:
    spec = dataclasses.replace(make_spec(model, dtype="bfloat16", lora=LoRAConfig(rank=2)), world_size=4, device="cpu")
    found = dry_run(spec, make_batch(0, vocab=256), LossRequirements())
    assert 0 < found.gradients < tried(model).gradients / 4


def test_dry_run_it_gathers_every_layer_twice_and_both_ends_and_the_rest_once_and_sends_their_gradients(
    model: Path,
) -> None:
    found = tried(model, tp=2)
    assert found.counts[Collective("all_gather", "shards", 2)] == 2 * LAYERS + 3
    assert found.counts[Collective("reduce_scatter", "shards", 2)] == LAYERS + 3
    assert found.counts[Collective("all_gather", "tp", 2)] == 4 * LAYERS + 2


def test_dry_run_stages_send_what_passes_between_them(model: Path) -> None:
    first, last = (tried(model, rank, pp=2) for rank in (0, 2))
    up, down = Collective("send", "pp", 2), Collective("recv", "pp", 2)
    assert first.counts[up] == last.counts[down] == first.counts[down] == last.counts[up] == 1
    assert first.bytes[up] == last.bytes[down]


def test_dry_run_stages_of_two_parts_send_three_times_as_much_as_those_of_one(model: Path) -> None:
    """Of four parts, each rank has two, and between them states pass three times, and back."""
    first, last = (tried(model, rank, pp=2, vpp=2) for rank in (0, 2))
    up, down = Collective("send", "pp", 2), Collective("recv", "pp", 2)
    assert first.counts[up] == last.counts[down] == first.counts[down] == last.counts[up] == 3
    assert [list(layers) for layers in first.layers] == [[0], [2]]
    assert [list(layers) for layers in last.layers] == [[1], [3]]


def test_dry_run_a_layer_is_gathered_as_often_whatever_part_it_is_of(model: Path) -> None:
    """Embeddings once a micro-batch. In the last stage the norm for each part, and the projection once, or again for a
    gradient that another part's pass has come before."""
    for rank, buckets, each_part in ((0, 1, 0.5), (2, 2, 2)):
        for vpp in (1, 2):
            training = {"parallel": ParallelConfig(pp=2, vpp=vpp), "max_tokens_per_micro_batch": 24}
            spec = dataclasses.replace(
                make_spec(model, dtype="bfloat16", **training), rank=rank, world_size=4, device="cpu"
            )
            found = dry_run(spec, make_batch(0, vocab=256, groups=8), LossRequirements()).counts
            num = found[Collective("send", "pp", 2)] // (2 * vpp - 1)
            assert num > 4
            each_layer = 2 * num * LAYERS // 2
            assert (
                each_layer
                < found[Collective("all_gather", "shards", 2)]
                <= each_layer + 1 + max(each_part * vpp, 1) * num
            )
            assert found[Collective("reduce_scatter", "shards", 2)] == num * (LAYERS // 2 + buckets)


def test_dry_run_a_model_that_cannot_be_divided_is_refused_without_its_weights(model: Path) -> None:
    with pytest.raises(
        ModelError,
        match=r"num_key_value_heads .2. must be divisible by training.parallel.tp .4.; supported sizes: 1, 2$",
    ):
        tried(model, tp=4)
    assert not dist.is_initialized()


def test_dry_run_what_comes_after_it_in_the_process_has_numbers(tmp_path: Path, model: Path) -> None:
    tried(model)
    backend = TorchBackend(make_spec(write_tiny_model(tmp_path / "real")))
    assert math.isfinite(backend.train_step(make_batch(0, vocab=256), PolicyLoss()).loss)


def test_dry_run_a_dry_run_takes_logits_in_whole_chunks_as_on_an_accelerator(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks for a processor's cache they would be four fifths of the operations of a large vocabulary."""
    rows: list[int] = []
    compute_scaled_logits = logprobs.compute_scaled_logits

    def counted(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
        rows.append(len(logits))
        return compute_scaled_logits(logits, temperature, dtype)

    monkeypatch.setattr(logprobs, "CPU_BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(logprobs, "compute_scaled_logits", counted)
    tried(model)
    assert rows and min(rows) > 1
