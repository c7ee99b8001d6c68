"""Screens of `gui:Click-v0-easy`: conversations of a player that often clicks wrongly, and pixels with labels."""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _vision_answers import generate_answers
from PIL import Image

from roll.envs import make
from roll.envs.worlds.screen import COLORS, SHAPES
from roll.types import ImageData

ENVIRONMENT = "gui:Click-v0-easy"
SIZE, NUM_ROWS = 64, 4
SCREEN: dict[str, Any] = {
    "width": SIZE,
    "height": SIZE,
    "rows": NUM_ROWS,
    "columns": 1,
    "num_widgets": NUM_ROWS,
    "max_turns": 1,
    "scale": 4,
    "describe_frame": False,
}
"""Options of the environment: a menu of four rows, each with a widget of 45 × 11 pixels. Clicks are positions of a grid
of 4 × 4, of which a widget always covers the two in the middle of its row."""
BEST_CONSTANT_CLICK = 1 / NUM_ROWS
"""Probability that a click without the screen is in the target."""
_WIDGET = re.compile(r"(\w+) (\w+) (\d+),(\d+);")


def write_episodes(path: Path, seeds: Sequence[int], *, wrong: float) -> Path:
    """Write a JSON Lines file of conversations in which a player clicks on all four widgets of a screen.

    Args:
        path: The file; its images are written next to it.
        seeds: Seeds of the screens.
        wrong: The probability that a click is in the first row, whatever the task.
    """
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    env = make(ENVIRONMENT, SCREEN | {"num_targets": SCREEN["num_widgets"], "max_turns": SCREEN["num_widgets"]})
    lines = []
    for seed in seeds:
        image, names = _split_observation(env.reset(seed=seed)[0])
        (folder / f"{seed}.png").write_bytes(image)
        chance, messages = random.Random(seed), []
        for place, name in enumerate(names):
            right = env.solution()
            row = 0 if chance.random() < wrong else int(right[-2])
            messages += [
                {"role": "user", "content": f"{'' if place else '<image>'}Click the {name}."},
                {"role": "assistant", "content": f"click(1,{row})"},
            ]
            env.step(right)
        lines.append(json.dumps({"images": [f"{folder.name}/{seed}.png"], "messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


def measure_clicks(model: Path, seeds: Sequence[int], *, shuffled: bool) -> float:
    """Return the fraction of a model's clicks that are in the target, for the episodes of some seeds.

    Args:
        model: A directory of Hugging Face files.
        seeds: Seeds of the episodes, each with one click.
        shuffled: Whether each screenshot is that of another episode.
    """
    env = make(ENVIRONMENT, SCREEN | {"shuffled": shuffled})
    prompts = []
    for seed in seeds:
        image, text = env.reset(seed=seed)[0]
        prompts.append((Image.open(io.BytesIO(image.data)).convert("RGB"), text.text))
    hits = 0
    for seed, answer in zip(seeds, generate_answers(model, prompts, max_new_tokens=10), strict=True):
        env.reset(seed=seed)
        hits += env.step(answer)[1] == 1.0
    return round(hits / len(seeds), 4)


class LabeledScreens(NamedTuple):
    """Screens, with the widget in whose box the center of each patch is."""

    pixels: np.ndarray
    """uint8 [screens, 3, height, width]."""
    colors: np.ndarray
    """int64 [screens, patches], an index of `COLORS`; the number of colors without a widget."""
    shapes: np.ndarray
    """int64 [screens, patches], an index of `SHAPES`; the number of shapes without a widget."""
    captions: list[list[str]]
    """The words of each screen, four for each row from the top: color, shape, number of the row, line break."""


def draw_labeled_screens(seeds: Sequence[int], patch: int) -> LabeledScreens:
    """Draw the screens of some seeds, and label their patches of `patch` × `patch` pixels."""
    env = make(ENVIRONMENT, SCREEN)
    middles = np.arange(patch // 2, SIZE, patch)
    pixels = np.zeros((len(seeds), 3, SIZE, SIZE), np.uint8)
    colors = np.full((len(seeds), len(middles), len(middles)), len(COLORS))
    shapes = np.full(colors.shape, len(SHAPES))
    captions = []
    width, height = round(SIZE * 0.7), round(SIZE / NUM_ROWS * 0.7)
    for index, seed in enumerate(seeds):
        observation, info = env.reset(seed=seed)
        image, _ = _split_observation(observation)
        pixels[index] = np.asarray(Image.open(io.BytesIO(image))).transpose(2, 0, 1)
        words = {}
        for color, shape, left, top in _WIDGET.findall(info["state"]):
            x, y = int(left), int(top)
            row = y * NUM_ROWS // SIZE
            words[row] = [f" {color}", f" {shape}", str(row), "\n"]
            inside = np.ix_((middles >= y) & (middles < y + height), (middles >= x) & (middles < x + width))
            colors[index][inside], shapes[index][inside] = list(COLORS).index(color), SHAPES.index(shape)
        captions.append([word for row in sorted(words) for word in words[row]])
    return LabeledScreens(pixels, colors.reshape(len(seeds), -1), shapes.reshape(len(seeds), -1), captions)


def _split_observation(observation: Any) -> tuple[bytes, list[str]]:
    """Return the PNG of an observation, and the names of the targets in its text."""
    image, text = observation
    assert isinstance(image, ImageData)
    return image.data, re.findall(r"the (\w+ \w+)", text.text)
