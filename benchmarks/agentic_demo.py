"""What agentic runs learn on this machine: three environments, one with a tool, one step by step, with several seeds.

    make bench NAME=agentic-demo                                everything, three seeds (hours, on two quiet cores)
    make bench NAME=agentic-demo ARGS="--only calculator --seeds 1"

Each begins with a model that was shown how an answer is written (`examples/agentic_*_first.yaml`, a minute or two of
`sft` on a scripted player's episodes); gains are counted from there, on seeds that neither saw. `guess_long` is the
same game with twice the turns, discounted, and `guess_long_undiscounted` the same run without: how often, and how soon,
each wins. Runs that are complete in `--directory` are read, not made again, so that a demonstration may be made in
parts; the page has all that are there.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _gallery import Recipe, arguments_for, course, draw, run_of, train_seconds, write_page
from _report import ROOT, report

PAGE = ROOT / "docs" / "benchmarks" / "agentic.md"
CURVES = ROOT / "docs" / "benchmarks" / "agentic.png"
ACCURACY = "eval/accuracy"
GAIN = 0.3
MOST_S = 1800.0
"""Of training for each seed, what it begins with included."""
LAST = 10
"""Steps over which turns are counted."""


@dataclass(frozen=True, kw_only=True)
class Demo(Recipe):
    """One environment."""

    environment: str
    gain: float | None = GAIN
    """That the mean of the seeds has to reach."""


def _demo(name: str, example: str, environment: str, *changes: str, gain: float | None = GAIN) -> Demo:
    first = Recipe(name=f"{example}_first", example=f"agentic_{example}_first.yaml")
    return Demo(
        name=name,
        example=f"agentic_{example}.yaml",
        environment=environment,
        gain=gain,
        changes=changes,
        needs=first,
        where=("model",),
    )


GUESS = "game:GuessTheNumber-v0-easy"
LONG = (
    "environments.0.num_turns=8",
    "environments.0.options.max_turns=8",
    "rollout.prompts_per_step=4",
    "training.num_steps=30",
)
DEMOS = (
    _demo("guess", "guess", GUESS),
    _demo("guess_long", "guess", GUESS, *LONG, gain=None),
    _demo("guess_long_undiscounted", "guess", GUESS, *LONG, "algorithm.advantage.gamma=1.0", gain=None),
    _demo("calculator", "calculator", "math:Generated-v0-easy"),
    _demo("lake", "lake", "game:FrozenLake-v0-easy"),
)


def run_lean(demo: Demo, seed: int, directory: Path) -> Path:
    """See `run_of`; afterwards its checkpoints go, which nothing begins with."""
    path = run_of(demo, seed, directory)
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    return path


def figures(demo: Demo, paths: Sequence[Path], firsts: Sequence[Path]) -> dict[str, Any]:
    """What the seeds of an environment show."""
    courses = [course(path, ACCURACY) for path in paths]
    before, after = ([points[place][1] for points in courses] for place in (0, -1))
    turns = [[value for _, value in course(path, f"env/{demo.environment}/turns_mean", "train")] for path in paths]
    seconds = [train_seconds(path) + train_seconds(first) for path, first in zip(paths, firsts, strict=True)]
    gain = statistics.mean(after) - statistics.mean(before)
    return {
        "seeds": len(paths),
        "before": before,
        "after": after,
        "gain": gain,
        "turns_first": [statistics.mean(each[:LAST]) for each in turns],
        "turns_last": [statistics.mean(each[-LAST:]) for each in turns],
        "train_s": seconds,
        "met": demo.gain is None or (gain >= demo.gain and max(seconds) <= MOST_S),
        "courses": courses,
    }


def rows(gallery: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The table."""
    yield (
        "| run | held-out result before training (mean) | held-out results after training, by seed | mean gain | "
        "mean turns of an episode in the first and in the last ten steps | seconds of training, by seed |"
    )
    yield "|---|---|---|---|---|---|"
    for name, found in gallery.items():
        turns = [statistics.mean(found[key]) for key in ("turns_first", "turns_last")]
        yield (
            f"| `{name}` | {statistics.mean(found['before']):.3f} | {', '.join(f'{x:.3f}' for x in found['after'])} | "
            f"{found['gain']:+.3f}{'' if found['met'] else ' (missed)'} | {turns[0]:.2f}, {turns[1]:.2f} | "
            f"{', '.join(f'{x:.0f}' for x in found['train_s'])} |"
        )


def compared(gallery: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The discount, in a sentence."""
    pair = ("guess_long", "guess_long_undiscounted")
    if set(pair) <= gallery.keys():
        wins, turns = ([statistics.mean(gallery[name][key]) for name in pair] for key in ("after", "turns_last"))
        yield ""
        yield (
            f"In the game with eight turns, the policy wins {wins[0]:.1%} of the held-out games with a discount of 0.9 "
            f"and {wins[1]:.1%} without it. In the last steps, an episode takes {turns[0]:.2f} turns with the discount "
            f"and {turns[1]:.2f} without it."
        )


def main() -> int:
    arguments = arguments_for(__doc__, DEMOS, ROOT / "runs" / "agentic-demo")
    gallery: dict[str, dict[str, Any]] = {}
    for demo in DEMOS:
        seeds = list(range(arguments.seeds))
        if demo.name not in arguments.only.split(","):  # read what is there
            seeds = [seed for seed in seeds if (arguments.directory / f"{demo.name}-{seed}" / "summary.json").exists()]
        if not seeds:
            continue
        assert demo.needs is not None
        firsts = [run_of(demo.needs, seed, arguments.directory) for seed in seeds]
        gallery[demo.name] = figures(demo, [run_lean(demo, seed, arguments.directory) for seed in seeds], firsts)
        print("\n".join(rows(gallery)), file=sys.stderr, flush=True)
    write_page(PAGE, "Acting over many turns", [*rows(gallery), *compared(gallery)], CURVES)
    draw(gallery, CURVES)
    report("agentic_demo", gallery)
    return 0 if all(found["met"] for found in gallery.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
