"""What galleries share: examples that are run with several seeds, or read where that was done, and a page of them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _report import ROOT

ROLL = [sys.executable, "-c", "from roll.cli import main; main()"]
BEGIN, END = "<!-- gallery begins -->", "<!-- gallery ends -->"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One example, as a user runs it."""

    name: str
    example: str
    changes: tuple[str, ...] = ()
    """Of its keys."""
    needs: Recipe | None = None
    """What it begins with."""
    where: tuple[str, ...] = ()
    """The keys that name the run of that."""


def run_of(recipe: Recipe, seed: int, directory: Path) -> Path:
    """Train a recipe with a seed, and what it needs, unless that was done; returns the run's directory."""
    name = f"{recipe.name}-{seed}"
    path = directory / name
    if (path / "summary.json").exists():
        return path
    changes = [f"name={name}", f"seed={seed}", f"output_dir={directory}", "tracking.console=plain", *recipe.changes]
    if recipe.needs is not None:
        needed = run_of(recipe.needs, seed, directory)
        changes += [f"{key}={needed}" for key in recipe.where]
    command = [*ROLL, "train", str(ROOT / "examples" / recipe.example), *changes]
    if (path / "config.yaml").exists():  # it was cut off
        command = [*ROLL, "resume", str(path)]
    print(f"{name} …", file=sys.stderr, flush=True)
    with (directory / f"{name}.log").open("a") as log:
        subprocess.run(command, check=True, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    return path


def course(path: Path, metric: str, kind: str = "evaluation") -> list[tuple[int, float]]:
    """Step and value of every measurement of a kind; by default the held-out ones."""
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row[metric]) for row in rows if row["kind"] == kind and metric in row]


def train_seconds(path: Path) -> float:
    """How long a run trained."""
    return float(json.loads((path / "summary.json").read_text())["train_s"])


def arguments_for(description: str | None, recipes: Iterable[Recipe], directory: Path) -> argparse.Namespace:
    """`--seeds`, `--only` and `--directory`, which is made."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default=",".join(recipe.name for recipe in recipes), help="recipes, by comma")
    parser.add_argument("--directory", type=Path, default=directory)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    return arguments


def write_page(page: Path, title: str, table: Sequence[str], curves: Path) -> None:
    """Put the table, and a link to the curves, between the marks of a page."""
    made = "\n".join([BEGIN, "", *table, "", f"![curves]({curves.name})", "", END])
    text = page.read_text() if page.exists() else f"# {title}\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text:
        text += f"\n{BEGIN}\n{END}\n"
    page.write_text(text[: text.index(BEGIN)] + made + text[text.index(END) + len(END) :])


def draw(gallery: Mapping[str, Mapping[str, Any]], curves: Path) -> None:
    """Every recipe's held-out curve, a line for each seed; its `aim`, where it has one, dotted."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(gallery), 3), dpi=120, layout="constrained")
    for place, (name, found) in enumerate(gallery.items()):
        axes = figure.add_subplot(1, len(gallery), place + 1)
        for points in found["courses"]:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3)
        if "aim" in found:
            axes.axhline(found["aim"], color="#999999", linestyle=":", linewidth=1)
        axes.set_title(name, fontsize=10)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("step")
    FigureCanvasAgg(figure).print_png(str(curves))
