"""What each post-training pipeline learns on this machine: its example, with several seeds, as a table and curves.

    make gallery-post-training                     every recipe, three seeds (about an hour on two quiet cores)
    make gallery-post-training ARGS="--only sft --seeds 1"

A recipe is one or several commands, as a user gives them; the first of `distill` is the quickstart, whose model teaches
and whose training time is compared with. Runs that are complete in `--directory` are read, not made again, so that a
gallery may be made in parts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _report import ROOT, report

PAGE = ROOT / "docs" / "benchmarks" / "post_training.md"
CURVES = ROOT / "docs" / "benchmarks" / "post_training.png"
ROLL = [sys.executable, "-c", "from roll.cli import main; main()"]
BEGIN, END = "<!-- gallery begins -->", "<!-- gallery ends -->"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One example, and what it has to show."""

    name: str
    example: str
    metric: str
    """Of the held-out measurements."""
    aim: float
    """For the last of them."""
    needs: str | None = None
    """A recipe whose run it begins with."""
    where: tuple[str, ...] = ()
    """The keys that name that run."""
    most_share: float | None = None
    """Of the training time of that run."""
    rises: str | None = None
    """A held-out measurement that has to end above where it began."""


RECIPES = (
    Recipe(name="quickstart", example="quickstart.yaml", metric="eval/accuracy", aim=0.9),
    Recipe(name="sft", example="sft.yaml", metric="eval/accuracy", aim=0.9),
    Recipe(name="preference", example="preference.yaml", metric="eval/accuracy", aim=0.8, rises="eval/margin"),
    Recipe(name="reward_model", example="reward_model.yaml", metric="eval/accuracy", aim=0.95),
    Recipe(
        name="rlhf",
        example="rlhf.yaml",
        metric="eval/facts/reward/says_a_number",  # the rule that only the pairs were made by
        aim=0.7,
        needs="reward_model",
        where=("data.0.reward.0.path",),
    ),
    Recipe(
        name="distill",
        example="distill.yaml",
        metric="eval/accuracy",
        aim=0.9,
        needs="quickstart",
        where=("teacher",),
        most_share=0.5,
    ),
    Recipe(
        name="distill_offline",
        example="distill_offline.yaml",
        metric="eval/accuracy",
        aim=0.8,
        needs="sft",
        where=("teacher",),
    ),
    Recipe(name="preference_online", example="preference_online.yaml", metric="eval/accuracy", aim=0.5),
    Recipe(name="rejection_sampling", example="rejection_sampling.yaml", metric="eval/accuracy", aim=0.9),
)


def run_of(recipe: Recipe, seed: int, directory: Path) -> Path:
    """Train a recipe with a seed, unless that was done; returns the run's directory."""
    name = f"{recipe.name}-{seed}"
    path = directory / name
    if (path / "summary.json").exists():
        return path
    changes = [f"name={name}", f"seed={seed}", f"output_dir={directory}", "tracking.console=plain"]
    if recipe.needs is not None:
        needed = run_of(next(r for r in RECIPES if r.name == recipe.needs), seed, directory)
        changes += [f"{key}={needed}" for key in recipe.where]
    command = [*ROLL, "train", str(ROOT / "examples" / recipe.example), *changes]
    if (path / "config.yaml").exists():  # it was cut off
        command = [*ROLL, "resume", str(path)]
    print(f"{name} …", file=sys.stderr, flush=True)
    with (directory / f"{name}.log").open("a") as log:
        subprocess.run(command, check=True, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    return path


def course(path: Path, metric: str) -> list[tuple[int, float]]:
    """Step and value of every held-out measurement."""
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row[metric]) for row in rows if row["kind"] == "evaluation" and metric in row]


def figures(recipe: Recipe, paths: list[Path], needed: list[Path]) -> dict[str, Any]:
    """What the seeds of a recipe show."""
    summaries = [json.loads((path / "summary.json").read_text()) for path in paths]
    courses = [course(path, recipe.metric) for path in paths]
    found = {
        "seeds": len(paths),
        "before": [points[0][1] for points in courses],
        "after": [points[-1][1] for points in courses],
        "train_s": [summary["train_s"] for summary in summaries],
        "aim": recipe.aim,
        "met": all(points[-1][1] >= recipe.aim for points in courses),
        "courses": courses,
    }
    if recipe.rises is not None:
        ways = [course(path, recipe.rises) for path in paths]
        found["rises"] = [(points[0][1], points[-1][1]) for points in ways]
        found["met"] = found["met"] and all(last > first for first, last in found["rises"])
    if recipe.most_share is not None:
        others = [json.loads((path / "summary.json").read_text())["train_s"] for path in needed]
        found["share_of_time"] = [mine / other for mine, other in zip(found["train_s"], others, strict=True)]
        found["met"] = found["met"] and max(found["share_of_time"]) <= recipe.most_share
    return found


def rows(gallery: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The table."""
    yield "| recipe | held-out, before | after, by seed | aim | seconds of training, by seed | beside the quickstart |"
    yield "|---|---|---|---|---|---|"
    for name, found in gallery.items():
        share = ", ".join(f"{x:.2f}" for x in found.get("share_of_time", ())) or "–"
        missed = "" if found["met"] else " (missed)"
        yield (
            f"| `{name}` | {statistics.mean(found['before']):.3f} | "
            f"{', '.join(f'{x:.3f}' for x in found['after'])} | {found['aim']:g}{missed} | "
            f"{', '.join(f'{x:.0f}' for x in found['train_s'])} | {share} |"
        )


def draw(gallery: dict[str, dict[str, Any]]) -> None:
    """Every recipe's held-out curve, a line for each seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(gallery), 3), dpi=120, layout="constrained")
    for place, (name, found) in enumerate(gallery.items()):
        axes = figure.add_subplot(1, len(gallery), place + 1)
        for points in found["courses"]:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3)
        axes.axhline(found["aim"], color="#999999", linestyle=":", linewidth=1)
        axes.set_title(name, fontsize=10)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("step")
    FigureCanvasAgg(figure).print_png(str(CURVES))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default=",".join(recipe.name for recipe in RECIPES), help="recipes, by comma")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "gallery")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    gallery: dict[str, dict[str, Any]] = {}
    for recipe in (recipe for recipe in RECIPES if recipe.name in arguments.only.split(",")):
        paths = [run_of(recipe, seed, arguments.directory) for seed in range(arguments.seeds)]
        needed = [arguments.directory / f"{recipe.needs}-{seed}" for seed in range(arguments.seeds)]
        gallery[recipe.name] = figures(recipe, paths, needed if recipe.needs else [])
        print("\n".join(rows(gallery)), file=sys.stderr, flush=True)
    table = "\n".join([BEGIN, "", *rows(gallery), "", f"![curves]({CURVES.name})", "", END])
    text = PAGE.read_text() if PAGE.exists() else f"# Post-training\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text:
        text += f"\n{BEGIN}\n{END}\n"
    PAGE.write_text(text[: text.index(BEGIN)] + table + text[text.index(END) + len(END) :])
    draw(gallery)
    report("gallery_post_training", gallery)
    return 0 if all(found["met"] for found in gallery.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
