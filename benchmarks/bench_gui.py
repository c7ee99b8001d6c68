"""A small vision-language model learns to click on a named widget of a screenshot: SFT, then GRPO in `gui:Click`.

    make bench NAME=gui                         # all: about 50 minutes on one core with AMX
    make bench NAME=gui ARGS="--parts grpo"     # a part; a later call continues with the models in --directory

    tower ─► projector, aligned with words ─► SmolLM2-135M with both, in SmolVLM's classes
                                                 └─► sft on clicks, many of them wrong ─► grpo in the environment

A screen has four rows, each with a widget of another color or shape at a random position. The task is `Click the red
circle.`, and the policy answers `click(1,3)` for the last row. The sets:

    screens    episodes that no phase trained on
    shuffled   the same tasks, each with the screenshot of another episode

Chance is the probability that a click without the screenshot is in the target.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from _report import Stopwatch
from _screen_data import BEST_CONSTANT_CLICK, ENVIRONMENT, SCREEN, measure_clicks, write_episodes
from _vision_model import build_vision_model
from _vision_parts import Figures, build_parser
from _vision_tower import align_screen_tower, train_screen_tower

import roll
from roll.pipelines.checkpoint_files import find_model_directory

NUM_EPISODES, NUM_HELD_OUT = 20_000, 300
PARTS = ("tower", "sft", "grpo")
SETS = ("screens", "shuffled")
SCALE_FACTOR = 2
"""An image has 16 tokens."""


def evaluate(model: Path) -> dict[str, float]:
    """Return the fraction of clicks in the target for a model, or for the last checkpoint of a run, on each set."""
    model = find_model_directory(model) or model
    seeds = range(NUM_EPISODES, NUM_EPISODES + NUM_HELD_OUT)
    return {name: measure_clicks(model, seeds, shuffled=name == "shuffled") for name in SETS}


def fine_tune(base: Path, directory: Path, options: argparse.Namespace) -> None:
    """Train all weights on conversations in which many clicks are in the first row, whatever the task."""
    rows = write_episodes(
        directory / "data" / "sft.jsonl", range(2_000_000, 2_000_000 + options.screens), wrong=options.wrong
    )
    shutil.rmtree(directory / "sft", ignore_errors=True)
    roll.train(
        {
            "pipeline": "sft",
            "name": "sft",
            "model": {"path": str(base), "dtype": "bfloat16"},
            "data": [{"source": "file", "path": str(rows), "held_out": 0.02}],
            "training": {
                "num_threads": torch.get_num_threads(),  # of OMP_NUM_THREADS, as for the tower
                "num_epochs": 1,
                "examples_per_step": 8,
                "learning_rate": options.sft_rate,
                "schedule": "cosine",
                "warmup_steps": 5,
            },
            "evaluation": {"every_num_steps": 0, "before_training": False},
            "output_dir": str(directory),
        }
    )


def reinforce(model: Path, directory: Path, name: str, seed: int, options: argparse.Namespace) -> None:
    """Train all weights with GRPO on episodes."""
    shutil.rmtree(directory / name, ignore_errors=True)
    environment = {
        "environment": ENVIRONMENT,
        "options": SCREEN,
        "num_turns": SCREEN["max_turns"],
        "num_episodes": NUM_EPISODES,
        "num_held_out": 8,
    }
    roll.train(
        {
            "pipeline": "agentic",
            "name": name,
            "seed": seed,
            "model": {"path": str(model), "dtype": "bfloat16"},
            "environments": [environment],
            "rollout": {"prompts_per_step": 12, "group_size": 8, "max_new_tokens": 10},
            "algorithm": {
                "type": "grpo",
                "entropy": {"coefficient": options.entropy},
                "filters": {"skip_zero_variance": not options.entropy},
            },
            "training": {
                "num_threads": torch.get_num_threads(),
                "num_steps": options.steps,
                "learning_rate": options.rate,
                "schedule": "linear",
                "warmup_steps": 4,
            },
            # A few prompts only: `evaluate` measures the exported model on more.
            "evaluation": {"every_num_steps": 0, "before_training": False, "num_prompts": 4, "samples_per_prompt": 1},
            "weight_sync": {"probe_every_num_steps": 12},
            "inference": {"engine": "hf", "max_num_seqs": 128, "max_context": 256},
            "output_dir": str(directory),
        }
    )


def main() -> None:
    """Run the parts, and write their figures."""
    parser = build_parser(__doc__, PARTS, directory=Path("runs/gui"), tower_seconds=100.0, rate=2e-5, steps=100)
    parser.add_argument("--screens", type=int, default=800, help="screens of SFT, with four clicks each")
    parser.add_argument("--wrong", type=float, default=0.5, help="share of the clicks of SFT in the first row, unread")
    parser.add_argument("--sft-rate", type=float, default=1e-4, help="learning rate of SFT")
    parser.add_argument("--entropy", type=float, default=0.1, help="coefficient of the entropy bonus of GRPO")
    chosen = parser.parse_args()
    tower, encoder = chosen.directory / "tower.safetensors", chosen.directory / "encoder.safetensors"
    base, sft = chosen.directory / "base", chosen.directory / "sft"
    figures = Figures("gui", chosen.directory, chance=BEST_CONSTANT_CLICK)
    if "tower" in chosen.parts:
        watch = Stopwatch()
        if not tower.exists():
            figures.add("tower", train_screen_tower(tower, chosen.tower_seconds) | watch.read())
        watch = Stopwatch()
        aligned = align_screen_tower(encoder, tower, SCALE_FACTOR, chosen.tower_seconds / 2)
        figures.add("projector", aligned | watch.read())
    if "sft" in chosen.parts:
        build_vision_model(base, encoder, scale_factor=SCALE_FACTOR)
        watch = Stopwatch()
        fine_tune(base, chosen.directory, chosen)
        seconds = watch.read()
        figures.add("sft", evaluate(sft) | seconds)
    for seed in chosen.seeds if "grpo" in chosen.parts else ():
        name = f"grpo-entropy{chosen.entropy:g}-rate{chosen.rate:g}-steps{chosen.steps}-seed{seed}"
        watch = Stopwatch()
        reinforce(sft, chosen.directory, name, seed, chosen)
        seconds = watch.read()
        figures.add(name, evaluate(chosen.directory / name) | seconds)
    figures.report()


if __name__ == "__main__":
    main()
