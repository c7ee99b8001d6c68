"""Critics, references and teachers see the images of a batch as the policy does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from critic_helpers import VALUE_LOSS, valued
from training_helpers import make_spec, relative_error, values_of
from worlds.vision_batches import media_batch
from worlds.vision_models import VISION_MODELS, VisionWorld, write_vision_model

from roll.algorithms.losses import DistillationLoss, PolicyLoss
from roll.config.model import VisionConfig
from roll.training import TorchBackend, TrainerSpec
from roll.types import Divergence, TrainingBatch, TrainingSample

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


def spec_of(world: VisionWorld, role: str, **settings: Any) -> TrainerSpec:
    spec = make_spec(world.model, max_tokens_per_micro_batch=300)
    return dataclasses.replace(spec, role=role, media_dir=world.store.directory, **settings)  # type: ignore[arg-type]


def load(path: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()


def reference_states(world: VisionWorld, model: Any, sample: TrainingSample) -> torch.Tensor:
    """Hidden states [L, H] after the last norm, by transformers alone."""
    states: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_pre_hook(lambda module, args: states.append(args[0][0]))
    world.reference_logprobs(model, sample.token_ids, sample.media)
    hook.remove()
    return states[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_media_roles_a_critic_sees_images_and_trains_its_tower(worlds: Any, tmp_path: Path, name: str) -> None:
    world = worlds(name)
    backend = TorchBackend(spec_of(world, "critic"))
    weight = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        backend.masters.get_full("score.weight").copy_(weight)
    backend.masters.refresh()
    batch = valued(media_batch(world, group_size=2))
    found = values_of(backend, batch)
    model = load(world.model)
    total = torch.zeros(())
    for sample, own in zip(batch.samples, found, strict=True):
        expected = reference_states(world, model, sample) @ weight[0]
        places = np.flatnonzero(sample.loss_mask)
        np.testing.assert_allclose(own[places], expected[places - 1].detach().numpy(), atol=1e-4, rtol=1e-5)
        assert sample.returns is not None and sample.old_values is not None
        target, old = (torch.from_numpy(column[places]) for column in (sample.returns, sample.old_values))
        values = expected[places - 1]
        clipped = values.clamp(old - 0.5, old + 0.5)
        total = total + 0.5 * torch.maximum((values - target) ** 2, (clipped - target) ** 2).sum()
    (total / batch.num_loss_tokens).backward()
    backend.train_step(batch, VALUE_LOSS)
    wanted = {key: p.grad for key, p in model.named_parameters() if p.grad is not None and "lm_head" not in key}
    parameters = backend.masters.parameters.items()  # some weights of towers are in no forward pass
    grads = {key: p.grad for key, p in parameters if p.grad is not None and not key.startswith("score")}
    assert grads.keys() == wanted.keys()
    assert sum("vision" in key or "visual" in key for key in grads) > 10
    assert relative_error(grads, wanted) < 1e-5
    after = values_of(backend, batch)
    backend.export(tmp_path / "critic")
    backend.save(tmp_path / "saved")
    other = TorchBackend(spec_of(world, "critic"))
    other.load(tmp_path / "saved")
    for one, two in zip(values_of(other, batch), after, strict=True):
        np.testing.assert_array_equal(one, two)


def test_media_roles_a_critic_has_frozen_parts_too(worlds: Any) -> None:
    world = worlds("smolvlm")
    spec = spec_of(world, "critic")
    vision = VisionConfig.model_validate({"freeze": ["tower"], "learning_rate_factors": {"projector": 0.5}})
    backend = TorchBackend(dataclasses.replace(spec, model=spec.model.model_copy(update={"vision": vision})))
    before = {key: weight.clone() for key, weight in backend.weights()}
    for _ in range(2):
        backend.train_step(valued(media_batch(world)), VALUE_LOSS)
    changed = {key for key, weight in backend.weights() if not weight.equal(before[key])}
    assert any("connector" in key for key in changed) and any("text_model" in key for key in changed)
    assert not any("vision_model" in key for key in changed)


@pytest.mark.parametrize("name", FAMILIES)
def test_media_roles_references_and_teachers_see_images(worlds: Any, tmp_path: Path, name: str) -> None:
    """As a trainer of their own, and as frozen models in the policy's trainer."""
    world = worlds(name)
    teacher = write_vision_model(tmp_path / "teacher", name, seed=1)
    batch = media_batch(world, group_size=1)
    own, other = load(world.model), load(teacher)

    def expected(model: Any) -> list[np.ndarray]:
        with torch.no_grad():
            return [world.reference_logprobs(model, s.token_ids, s.media).numpy() for s in batch.samples]

    def compare(found: list[Any], wanted: list[np.ndarray]) -> None:
        for sample, one, two in zip(batch.samples, found, wanted, strict=True):
            np.testing.assert_allclose(one[sample.loss_mask], two[sample.loss_mask[1:]], atol=1e-5)

    reference = TorchBackend(dataclasses.replace(spec_of(world, "reference"), model_path=str(teacher)))
    compare(reference.forward(batch, ["logprobs"])["logprobs"], expected(other))
    policy = TorchBackend(spec_of(world, "policy", holds_reference=True))
    still = [dataclasses.replace(s, advantages=np.zeros(len(s), np.float32)) for s in batch.samples]
    result = policy.train_step(TrainingBatch(samples=tuple(still)), PolicyLoss(kl_coefficient=1.0, kl_estimator="full"))
    assert abs(result.loss) < 1e-6  # before the first update, the policy is its reference
    indexed = TrainingBatch(samples=tuple(dataclasses.replace(sample, teacher=0) for sample in batch.samples))
    loss = DistillationLoss(divergence=Divergence(kind="forward"))
    student = TorchBackend(spec_of(world, "policy", teachers=(str(teacher),)))
    measured = student.train_step(indexed, loss).loss
    distances = []
    for sample in batch.samples:
        rows = []
        for model in (other, own):
            with torch.no_grad():
                logits = model.lm_head(reference_states(world, model, sample))
            rows.append(logits.double().log_softmax(-1)[np.flatnonzero(sample.loss_mask) - 1])
        distances.append((rows[0].exp() * (rows[0] - rows[1])).sum(-1))
    assert measured == pytest.approx(float(torch.cat(distances).mean()), rel=1e-4)
