"""Every algorithm on the quickstart task, same seed and settings: a table and a plot of how they learn.

    make bench NAME=sweep                        # 16 presets, one after the other; about 2 minutes each on 2 cores
    make bench NAME=sweep ARGS="grpo gspo"       # only these

Finished runs are kept in `runs/sweep/` and not run again; delete a run's directory to repeat it. The table and the plot
in `docs/benchmarks/` are written anew from all finished runs after each one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "sweep"
PAGE = ROOT / "docs" / "benchmarks" / "algorithms.md"
PLOT = ROOT / "docs" / "benchmarks" / "algorithms.png"
EXAMPLE = "examples/quickstart.yaml"
NUM_STEPS = 40
GOAL = 0.8

PRESETS = (
    "grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "opo", "dapo", "lite_ppo", "gspo",
    "gmpo", "cispo", "topr", "sapo", "ppo", "asy_ppo",
)  # fmt: skip
COMMON = (
    f"training.num_steps={NUM_STEPS}",
    "training.learning_rate=1e-5",
    "training.schedule=constant",
    "rollout.max_new_tokens=16",
    "checkpoint.at_end=false",
)
"""Answers to sums are short; the cut makes a run half as long."""


def run(name: str, example: str, runs: Path, changes: Sequence[str]) -> None:
    """Train on an example with some changes, unless that was done; the run's directory is `runs/name`."""
    if (runs / name / "summary.json").is_file():
        return
    overrides = [f"name={name}", f"output_dir={runs}", *changes]
    print(f"{name} ...", file=sys.stderr, flush=True)
    roll = Path(sys.executable).with_name("roll")
    done = subprocess.run([str(roll), "train", example, *overrides], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def record(run: Path, goal: float) -> dict[str, Any]:
    """Figures of a finished run."""
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if row["kind"] == "train"]
    reached = next((i + 1 for i in range(len(rewards)) if statistics.fmean(rewards[max(i - 2, 0) : i + 1]) >= goal), 0)
    return {
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "reward_last5": summary["reward_last5"],
        "steps_to_goal": reached,
        "seconds_per_step": summary["seconds_per_step"],
        "peak_gib": summary["peak_rss_bytes"] / 2**30,
        "rewards": rewards,
    }


def page(found: dict[str, dict[str, Any]]) -> str:
    """The table, as Markdown."""
    lines = [
        "# How the algorithms learn",
        "",
        "This page reports whether every [algorithm preset](../algorithms.md) learns. SmolLM2-135M is trained to",
        f"add two numbers with `examples/quickstart.yaml` and seed 0, in one run of {NUM_STEPS} steps per preset. All",
        "presets use their default settings. Answers have at most 16 tokens, and the learning rate is 1e-5. Accuracy "
        "is",
        "measured on held-out prompts at temperature 1.0, and truncated answers are treated as incorrect. One seed of",
        "one easy task is enough to show that each preset learns, but not to rank the presets.",
        "",
        "| preset | accuracy before training | accuracy after training | mean reward of the last 5 steps | "
        "steps until the 3-step mean reward reaches 0.8 | peak memory, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for preset, figures in found.items():
        reached = str(figures["steps_to_goal"] or "not reached")
        lines.append(
            f"| `{preset}` | {figures['accuracy_before']:.3f} | {figures['accuracy_after']:.3f} | "
            f"{figures['reward_last5']:.3f} | {reached} | {figures['peak_gib']:.1f} |"
        )
    repeat = "`make bench NAME=sweep` repeats the measurement."
    return "\n".join([*lines, "", "![Reward by step](algorithms.png)", "", repeat, ""])


def plot(found: dict[str, dict[str, Any]], path: Path, goal: float) -> None:
    """Reward curves, as means over three steps, with a line at the goal."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    styles = ("-", "--", ":")
    for index, (preset, figures) in enumerate(found.items()):
        rewards = figures["rewards"]
        smooth = [statistics.fmean(rewards[max(i - 2, 0) : i + 1]) for i in range(len(rewards))]
        axes.plot(range(1, len(smooth) + 1), smooth, styles[index // 10], label=preset, linewidth=1.4)
    axes.axhline(goal, color="grey", linewidth=0.6)
    axes.set(xlabel="step", ylabel="reward (mean of 3 steps)", ylim=(0, 1.02))
    axes.legend(ncols=2, fontsize=8)
    FigureCanvasAgg(figure).print_png(path)


def main() -> None:
    """Run what is missing, then write page, plot and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=PRESETS)
    presets = parser.parse_args().presets
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    for preset in presets:
        run(preset, EXAMPLE, RUNS, (f"algorithm.type={preset}", *COMMON))
        finished = [p for p in dict.fromkeys((*PRESETS, *presets)) if (RUNS / p / "summary.json").is_file()]
        found = {p: record(RUNS / p, GOAL) for p in finished}
        PAGE.write_text(page(found))
        plot(found, PLOT, GOAL)
    from _report import report

    report("algorithms", {p: {k: v for k, v in f.items() if k != "rewards"} for p, f in found.items()})


if __name__ == "__main__":
    main()
