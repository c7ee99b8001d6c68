"""A small vision-language model: supervised fine-tuning, then GRPO on noisier images; shuffled images are the control.

    make bench NAME=vision                         # all: about an hour on one core with AMX
    make bench NAME=vision ARGS="--parts sft"      # a part; a later call continues with the models in --directory

    tower ─► projector, aligned with words ─► SmolLM2-135M with both, in SmolVLM's classes
                                                     └─► sft on clean images ─► grpo on noisy and clean images

Each image has 1 to 4 equal shapes, with questions about their color, shape and number (`_vision_data`). The sets:

    easy       images as in SFT
    hard       images with so much noise that the model after SFT often fails
    shuffled   easy questions, each with the image of another row: a model that reads images is right only by chance

Chance is the accuracy of the best answer to each question without an image: the mean of 1/4, 1/3 and 1/4. A model that
knows the frequencies of answers can be right a little more often: the other row may have the same answer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from _report import Stopwatch
from _vision_answers import generate_answers
from _vision_data import COLORS, COUNTS, SHAPES, write_rows
from _vision_model import build_vision_model
from _vision_parts import Figures, build_parser
from _vision_rollouts import measure_rollouts
from _vision_tower import align_tower, train_tower
from PIL import Image

import roll
from roll.pipelines.checkpoint_files import find_model_directory
from roll.tracking import Summary

NUM_ROWS = 3264
NUM_HELD_OUT = 480
SFT_NOISE, HARD_NOISE = 12.0, 180.0
CHANCE = (1 / len(COLORS) + 1 / len(SHAPES) + 1 / len(COUNTS)) / 3
PARTS = ("tower", "sft", "grpo", "rollouts")
SETS = ("easy", "hard", "shuffled")
SCALE_FACTOR = 4
"""An image has 4 tokens."""
PROMPTS_PER_STEP = 16


def write_data(directory: Path) -> dict[str, Path]:
    """Write the rows of every part, and return their files by name."""
    held_out = range(5_000_000, 5_000_000 + NUM_HELD_OUT)
    files = {
        "sft": (range(2_000_000, 2_000_000 + NUM_ROWS), SFT_NOISE, True, False),
        "train easy": (range(3_000_000, 3_000_000 + 4_000), SFT_NOISE, False, False),
        "train hard": (range(4_000_000, 4_000_000 + 4_000), HARD_NOISE, False, False),
        "easy": (held_out, SFT_NOISE, False, False),
        "hard": (held_out, HARD_NOISE, False, False),
        "shuffled": (held_out, SFT_NOISE, False, True),
    }
    directory.mkdir(parents=True, exist_ok=True)
    found: dict[str, Path] = {}
    for name, (seeds, noise, answered, shuffled) in files.items():
        found[name] = directory / f"{name.replace(' ', '-')}.jsonl"
        if not found[name].exists():
            write_rows(found[name], seeds, noise=noise, answered=answered, shuffled=shuffled)
    return found


def measure_accuracies(model: Path, files: dict[str, Path]) -> dict[str, float]:
    """Return the accuracy of a model, or of the last checkpoint of a run, on each set."""
    found = {}
    for name in SETS:
        rows = [json.loads(line) for line in files[name].read_text().splitlines()]
        prompts = [
            (
                Image.open(files[name].parent / row["images"][0]).convert("RGB"),
                row["prompt"][0]["content"].removeprefix("<image>"),
            )
            for row in rows
        ]
        answers = generate_answers(find_model_directory(model) or model, prompts, max_new_tokens=3)
        right = [answer.lower() == row["answer"] for answer, row in zip(answers, rows, strict=True)]
        found[name] = round(sum(right) / len(right), 4)
    return found


def fine_tune(base: Path, files: dict[str, Path], directory: Path) -> Summary:
    """Train all weights on clean images with their answers."""
    shutil.rmtree(directory / "sft", ignore_errors=True)
    return roll.train(
        {
            "pipeline": "sft",
            "name": "sft",
            "model": {"path": str(base), "dtype": "bfloat16"},
            "data": [{"source": "file", "path": str(files["sft"]), "held_out": 0.02}],
            "training": {
                "num_threads": torch.get_num_threads(),  # of OMP_NUM_THREADS, as for the tower
                "num_epochs": 1,
                "examples_per_step": 16,
                "learning_rate": 1e-4,
                "schedule": "cosine",
                "warmup_steps": 10,
            },
            "evaluation": {"every_num_steps": 0, "before_training": False},
            "output_dir": str(directory),
        }
    )


def reinforce(model: Path, files: dict[str, Path], directory: Path, name: str, seed: int, options: Any) -> None:
    """Train tower and projector with GRPO on noisy and clean images."""
    shutil.rmtree(directory / name, ignore_errors=True)
    data = [
        {
            "source": "file",
            "domain": domain,
            "path": str(files[f"train {domain}"]),
            "held_out_path": str(files[domain]),
            "reward": {"type": "exact", "ignore_case": True},
            "weight": weight,
        }
        for domain, weight in (("easy", options.easy), ("hard", 1 - options.easy))
    ]
    roll.train(
        {
            "pipeline": "rlvr",
            "name": name,
            "seed": seed,
            "model": {"path": str(model), "dtype": "bfloat16", "vision": {"freeze": ["language_model"]}},
            "data": data,
            "rollout": {"prompts_per_step": PROMPTS_PER_STEP, "group_size": 8, "max_new_tokens": 3},
            # Most groups of easy prompts have equal rewards. They are kept if the KL penalty applies to them.
            "algorithm": {
                "type": "grpo",
                "kl": {"coefficient": options.kl, "estimator": "full"},
                "filters": {"skip_zero_variance": not options.kl},
            },
            "training": {
                "num_threads": torch.get_num_threads(),
                "num_steps": options.steps,
                "learning_rate": options.rate,
                "schedule": "linear",
                "warmup_steps": 4,
            },
            # A few prompts only: `measure_accuracies` evaluates the exported model on all of them.
            "evaluation": {"every_num_steps": 0, "before_training": False, "num_prompts": 4, "samples_per_prompt": 1},
            "weight_sync": {"probe_every_num_steps": 12},
            "inference": {"engine": "hf", "max_num_seqs": 128},
            "output_dir": str(directory),
        }
    )


def main() -> None:
    """Run the parts, and write their figures."""
    parser = build_parser(__doc__, PARTS, directory=Path("runs/vision"), tower_seconds=240.0, rate=1e-4, steps=360)
    parser.add_argument("--kl", type=float, default=0.0, help="coefficient of the KL penalty")
    parser.add_argument("--easy", type=float, default=0.5, help="share of easy prompts in GRPO")
    chosen = parser.parse_args()
    if "rollouts" in chosen.parts:
        measure_rollouts(chosen.directory / "rollouts")  # writes results of its own
        if chosen.parts == ["rollouts"]:
            return
    files = write_data(chosen.directory / "data")
    tower, encoder = chosen.directory / "tower.safetensors", chosen.directory / "encoder.safetensors"
    base, sft = chosen.directory / "base", chosen.directory / "sft"
    figures = Figures("vision", chosen.directory, chance=round(CHANCE, 4))
    if "tower" in chosen.parts:
        watch = Stopwatch()
        figures.add("tower", train_tower(tower, chosen.tower_seconds) | watch.read())
        watch = Stopwatch()
        figures.add("projector", align_tower(encoder, tower, SCALE_FACTOR, chosen.tower_seconds / 10) | watch.read())
    if "sft" in chosen.parts:
        build_vision_model(base, encoder, scale_factor=SCALE_FACTOR)
        watch = Stopwatch()
        fine_tune(base, files, chosen.directory)
        seconds = watch.read()
        figures.add("sft", measure_accuracies(sft, files) | seconds)
    for seed in chosen.seeds if "grpo" in chosen.parts else ():
        name = f"grpo-easy{chosen.easy:g}-kl{chosen.kl:g}-rate{chosen.rate:g}-steps{chosen.steps}-seed{seed}"
        watch = Stopwatch()
        reinforce(sft, files, chosen.directory, name, seed, chosen)
        seconds = watch.read()
        figures.add(name, measure_accuracies(chosen.directory / name, files) | seconds)
    figures.report()


if __name__ == "__main__":
    main()
