"""A trainer with images computes what transformers computes alone, packed, with shared prefixes, on several ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from media_ranks import ALONE, WAYS, get_gradients, run_rank, steps
from pydantic import ValidationError
from training_helpers import make_spec, relative_error
from worlds.ranks import run_ranks
from worlds.vision_batches import media_batch
from worlds.vision_models import VISION_MODELS, VisionWorld, write_vision_model

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig, VisionConfig
from roll.errors import ModelError, UnsupportedError
from roll.training import TorchBackend
from roll.training.network.loading import build_network
from roll.training.network.media import add_sample_positions, get_model_media
from roll.training.network.vision_parts import build_part_finder
from roll.training.packing.layout import build_layout
from roll.training.packing.micro_batches import pack
from roll.types import LossRequirements, TrainingBatch

pytestmark = pytest.mark.integration

FAST = ("smolvlm", "qwen3-vl", "gemma3")
REST = (pytest.mark.matrix, pytest.mark.slow)
FAMILIES = [pytest.param(name, marks=() if name in FAST else REST) for name in VISION_MODELS]


@pytest.fixture(scope="module", name="worlds")
def _worlds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, VisionWorld] = {}

    def world(name: str) -> VisionWorld:
        if name not in made:
            directory = tmp_path_factory.mktemp("vision")
            made[name] = VisionWorld.create(write_vision_model(directory / "model", name), directory / "media")
        return made[name]

    return world


def weights_of(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


def network_of(world: VisionWorld) -> Any:
    spec = dataclasses.replace(make_spec(world.model), media_dir=world.store.directory)
    return build_network(spec, torch.float32)


def predictions(network: Any, batch: TrainingBatch, *, share: bool = True) -> tuple[torch.Tensor, list[Any]]:
    """Log-probs of all tokens but the first, and the spans of the samples in them."""
    media = get_model_media(network.decoder)
    samples = [add_sample_positions(media, sample) for sample in batch.samples]
    ((blocks,),) = pack(samples, max_tokens=10_000, share_prefix=share, every_token=True)
    layout = build_layout(blocks, every_token=True)
    return network(layout, 1.0, LossRequirements()).logprobs, list(layout.spans)


@pytest.mark.parametrize("name", FAMILIES)
def test_images_packed_log_probs_and_gradients_are_those_of_transformers(worlds: Any, name: str) -> None:
    world = worlds(name)
    batch, network = media_batch(world), network_of(world)
    found, spans = predictions(network, batch)
    reference = transformers.AutoModelForImageTextToText.from_pretrained(world.model, dtype=torch.float32).eval()
    total = torch.zeros(())
    for span in spans:
        sample = batch.samples[span.index]
        expected = world.reference_logprobs(reference, sample.token_ids, sample.media)
        own = found[torch.from_numpy(span.prediction_index)]
        assert float((own - expected[torch.from_numpy(span.token_index - 1)]).abs().max().detach()) < 1e-5
        total = total + expected.sum()
    total.backward()
    sum(found[torch.from_numpy(span.prediction_index)].sum() for span in spans).backward()
    wanted = {key: p.grad for key, p in reference.named_parameters() if p.grad is not None}
    grads = {key: p.grad for key, p in network.root.named_parameters() if p.grad is not None}
    towers = [key for key in wanted if "vision" in key or "visual" in key]
    assert len(towers) > 10
    assert grads.keys() == wanted.keys()
    assert relative_error(grads, wanted) < 1e-5
    assert relative_error({k: grads[k] for k in towers}, {k: wanted[k] for k in towers}) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_images_any_micro_batch_has_the_same_gradient(worlds: Any, name: str) -> None:
    """Images pass through the tower together, or one prompt at a time, with shared prefixes or without."""
    world, batch = worlds(name), media_batch(worlds(name))
    found: list[tuple[float, dict[str, torch.Tensor]]] = []
    for settings in ({"max_tokens_per_micro_batch": 10_000}, {}, {"share_prefix": False}):
        spec = make_spec(world.model, **({"max_tokens_per_micro_batch": 60} | settings))
        backend = TorchBackend(dataclasses.replace(spec, media_dir=world.store.directory))
        loss = backend.train_step(batch, PolicyLoss()).loss
        found.append((loss, get_gradients(backend)))
    for loss, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert grads.keys() == found[0][1].keys()
        assert relative_error(grads, found[0][1]) < 1e-5


def test_images_an_image_passes_through_the_tower_once_per_micro_batch(
    worlds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds("llava")
    network = network_of(world)
    seen: list[int] = []
    tower = network.root.model.vision_tower
    tower.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    predictions(network, media_batch(world, group_size=4))
    assert sum(seen) == 4  # of 36 occurrences


@pytest.mark.parametrize("name", ["smolvlm", "qwen3-vl"])
def test_images_equal_tokens_with_other_images_are_other_inputs(worlds: Any, name: str) -> None:
    """The first two prompts have equal texts; sharing their prefixes would give one of them the other's images."""
    world = worlds(name)
    batch = media_batch(world, group_size=1, num_prompts=2)
    first, second = batch.samples
    second = dataclasses.replace(second, token_ids=first.token_ids)
    if len(world.prompt("{}", 0)[0]) == len(world.prompt("{}", 1)[0]):
        batch = dataclasses.replace(batch, samples=(first, second))
    network = network_of(world)
    shared, spans = predictions(network, batch)
    alone, other_spans = predictions(network, batch, share=False)
    for own, other in zip(spans, other_spans, strict=True):
        torch.testing.assert_close(shared[own.prediction_index], alone[other.prediction_index], atol=1e-5, rtol=0)


def test_images_swapped_images_change_log_probs(worlds: Any) -> None:
    world = worlds("llava")
    network = network_of(world)
    batch = media_batch(world, group_size=1, num_prompts=1)
    (sample,) = batch.samples
    one, two = sample.media
    swapped = (
        dataclasses.replace(one, digest=two.digest, grid=two.grid),
        dataclasses.replace(two, digest=one.digest, grid=one.grid),
    )
    other = dataclasses.replace(batch, samples=(dataclasses.replace(sample, media=swapped),))
    assert float((predictions(network, batch)[0] - predictions(network, other)[0]).abs().max()) > 0.02


def test_images_positions_that_count_tokens_change_log_probs(worlds: Any) -> None:
    world = worlds("qwen2.5-vl")
    network = network_of(world)
    batch = media_batch(world, group_size=1, num_prompts=1)
    (sample,) = batch.samples
    counted = dataclasses.replace(sample, positions=np.arange(len(sample)))
    wrong = predictions(network, dataclasses.replace(batch, samples=(counted,)))[0]
    assert float((predictions(network, batch)[0] - wrong).abs().max()) > 0.02


def test_images_a_span_that_was_cut_is_named(worlds: Any) -> None:
    world = worlds("llava")
    (sample,) = media_batch(world, group_size=1, num_prompts=1).samples
    span = sample.media[0]
    cut = (dataclasses.replace(span, end=span.end - 2), *sample.media[1:])
    batch = TrainingBatch(samples=(dataclasses.replace(sample, media=cut),))
    with pytest.raises(ModelError, match=r"image .* has 16 features, but its span has 14 feature tokens"):
        predictions(network_of(world), batch)


def test_images_a_model_without_a_tower_refuses_them(worlds: Any, tiny_model: Path) -> None:
    batch = media_batch(worlds("llava"), group_size=1, num_prompts=1)
    backend = TorchBackend(dataclasses.replace(make_spec(tiny_model), media_dir=Path("nowhere")))
    tokens = np.minimum(batch.samples[0].token_ids, 200)
    batch = TrainingBatch(samples=(dataclasses.replace(batch.samples[0], token_ids=tokens),))
    with pytest.raises(UnsupportedError, match=r"sample '0\.0' has media of type 'image',"):
        backend.forward(batch, ["logprobs"])


@pytest.mark.slow
@pytest.mark.parametrize("names", [FAST, tuple(name for name in VISION_MODELS if name not in FAST)])
def test_images_two_ranks_compute_what_one_computes(tmp_path: Path, names: tuple[str, ...]) -> None:
    worlds = {
        name: VisionWorld.create(write_vision_model(tmp_path / name, name), tmp_path / f"{name} media")
        for name in names
    }
    alone = {(name, kind): steps(world, way) for name, world in worlds.items() for kind, way in ALONE.items()}
    run_ranks(run_rank, (tmp_path, names, tuple(WAYS)), 2)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    for (name, way), mine in found.items():
        if way == "pp":
            assert "training.parallel.pp" in mine
            continue
        assert not isinstance(mine, str), (name, way, mine)
        (metrics, grads), (same, expected) = mine, alone[name, way.rpartition(", ")[0]]
        assert grads.keys() == expected.keys()
        assert metrics == pytest.approx(same, rel=1e-5, abs=1e-6), (name, way)
        assert relative_error(grads, expected) < 1e-5, (name, way)


@pytest.mark.parametrize("name", FAMILIES)
def test_images_parts_of_a_model_are_found_by_name(worlds: Any, name: str) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(worlds(name).model)
    find_part = build_part_finder(model)
    parts: dict[str, set[str]] = {"tower": set(), "projector": set(), "language_model": set()}
    for path, _ in model.named_parameters():
        parts[find_part(path)].add(path)
    assert all(paths for paths in parts.values())
    assert all("vision" in path or "visual" in path for path in parts["tower"])
    assert not any("layers" in path and "vision" not in path for path in parts["projector"])
    assert {path.split(".")[-2] for path in parts["language_model"]} >= {"q_proj", "down_proj"}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("frozen", [["tower"], ["tower", "projector"], ["language_model"]])
def test_images_frozen_parts_do_not_change(worlds: Any, frozen: list[str], lora: bool) -> None:
    world = worlds("smolvlm")
    vision = VisionConfig.model_validate({"freeze": frozen})
    spec = make_spec(world.model, max_tokens_per_micro_batch=200)
    model = spec.model.model_copy(update={"vision": vision, "lora": LoRAConfig(rank=2) if lora else None})
    backend = TorchBackend(dataclasses.replace(spec, model=model, media_dir=world.store.directory))
    before = {key: weight.clone() for key, weight in weights_of(backend).items()}
    for _ in range(2):  # the first update moves only B of an adapter
        backend.train_step(media_batch(world, num_prompts=2), PolicyLoss())
    find_part = build_part_finder(backend.model)
    moved = {find_part(key) for key, weight in weights_of(backend).items() if not torch.equal(weight, before[key])}
    assert moved == {"tower", "projector", "language_model"} - set(frozen)


def test_images_an_export_does_not_change_the_attention_of_the_tower(worlds: Any, tmp_path: Path) -> None:
    world = worlds("smolvlm")
    backend = TorchBackend(dataclasses.replace(make_spec(world.model), media_dir=world.store.directory))
    batch = media_batch(world, num_prompts=2)
    before = predictions(backend.network, batch)[0].detach()
    backend.export(tmp_path / "model")
    after = predictions(backend.network, batch)[0].detach()
    assert torch.equal(after, before)
    exported = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    assert "roll" not in f"{exported._attn_implementation} {exported.vision_config._attn_implementation}"


def test_images_a_part_has_its_own_learning_rate(worlds: Any) -> None:
    world = worlds("smolvlm")
    steps: dict[float, dict[str, float]] = {}
    for factor in (1.0, 0.25):
        vision = VisionConfig.model_validate({"learning_rate_factors": {"tower": factor}})
        spec = make_spec(world.model, max_tokens_per_micro_batch=200, weight_decay=0.0)
        model = spec.model.model_copy(update={"vision": vision})
        backend = TorchBackend(dataclasses.replace(spec, model=model, media_dir=world.store.directory))
        before = {key: weight.clone() for key, weight in weights_of(backend).items()}
        backend.train_step(media_batch(world, num_prompts=2), PolicyLoss())
        find_part = build_part_finder(backend.model)
        steps[factor] = {}
        for key, weight in weights_of(backend).items():
            size = float((weight - before[key]).abs().max())
            steps[factor][find_part(key)] = max(size, steps[factor].get(find_part(key), 0.0))
    assert steps[0.25]["tower"] == pytest.approx(0.25 * steps[1.0]["tower"], rel=1e-3)
    assert steps[0.25]["language_model"] == pytest.approx(steps[1.0]["language_model"], rel=1e-3)


def test_images_parts_are_refused_for_a_model_of_text(tiny_model: Path) -> None:
    spec = make_spec(tiny_model)
    vision = VisionConfig.model_validate({"freeze": ["tower"]})
    with pytest.raises(ModelError, match=r"model\.vision is set, but .* has no vision tower"):
        TorchBackend(dataclasses.replace(spec, model=spec.model.model_copy(update={"vision": vision})))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze": ["tower", "projector", "language_model"]}, "no part would be trained"),
        ({"freeze": ["tower"], "learning_rate_factors": {"tower": 0.1}}, "'tower' is frozen, but has"),
        ({"learning_rate_factors": {"tower": 0.0}}, "greater than 0"),
        ({"freeze": ["encoder"]}, "'tower', 'projector' or 'language_model'"),
    ],
)
def test_images_parts_that_cannot_be_configured_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        VisionConfig.model_validate(settings)
