"""Images of colored shapes with questions about them, and rows for the pipelines `sft` and `rlvr`."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 205, 50)}
SHAPES = ("circle", "square", "triangle")
COUNTS = (1, 2, 3, 4)
SIZE = 64
QUESTIONS = {"color": "Color?", "shape": "Shape?", "count": "Count?"}


@dataclass(frozen=True)
class Scene:
    """What an image shows."""

    color: str
    shape: str
    count: int

    def answer(self, question: str) -> str:
        """Return the answer to a question of `QUESTIONS`."""
        return str(getattr(self, question))


def draw_scene(seed: int, noise: float = 0.0) -> tuple[Image.Image, Scene]:
    """Return a random image and what it shows; `noise` is the standard deviation of the pixels' noise, 0 … 255."""
    rng = np.random.default_rng(seed)
    scene = Scene(str(rng.choice(list(COLORS))), str(rng.choice(SHAPES)), int(rng.choice(COUNTS)))
    image = Image.new("RGB", (SIZE, SIZE), tuple(int(v) for v in rng.integers(0, 60, 3)))
    draw = ImageDraw.Draw(image)
    cells = rng.permutation(9)[: scene.count]
    for cell in cells:
        radius = int(rng.integers(6, 9))
        x = int(cell % 3) * 21 + 11 + int(rng.integers(-2, 3))
        y = int(cell // 3) * 21 + 11 + int(rng.integers(-2, 3))
        _draw_shape(draw, scene.shape, x, y, radius, COLORS[scene.color])
    if noise:
        pixels = np.asarray(image, np.float64) + rng.normal(0, noise, (SIZE, SIZE, 3))
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    return image, scene


def _draw_shape(draw: Any, shape: str, x: int, y: int, radius: int, color: tuple[int, int, int]) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        draw.ellipse(box, fill=color)
    elif shape == "square":
        draw.rectangle(box, fill=color)
    else:
        draw.polygon([(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)], fill=color)


def write_rows(path: Path, seeds: Sequence[int], *, noise: float = 0.0, answered: bool, shuffled: bool = False) -> Path:
    """Write a JSON Lines file of questions about images, and the images next to it.

    Args:
        path: The file.
        seeds: Seeds of the images; for prompts, the question is chosen by the seed.
        noise: See `draw_scene`.
        answered: Whether rows are conversations for SFT, with all questions about an image in random order and their
            answers. Otherwise each row is a prompt with one question, and its answer.
        shuffled: Whether each question shows the image of another row, so that only answer statistics help.
    """
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for place, seed in enumerate(seeds):
        image, scene = draw_scene(seed, noise)
        name = f"{seed}-{noise:g}.png"
        encoded = io.BytesIO()
        image.save(encoded, "PNG")
        (folder / name).write_bytes(encoded.getvalue())
        other = seeds[(place + 1) % len(seeds)] if shuffled else seed
        row: dict[str, Any] = {"images": [f"{folder.name}/{other}-{noise:g}.png"]}
        if answered:
            order = np.random.default_rng(seed).permutation(list(QUESTIONS))
            turns = [(f"{'' if turn else '<image>'}{QUESTIONS[asked]}", asked) for turn, asked in enumerate(order)]
            row["messages"] = [
                message
                for content, asked in turns
                for message in (
                    {"role": "user", "content": content},
                    {"role": "assistant", "content": scene.answer(asked)},
                )
            ]
        else:
            asked = list(QUESTIONS)[seed % len(QUESTIONS)]
            row |= {
                "prompt": [{"role": "user", "content": f"<image>{QUESTIONS[asked]}"}],
                "answer": scene.answer(asked),
            }
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return path
