"""Samples of the model of digits with new noise, and how many of them are threes, how different, and like how many."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from _report import ROOT
from numpy.typing import NDArray

from roll.diffusion.models import load_diffusion_model
from roll.diffusion.records import DenoisingSettings, SampleRequest
from roll.diffusion.sampling import PromptCache, Sampler

EXAMPLE = ROOT / "examples" / "diffusion" / "digits.py"
DIGIT = 3
FIRST_SEED = 10**9
"""Seeds of training are 64-bit hashes, so this noise is new."""

Pictures = NDArray[np.float64]
"""[N, 64] gray values in [0, 1]."""


def load_example() -> ModuleType:
    """Return the module of the example."""
    spec = importlib.util.spec_from_file_location("digits", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw_samples(weights: Path, prompts: list[str], num_steps: int) -> Pictures:
    """Return an ODE sample of the model for every prompt."""
    model = load_diffusion_model(f"{EXAMPLE}:DigitFlow", weights=str(weights))
    requests = [SampleRequest(sample_id=str(i), prompt=p, seed=FIRST_SEED + i) for i, p in enumerate(prompts)]
    paths = Sampler(model, PromptCache(model)).sample(requests, DenoisingSettings(num_steps=num_steps))
    images = np.stack([path.images for path in paths if path.images is not None])
    return images.reshape(len(paths), -1) / 255


def load_real_digits(digit: int) -> Pictures:
    """Return all of scikit-learn's pictures of a digit."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    return load_example().to_bytes(digits.images[digits.target == digit]).reshape(-1, 64) / 255


def compute_pairwise_distance(pictures: Pictures) -> float:
    """Return the mean Euclidean distance of two different pictures."""
    squares = (pictures**2).sum(axis=1)
    found = (squares[:, None] + squares[None] - 2 * pictures @ pictures.T).clip(min=0)
    return float(np.sqrt(found[np.triu_indices(len(pictures), 1)]).mean())


def find_nearest(samples: Pictures, real: Pictures) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return for each sample the index of the nearest real picture, and the Euclidean distance from it."""
    squares = (samples**2).sum(axis=1)[:, None] + (real**2).sum(axis=1)[None] - 2 * samples @ real.T
    nearest = squares.argmin(axis=1)
    return nearest, np.sqrt(squares.min(axis=1).clip(min=0))


def measure_threes(samples: Pictures) -> dict[str, Any]:
    """Return the figures of samples that should be threes.

    `class` is the fraction that a classifier reads as threes that no training used; `reward_class` that of the
    classifier of Flow-GRPO's reward. `distance` is the mean distance of two samples, and `nearest_distance` that of a
    sample from the nearest real three; both are divided by the mean distance of two real threes. `distinct_nearest` is
    the number of real threes that are the nearest one of a sample.
    """
    example, real = load_example(), load_real_digits(DIGIT)
    read = example.train_classifier(1).predict(samples) == DIGIT
    scale = compute_pairwise_distance(real)
    nearest, distances = find_nearest(samples, real)
    return {
        "class": round(float(read.mean()), 4),
        "reward_class": round(float((example.train_classifier(0).predict(samples) == DIGIT).mean()), 4),
        "distance": round(compute_pairwise_distance(samples) / scale, 4),
        "distance_of_threes": round(compute_pairwise_distance(samples[read]) / scale, 4) if read.sum() > 1 else None,
        "distinct_nearest": len(set(nearest.tolist())),
        "nearest_distance": round(float(distances.mean()) / scale, 4),
        "distinct_samples": len({row.tobytes() for row in (samples * 255).round().astype(np.uint8)}),
    }


def measure_prompts(samples: Pictures, prompts: list[str]) -> float:
    """Return the fraction of samples that the independent classifier reads as the digit of their prompt."""
    read = load_example().train_classifier(1).predict(samples)
    return round(float(np.mean([str(found) == prompt for found, prompt in zip(read, prompts, strict=True)])), 4)


def draw_picture(rows: dict[str, Pictures], path: Path, columns: int = 20) -> None:
    """Write a picture with a labeled row of samples for each entry."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.5 * columns + 1.8, 0.55 * len(rows)), dpi=100, layout="constrained")
    grid = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for axes, (label, pictures) in zip(grid, rows.items(), strict=True):
        cells = np.ones((10, 10 * columns))
        for place, picture in enumerate(pictures[:columns]):
            cells[1:9, 10 * place + 1 : 10 * place + 9] = picture.reshape(8, 8)
        axes.imshow(cells, cmap="gray", vmin=0, vmax=1, aspect="equal", interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
        axes.spines[:].set_visible(False)
    FigureCanvasAgg(figure)
    figure.savefig(path, bbox_inches="tight", pad_inches=0.05)
