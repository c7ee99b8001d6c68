"""A flow model of digits, then Flow-GRPO and Reward-FL to one class: read by another classifier, and how diverse.

    make bench NAME=diffusion                                    # all: 15 minutes on one core
    make bench NAME=diffusion ARGS="--parts base flow-grpo"      # a part; a later call continues in --directory

    base         digits-base.yaml: flow matching on images with prompts
    flow-grpo    digits-grpo.yaml: from the empty prompt, which draws any digit, to threes; a run for each seed
    reward-fl    digits-reward-gradient.yaml: the same with the gradient of a reward
    …-no-kl      each without the KL penalty, for contrast

All runs are `roll train` with an example's configuration. The figures come from 500 ODE samples with new noise, and
from a classifier of another kind that was trained on other images than the one of the reward.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _diffusion_measures import (
    DIGIT,
    draw_picture,
    draw_samples,
    load_example,
    load_real_digits,
    measure_prompts,
    measure_threes,
)
from _gallery import ROLL
from _report import ROOT, Stopwatch, measure_matmul_rate, report

EXAMPLES = ROOT / "examples" / "diffusion"
PICTURE = ROOT / "docs" / "benchmarks" / "diffusion.png"
PARTS = {
    "flow-grpo": ("digits-grpo.yaml", ()),
    "reward-fl": ("digits-reward-gradient.yaml", ()),
    "flow-grpo-no-kl": ("digits-grpo.yaml", ("algorithm.kl_coefficient=0",)),
    "reward-fl-no-kl": ("digits-reward-gradient.yaml", ("algorithm.kl_coefficient=0",)),
}
"""Example and changed keys of every part that begins with the base model."""
LABELS = {
    "flow-grpo": "Flow-GRPO",
    "reward-fl": "Reward-FL",
    "flow-grpo-no-kl": "Flow-GRPO, no KL",
    "reward-fl-no-kl": "Reward-FL, no KL",
}
NUM_SAMPLES = 500
NUM_STEPS, NUM_STEPS_OF_BASE = 10, 20
"""Denoising steps of samples, as in the examples."""


def train(example: str, name: str, directory: Path, changes: Sequence[str]) -> dict[str, int]:
    """Run `roll train` in a process of its own; return its CPU time and wall-clock time."""
    settings = [f"name={name}", f"output_dir={directory}", "tracking.console=plain", *changes]
    shutil.rmtree(directory / name, ignore_errors=True)
    watch = Stopwatch()
    with (directory / f"{name}.log").open("w") as log:
        command = [*ROLL, "train", str(EXAMPLES / example), *settings]
        subprocess.run(command, check=True, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    return watch.read()


def find_weights(run: Path) -> Path:
    """Return the directory of a run's last weights."""
    return sorted(run.glob("checkpoints/step-*/model"))[-1]


def main() -> None:
    """Run the parts, and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/diffusion"), help="data and runs")
    parser.add_argument("--parts", nargs="*", default=["base", *PARTS], choices=["base", *PARTS], help="parts to run")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3], help="seeds; parts without KL use the first")
    parser.add_argument("--set", nargs="*", default=[], help="changed keys of all parts but `base`")
    chosen = parser.parse_args()
    directory = chosen.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    notes = directory / "figures.json"
    figures: dict[str, Any] = json.loads(notes.read_text()) if notes.exists() else {}

    def note(name: str, value: Any) -> None:
        figures[name] = value
        notes.write_text(json.dumps(figures, indent=2))
        print(name, json.dumps(value), flush=True)

    if chosen.parts:  # a call without parts measures the runs of earlier calls
        note("matmul_gflops", measure_matmul_rate())
    if "base" in chosen.parts:
        load_example().write_data(directory / "digits")
        seconds = train("digits-base.yaml", "base", directory, [f"data.0.path={directory}/digits/digits.jsonl"])
        note("base seconds", seconds)
    weights = find_weights(directory / "base")
    prompts = [str(i % 10) for i in range(NUM_SAMPLES)]
    as_prompted = measure_prompts(draw_samples(weights, prompts, NUM_STEPS_OF_BASE), prompts)
    empty = [""] * NUM_SAMPLES
    base = {
        "read_as_prompt": as_prompted,
        "empty_prompt": measure_threes(draw_samples(weights, empty, NUM_STEPS)),
        "prompt_of_class": measure_threes(draw_samples(weights, [str(DIGIT)] * NUM_SAMPLES, NUM_STEPS)),
    }
    note("base", base)
    for part, (example, changes) in PARTS.items():
        if part not in chosen.parts:
            continue
        for seed in chosen.seeds[:1] if part.endswith("no-kl") else chosen.seeds:
            name = f"{part}-{seed}"
            settings = [f"model.weights={weights}", f"seed={seed}", *changes, *chosen.set]
            seconds = train(example, name, directory, settings)
            found = measure_threes(draw_samples(find_weights(directory / name), empty, NUM_STEPS))
            note(name, found | seconds)
    rows = {"real threes": load_real_digits(DIGIT)[::7], "base model": draw_samples(weights, empty[:24], NUM_STEPS)}
    for part, label in LABELS.items():
        for run in sorted(directory.glob(f"{part}-[0-9]*/checkpoints")):
            rows.setdefault(label, draw_samples(find_weights(run.parent), empty[:24], NUM_STEPS))
    draw_picture(rows, PICTURE)
    report("diffusion", figures)


if __name__ == "__main__":
    main()
