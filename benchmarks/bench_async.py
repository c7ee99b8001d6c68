"""Asynchronous training against synchronous: the quickstart with a reward that takes five seconds.

    make bench NAME=async                      # async ratios 0, 1, 2, 8; about 5 minutes each on 2 cores
    make bench NAME=async ARGS="--steps 10"    # the speed alone

Every rollout's reward waits five seconds, as a judge or a test suite elsewhere would, and uses no processor here. A
ratio of 2 and 8 trains with losses for old data. Finished runs are kept in `runs/async/` and not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "async"
PAGE = ROOT / "docs" / "benchmarks" / "asynchronous.md"
PLOT = ROOT / "docs" / "benchmarks" / "asynchronous.png"
REWARD_S = 5.0
WARM_UP_STEPS = 2
CASES = {"0": "grpo", "1": "grpo", "2": "tis", "8": "decoupled_ppo"}
"""By async ratio: which algorithm trains."""


def train(ratio: str, num_steps: int) -> None:
    """One run, in this process."""
    import roll
    from roll.config.load import load_config
    from roll.rewards.compose import WeightedReward
    from roll.types import RewardResult, Rollout

    judge = WeightedReward.__call__

    async def slow(self: WeightedReward, rollout: Rollout) -> RewardResult:
        await asyncio.sleep(REWARD_S)
        return await judge(self, rollout)

    WeightedReward.__call__ = slow  # type: ignore[method-assign]
    overrides = [
        f"name=ratio-{ratio}",
        f"output_dir={RUNS}",
        f"algorithm.type={CASES[ratio]}",
        f"rollout.scheduling.async_ratio={float(ratio)}",
        f"training.num_steps={num_steps}",
        "training.learning_rate=1e-5",
        "training.schedule=constant",
        "rollout.max_new_tokens=16",
        "checkpoint.at_end=false",
    ]
    roll.train(load_config(ROOT / "examples" / "quickstart.yaml", overrides))


def record(ratio: str) -> dict[str, Any]:
    """Figures of a finished run."""
    path = RUNS / f"ratio-{ratio}"
    summary = json.loads((path / "summary.json").read_text())
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    return {
        "algorithm": CASES[ratio],
        "step_s": statistics.median(row["time/step_s"] for row in steps[WARM_UP_STEPS:]),
        "accuracy_after": summary["accuracy_after"],
        "staleness_mean": statistics.fmean(row["rollout/staleness_mean"] for row in steps),
        "staleness_max": max(row["rollout/staleness_max"] for row in steps),
        "rewards": [row["reward/mean"] for row in steps],
    }


def page(found: dict[str, dict[str, Any]], num_steps: int) -> str:
    """The table, as Markdown."""
    lines = [
        "# Asynchronous and synchronous training",
        "",
        "This page reports how much time asynchronous training saves if rewards are slow. SmolLM2-135M is trained to",
        f"add two numbers with `examples/quickstart.yaml` and seed 0. Each run has {num_steps} steps, on two CPU "
        "cores,",
        f"and answers have at most 16 tokens. Every reward function sleeps for {REWARD_S:g} s. The async ratio is",
        "`rollout.scheduling.async_ratio`. A ratio of 0 is synchronous training, the baseline of the speed-ups. Each "
        "row",
        "is a single training run, so differences between rows include run-to-run variance.",
        "",
        "| async ratio | algorithm | median step time, s | speed-up | mean staleness | maximum staleness | "
        "held-out accuracy after training |",
        "|---|---|---|---|---|---|---|",
    ]
    for ratio, figures in found.items():
        speed_up = found["0"]["step_s"] / figures["step_s"] if "0" in found else float("nan")
        lines.append(
            f"| {ratio} | `{figures['algorithm']}` | {figures['step_s']:.2f} | {speed_up:.2f} | "
            f"{figures['staleness_mean']:.2f} | {figures['staleness_max']:.0f} | {figures['accuracy_after']:.3f} |"
        )
    repeat = "`make bench NAME=async` repeats the measurement."
    return "\n".join([*lines, "", "![Reward by step](asynchronous.png)", "", repeat, ""])


def plot(found: dict[str, dict[str, Any]]) -> None:
    """Reward by step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for ratio, figures in found.items():
        rewards = figures["rewards"]
        smooth = [statistics.fmean(rewards[max(i - 2, 0) : i + 1]) for i in range(len(rewards))]
        axes.plot(range(1, len(smooth) + 1), smooth, label=f"async ratio {ratio} ({figures['algorithm']})")
    axes.set(xlabel="step", ylabel="reward (mean of 3 steps)", ylim=(0, 1.02))
    axes.legend()
    FigureCanvasAgg(figure).print_png(PLOT)


def main() -> None:
    """Run what is missing, then write page, plot and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ratios", nargs="*", default=list(CASES), metavar="RATIO", help=f"of {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--one", metavar="RATIO", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        train(arguments.one, arguments.steps)
        return
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    for ratio in arguments.ratios:
        if not (RUNS / f"ratio-{ratio}" / "summary.json").is_file():
            command = [sys.executable, __file__, "--one", ratio, "--steps", str(arguments.steps)]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                raise SystemExit(f"ratio {ratio} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found = {name: record(name) for name in CASES if (RUNS / f"ratio-{name}" / "summary.json").is_file()}
        PAGE.write_text(page(found, arguments.steps))
        plot(found)
        print(PAGE.read_text().split("|---", 1)[0].splitlines()[-1], *PAGE.read_text().splitlines()[10:-4], sep="\n")
    from _report import report

    report("async", {name: {k: v for k, v in f.items() if k != "rewards"} for name, f in found.items()})


if __name__ == "__main__":
    main()
