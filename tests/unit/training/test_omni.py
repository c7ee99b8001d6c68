"""A trainer with audio and video computes what the thinker in transformers computes alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from omni_ranks import OTHER_ORDER, WAYS, omni_batch, run_rank, steps
from training_helpers import make_spec, relative_error
from worlds.omni_models import OMNI_MODELS, OmniWorld, write_omni_model
from worlds.ranks import run_ranks

from roll.training.network.loading import build_network
from roll.training.network.media import add_sample_positions, get_model_media
from roll.training.network.vision_parts import build_part_finder
from roll.training.packing.layout import build_layout
from roll.training.packing.micro_batches import pack
from roll.types import LossRequirements, TrainingBatch


@pytest.fixture(scope="module", name="worlds")
def _worlds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, OmniWorld] = {}

    def world(name: str) -> OmniWorld:
        if name not in made:
            directory = tmp_path_factory.mktemp("omni")
            made[name] = OmniWorld.create(write_omni_model(directory / "model", name), directory / "media")
        return made[name]

    return world


def network_of(world: OmniWorld) -> Any:
    spec = dataclasses.replace(make_spec(world.model), media_dir=world.store.directory)
    return build_network(spec, torch.float32)


def predict(network: Any, batch: TrainingBatch) -> tuple[torch.Tensor, list[Any]]:
    """Log-probs of all tokens but the first, and the spans of the samples in them."""
    media = get_model_media(network.decoder)
    samples = [add_sample_positions(media, sample) for sample in batch.samples]
    ((blocks,),) = pack(samples, max_tokens=100_000, share_prefix=True, every_token=True)
    layout = build_layout(blocks, every_token=True)
    return network(layout, 1.0, LossRequirements()).logprobs, list(layout.spans)


@pytest.mark.parametrize("name", OMNI_MODELS)
def test_omni_packed_log_probs_and_gradients_are_those_of_transformers(worlds: Any, name: str) -> None:
    world = worlds(name)
    batch, network = omni_batch(world), network_of(world)
    found, spans = predict(network, batch)
    reference = transformers.AutoModelForImageTextToText.from_pretrained(world.model, dtype=torch.float32).eval()
    total = torch.zeros(())
    for span in spans:
        sample = batch.samples[span.index]
        expected = world.reference_logprobs(reference, sample.token_ids, sample.media)
        own = found[torch.from_numpy(span.prediction_index)]
        difference = float((own - expected[torch.from_numpy(span.token_index - 1)]).abs().max().detach())
        assert difference < 1e-5, sample.sample_id
        total = total + expected.sum()
    total.backward()
    sum(found[torch.from_numpy(span.prediction_index)].sum() for span in spans).backward()
    wanted = {key: p.grad for key, p in reference.named_parameters() if p.grad is not None}
    grads = {key: p.grad for key, p in network.root.named_parameters() if p.grad is not None}
    assert grads.keys() == wanted.keys()
    find_part = build_part_finder(network.root)
    for prefix, part in (
        ("audio_tower", "tower"),
        ("audio_tower", "projector"),
        ("visual", "tower"),
        ("visual", "projector"),
    ):
        keys = [key for key in wanted if key.startswith(prefix) and find_part(key) == part]
        assert keys, (prefix, part)
        assert relative_error({k: grads[k] for k in keys}, {k: wanted[k] for k in keys}) < 1e-5, (prefix, part)
    assert relative_error(grads, wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", OMNI_MODELS)
def test_omni_two_ranks_compute_what_one_computes(tmp_path: Path, name: str) -> None:
    world = OmniWorld.create(write_omni_model(tmp_path / name, name), tmp_path / f"{name} media")
    alone = {"": steps(world, {}), "other order": steps(world, {}, OTHER_ORDER)}
    run_ranks(run_rank, (tmp_path, (name,)), 2)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    assert {way for _, way in found} == {*WAYS, "other order"}
    for (_, way), mine in found.items():
        if way == "pp":
            assert "training.parallel.pp" in mine
            continue
        assert not isinstance(mine, str), (way, mine)
        metrics, expected = alone.get(way, alone[""])
        assert mine[1].keys() == expected.keys(), way
        assert mine[0] == pytest.approx(metrics, rel=1e-5, abs=1e-6), way
        assert relative_error(mine[1], expected) < 1e-5, way
