"""What each post-training pipeline learns on this machine: its example, with several seeds, as a table and curves.

    make bench NAME=gallery-post-training          every recipe, three seeds (about an hour on two quiet cores)
    make bench NAME=gallery-post-training ARGS="--only sft --seeds 1"

A recipe is one or several commands, as a user gives them; the first of `distill` is the quickstart, whose model teaches
and whose training time is compared with. Runs that are complete in `--directory` are read, not made again, so that a
gallery may be made in parts.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _gallery import Recipe, arguments_for, course, draw, run_of, train_seconds, write_page
from _report import ROOT, report

PAGE = ROOT / "docs" / "benchmarks" / "post_training.md"
CURVES = ROOT / "docs" / "benchmarks" / "post_training.png"


@dataclass(frozen=True, kw_only=True)
class Shown(Recipe):
    """One example, and what it has to show."""

    metric: str
    """Of the held-out measurements."""
    aim: float
    """For the last of them."""
    most_share: float | None = None
    """Of the training time of the run that it begins with."""
    rises: str | None = None
    """A held-out measurement that has to end above where it began."""


QUICKSTART = Shown(name="quickstart", example="quickstart.yaml", metric="eval/accuracy", aim=0.9)
SFT = Shown(name="sft", example="sft.yaml", metric="eval/accuracy", aim=0.9)
REWARD_MODEL = Shown(name="reward_model", example="reward_model.yaml", metric="eval/accuracy", aim=0.95)
RECIPES = (
    QUICKSTART,
    SFT,
    Shown(name="preference", example="preference.yaml", metric="eval/accuracy", aim=0.8, rises="eval/margin"),
    REWARD_MODEL,
    Shown(
        name="rlhf",
        example="rlhf.yaml",
        metric="eval/facts/reward/says_a_number",  # the rule that only the pairs were made by
        aim=0.7,
        needs=REWARD_MODEL,
        where=("data.0.reward.0.path",),
    ),
    Shown(
        name="distill",
        example="distill.yaml",
        metric="eval/accuracy",
        aim=0.9,
        needs=QUICKSTART,
        where=("teacher",),
        most_share=0.5,
    ),
    Shown(
        name="distill_offline",
        example="distill_offline.yaml",
        metric="eval/accuracy",
        aim=0.8,
        needs=SFT,
        where=("teacher",),
    ),
    Shown(name="preference_online", example="preference_online.yaml", metric="eval/accuracy", aim=0.5),
    Shown(name="rejection_sampling", example="rejection_sampling.yaml", metric="eval/accuracy", aim=0.9),
)


def figures(recipe: Shown, paths: list[Path], needed: list[Path]) -> dict[str, Any]:
    """What the seeds of a recipe show."""
    courses = [course(path, recipe.metric) for path in paths]
    found: dict[str, Any] = {
        "seeds": len(paths),
        "before": [points[0][1] for points in courses],
        "after": [points[-1][1] for points in courses],
        "train_s": [train_seconds(path) for path in paths],
        "aim": recipe.aim,
        "met": all(points[-1][1] >= recipe.aim for points in courses),
        "courses": courses,
    }
    if recipe.rises is not None:
        ways = [course(path, recipe.rises) for path in paths]
        found["rises"] = [(points[0][1], points[-1][1]) for points in ways]
        found["met"] = found["met"] and all(last > first for first, last in found["rises"])
    if recipe.most_share is not None:
        others = [train_seconds(path) for path in needed]
        found["share_of_time"] = [mine / other for mine, other in zip(found["train_s"], others, strict=True)]
        found["met"] = found["met"] and max(found["share_of_time"]) <= recipe.most_share
    return found


def rows(gallery: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The table."""
    yield (
        "| example | held-out result before | held-out results after, by seed | goal | seconds of training, by seed  "
        "| time relative to GRPO (quickstart), by seed |"
    )
    yield "|---|---|---|---|---|---|"
    for name, found in gallery.items():
        share = ", ".join(f"{x:.2f}" for x in found.get("share_of_time", ())) or "–"
        missed = "" if found["met"] else " (missed)"
        yield (
            f"| `{name}` | {statistics.mean(found['before']):.3f} | "
            f"{', '.join(f'{x:.3f}' for x in found['after'])} | {found['aim']:g}{missed} | "
            f"{', '.join(f'{x:.0f}' for x in found['train_s'])} | {share} |"
        )


def main() -> int:
    arguments = arguments_for(__doc__, RECIPES, ROOT / "runs" / "gallery")
    gallery: dict[str, dict[str, Any]] = {}
    for recipe in (recipe for recipe in RECIPES if recipe.name in arguments.only.split(",")):
        paths = [run_of(recipe, seed, arguments.directory) for seed in range(arguments.seeds)]
        needed = [run_of(recipe.needs, seed, arguments.directory) for seed in range(arguments.seeds) if recipe.needs]
        gallery[recipe.name] = figures(recipe, paths, needed)
        print("\n".join(rows(gallery)), file=sys.stderr, flush=True)
    write_page(PAGE, "Post-training", list(rows(gallery)), CURVES)
    draw(gallery, CURVES)
    report("gallery_post_training", gallery)
    return 0 if all(found["met"] for found in gallery.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
