"""Faults with images that are planted one at a time: each changes log-probs, and none is there without the plant."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from training_helpers import make_spec
from worlds.vision_models import VisionWorld, picture, write_vision_model

from roll.data import ChatRenderer
from roll.data.examples import samples as sample_building
from roll.data.examples.samples import SampleBuilder
from roll.data.media_text import MediaText
from roll.models import load_tokenizer
from roll.models.multimodal import MediaInputs, MediaProcessor, model_media
from roll.pipelines.supervised import output_store
from roll.pipelines.supervised.output_store import OutputStore, build_rows
from roll.training import TorchBackend
from roll.training.packing import blocks
from roll.types import (
    Conversation,
    Example,
    ExampleDraw,
    ImagePart,
    IntArray,
    MediaSpan,
    Message,
    TextPart,
    TrainingBatch,
    TrainingSample,
)

pytestmark = pytest.mark.integration

NAMES = ("llava", "qwen3-vl")


@pytest.fixture(scope="module", name="world", params=NAMES)
def _world(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> VisionWorld:
    """A world of images of one size: all have the same tokens."""
    directory = tmp_path_factory.mktemp("vision")
    world = VisionWorld.create(write_vision_model(directory / "model", request.param), directory / "media")
    digests = tuple(world.store.add_image(picture(seed, 40, 56)) for seed in range(20, 24))
    return dataclasses.replace(world, digests=digests)


def build_sample(world: VisionWorld, name: str, images: Sequence[int], unit: int = 0) -> TrainingSample:
    text = " and ".join(["{}"] * len(images)) + ", what?"
    prompt, media = world.prompt(text, *images)
    tokens = np.concatenate([prompt, np.arange(30, 38)]).astype(np.int32)
    return TrainingSample(
        sample_id=name,
        unit=unit,
        prefix_length=len(prompt),
        token_ids=tokens,
        loss_mask=np.arange(len(tokens)) >= len(prompt),
        media=media,
    )


def open_backend(world: VisionWorld) -> TorchBackend:
    return TorchBackend(dataclasses.replace(make_spec(world.model), media_dir=world.store.directory))


def measure_error(world: VisionWorld, backend: TorchBackend, samples: Sequence[TrainingSample]) -> float:
    """Return the largest difference of a batch's log-probs from those of transformers alone."""
    found = backend.forward(TrainingBatch(samples=tuple(samples)), ["logprobs"])["logprobs"]
    reference = transformers.AutoModelForImageTextToText.from_pretrained(world.model, dtype=torch.float32).eval()
    errors = []
    for sample, own in zip(samples, found, strict=True):
        with torch.no_grad():
            expected = world.reference_logprobs(reference, sample.token_ids, sample.media).numpy()
        mask = sample.loss_mask
        errors.append(np.abs(own[mask] - expected[mask[1:]]).max())
    return float(max(errors))


def ignore_media(token_ids: IntArray, media: Sequence[MediaSpan] = ()) -> IntArray:
    return token_ids


@pytest.mark.parametrize("images", [[(0,), (1,)], [(0, 1), (1, 0)]], ids=["other", "swapped"])
def test_media_faults_a_group_of_equal_tokens_with_other_images(
    world: VisionWorld, monkeypatch: pytest.MonkeyPatch, images: list[tuple[int, ...]]
) -> None:
    """A prefix of equal tokens is shared only if its images are equal too."""
    samples = [build_sample(world, str(number), own) for number, own in enumerate(images)]
    assert np.array_equal(samples[0].token_ids, samples[1].token_ids)
    backend = open_backend(world)
    assert measure_error(world, backend, samples) < 1e-5
    monkeypatch.setattr(blocks, "build_sequence_key", ignore_media)
    assert measure_error(world, backend, samples) > 0.1


def build_pair(world: VisionWorld) -> tuple[TrainingSample, ...]:
    """Two conversations with equal texts, to one prompt with an image, that get different images later."""
    renderer = ChatRenderer(load_tokenizer(world.model), MediaText(MediaInputs(world.store, world.processor)))
    first, *later = (ImagePart(digest=digest) for digest in world.digests[:3])
    look, answer = (Message(role="assistant", content=text) for text in ("look", "darker"))
    question = Message(role="user", content=(first, TextPart(text="Darker than this?")))
    sides = tuple(
        Conversation(messages=(question, look, Message(role="user", content=(image,)), answer), num_prompt_messages=1)
        for image in later
    )
    example = Example(uid="d/0", domain="d", conversations=sides)
    built, _ = SampleBuilder(renderer=renderer).build_samples(ExampleDraw(draw_id=0, example=example, position=0))
    return built


def test_media_faults_a_pair_of_equal_tokens_with_other_images(
    world: VisionWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = build_pair(world)
    assert np.array_equal(pair[0].token_ids, pair[1].token_ids)
    assert [sample.media[1].digest for sample in pair] == list(world.digests[1:3])
    assert {sample.prefix_length for sample in pair} == {int(np.argmax(pair[0].loss_mask))}
    backend = open_backend(world)
    assert measure_error(world, backend, pair) < 1e-5
    monkeypatch.setattr(blocks, "build_sequence_key", ignore_media)
    assert measure_error(world, backend, pair) > 0.1
    monkeypatch.setattr(sample_building, "build_sequence_key", ignore_media)
    with pytest.raises(Exception, match="both answers have the same tokens"):
        build_pair(world)


def test_media_faults_kept_outputs_of_equal_tokens_with_other_images(
    world: VisionWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (build_sample(world, str(number), [number], number) for number in range(2))
    backend = open_backend(world)
    found = backend.forward(TrainingBatch(samples=(first, second)), ["logprobs"])["logprobs"]
    rows = [build_rows(logprobs=own[first.loss_mask].astype(np.float32)) for own in found]

    def keep_both() -> Any:
        store = OutputStore()
        for sample, own in zip((first, second), rows, strict=True):
            missing = store.find_missing([sample])
            store.add(missing, [own] * len(missing))
        return store.get_rows(second)

    assert np.array_equal(keep_both(), rows[1])
    monkeypatch.setattr(output_store, "build_sequence_key", ignore_media)
    kept = keep_both()
    assert np.abs(kept["logprobs"] - rows[1]["logprobs"]).max() > 0.1


def test_media_faults_images_in_another_order(world: VisionWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template's placeholders are in the order of the message; in another order they are other inputs."""
    messages = [
        Message(role="user", content=tuple(ImagePart(digest=digest) for digest in world.digests[:2])),
    ]

    def render() -> TrainingSample:
        renderer = ChatRenderer(load_tokenizer(world.model), MediaText(MediaInputs(world.store, world.processor)))
        encoded = renderer.encode(renderer.render_text(messages))
        return dataclasses.replace(
            build_sample(world, "0", ()),
            token_ids=encoded.token_ids,
            media=encoded.media,
            prefix_length=1,
            loss_mask=np.arange(len(encoded.token_ids)) > 0,
        )

    backend = open_backend(world)
    right = render()
    assert [span.digest for span in right.media] == list(world.digests[:2])
    expand = MediaProcessor.expand

    def swap(
        self: MediaProcessor, token_ids: IntArray, digests: Sequence[str], media: Mapping[str, Any], what: str = ""
    ) -> Any:
        return expand(self, token_ids, list(digests)[::-1], media, what)

    monkeypatch.setattr(MediaProcessor, "expand", swap)
    wrong = render()
    assert np.array_equal(wrong.token_ids, right.token_ids)
    assert measure_error(world, backend, [right]) < 1e-5
    one, other = (
        backend.forward(TrainingBatch(samples=(sample,)), ["logprobs"])["logprobs"][0] for sample in (right, wrong)
    )
    assert np.abs(one - other).max() > 0.1


def test_media_faults_positions_that_count_tokens(world: VisionWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = build_sample(world, "0", (0, 1))
    backend = open_backend(world)
    assert measure_error(world, backend, [sample]) < 1e-5
    monkeypatch.setattr(model_media, "compute_mrope_positions", lambda *_: None)
    error = measure_error(world, backend, [sample])
    assert error > 0.1 if "Qwen" in type(backend.model).__name__ else error < 1e-5


def test_media_faults_an_image_that_is_lost(world: VisionWorld) -> None:
    sample = build_sample(world, "0", (0,))
    backend = open_backend(world)
    assert measure_error(world, backend, [sample]) < 1e-5
    without = dataclasses.replace(sample, media=())
    one, other = (
        backend.forward(TrainingBatch(samples=(own,)), ["logprobs"])["logprobs"][0] for own in (sample, without)
    )
    assert np.abs(one - other).max() > 0.1
