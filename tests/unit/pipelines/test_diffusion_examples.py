"""The examples of diffusion models: their configurations load and run, and the classifiers of rewards read digits."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from worlds.modules import load_module

import roll
from roll.config.load import load_config

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples" / "diffusion").glob("*.yaml"))
SMALL = [
    "training.num_steps=1",
    "training.prompts_per_step=1",
    "evaluation.samples_per_prompt=2",
    "evaluation.num_prompts=1",
    "tracking.console=quiet",
]


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    pytest.importorskip("sklearn")
    return load_module(EXAMPLES[0].parent / "digits.py")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_diffusion_examples_load(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(example)
    assert config.pipeline == "diffusion" and config.name == example.stem


def test_diffusion_examples_run_one_after_the_other(
    digits: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    digits.write_data(tmp_path / "digits")
    changes = [*SMALL, f"output_dir={tmp_path}"]
    own = ["training.warmup_steps=0", f"data.0.path={tmp_path}/digits/digits.jsonl"]
    roll.train(EXAMPLES[0], overrides=[*changes, *own])
    weights = tmp_path / "digits-base" / "checkpoints" / "step-000001" / "model"
    for example in EXAMPLES[1:]:
        count = "algorithm.samples_per_prompt=3"
        summary = roll.train(example, overrides=[*changes, count, f"model.weights={weights}"])
        assert summary.num_steps == 1


def test_diffusion_examples_classifiers_of_rewards_read_images_that_they_were_not_trained_on(
    digits: ModuleType,
) -> None:
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels, others = digits.to_bytes(found.images)[1::2], found.target[1::2] == 3
    given = torch.from_numpy(pixels)[:, None].float() / 255
    given.requires_grad_()
    scores = digits.compute_log_probs_of_three(given, [""] * len(given))
    assert np.mean((scores.detach().exp().numpy() > 0.5) == others) > 0.97
    (gradient,) = torch.autograd.grad(scores.sum(), given)
    assert torch.all(gradient.flatten(1).norm(dim=1) > 0)
    image = Image.fromarray(pixels[np.flatnonzero(others)[0]])
    assert digits.is_three(image, "", {}) > 0.5
    judged = [
        digits.looks_like_three(Image.fromarray(image), "", {}) for image in digits.to_bytes(found.images)[:200:2]
    ]
    assert np.mean(np.array(judged) == (found.target[:200:2] == 3)) > 0.97
