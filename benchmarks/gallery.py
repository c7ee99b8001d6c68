"""What every example does on this machine: what it learnt, how long it took, how much memory, and what it answers.

    make gallery                                    every example that is not here yet (hours, on two quiet cores)
    make gallery ARGS="--only quickstart,code"      some of them
    make gallery ARGS="--only quickstart --again"   one, made anew

An example's results are kept by themselves, in `results/gallery/NAME.json`, and what is not made again stays as it is.
Pages are written from these files alone: `tools/gallery_page.py`. Answers are the first to the first held-out prompts,
before the first step and after the last: nobody chose them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from _gallery import Recipe, course, run_of
from _report import RESULTS, ROOT, report

sys.path.insert(0, str(ROOT / "tools"))
from gallery_page import write_pages

NUM_PROMPTS = 3
LONGEST = 600
"""Characters of an answer that are kept."""
MEASURES = ("eval/accuracy", "eval/reward", "eval/loss")
"""What is shown of held-out examples: the first of these that a run measured."""


@dataclass(frozen=True, kw_only=True)
class Shown(Recipe):
    """One example."""

    learns: str
    """What, in one line."""
    measure: str = ""
    """Of the held-out measurements; empty for the first of `MEASURES`."""


def _of(name: str, learns: str, **more: Any) -> Shown:
    return Shown(name=name, example=f"{name}.yaml", learns=learns, **more)


def _after(name: str, first: Recipe, key: str, learns: str, **more: Any) -> Shown:
    return _of(name, learns, needs=first, where=(key,), **more)


QUICKSTART = _of("quickstart", "to add two numbers below ten, from whether the answer is right")
SFT = _of("sft", "to add, from worked examples")
REWARD_MODEL = _of("reward_model", "which answers are preferred, from pairs")
GUESS_FIRST = _of("agentic_guess_first", "how a guess is written")
CALCULATOR_FIRST = _of("agentic_calculator_first", "how the calculator is called")
LAKE_FIRST = _of("agentic_lake_first", "how a move is written")
EXAMPLES = (
    QUICKSTART,
    _of("code", "to write small functions, from whether hidden cases pass in a sandbox"),
    _of("reasoning", "sums and differences of a reasoning-gym task"),
    _of("own_algorithm", "to add, with an advantage and a loss from two files of the user's"),
    _of("guess", "to guess a number in two turns, with the hint between them"),
    _of("judge", "to sound cheerful to a judge of 135M parameters, which is no judge", measure="eval/reward"),
    _of("agent", "to add as an agent program that has a calculator", measure="eval/accuracy"),
    _of("agentic_mixed", "two environments in one run, asynchronously"),
    _of("rejection_sampling", "to add, from its own right answers"),
    _of("preference_online", "to add, from its best and worst answer to each prompt"),
    SFT,
    _of("preference", "to answer with a number, from pairs"),
    REWARD_MODEL,
    _after("rlhf", REWARD_MODEL, "data.0.reward.0.path", "what a reward model likes", measure="eval/reward"),
    _after("distill", QUICKSTART, "teacher", "to add, from a teacher that scores every token"),
    _after("distill_offline", SFT, "teacher", "to add, from a teacher that was asked once"),
    _after("agentic_calculator", CALCULATOR_FIRST, "model", "what to ask a calculator"),
    _after("agentic_guess", GUESS_FIRST, "model", "to halve the range in a guessing game"),
    _after("agentic_lake", LAKE_FIRST, "model", "to cross a frozen lake"),
)
NEEDED = {recipe.needs.name for recipe in EXAMPLES if recipe.needs is not None}


class Others:
    """How many cores programs that are none of ours keep busy, on average, while this is open."""

    def __enter__(self) -> Others:
        self._own: dict[tuple[int, float], float] = {}
        self._began, self._busy = time.monotonic(), _busy_s()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        others = _busy_s() - self._busy - sum(self._own.values())
        self.cores = round(max(0.0, others / (time.monotonic() - self._began)), 2)

    def _watch(self) -> None:
        """Processor time of everything that we started, a process at a time: they end before anybody adds them up."""
        own = psutil.Process()
        while not self._done.wait(1.0):
            for process in [own, *own.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    self._own[process.pid, process.create_time()] = times.user + times.system


def _busy_s() -> float:
    """Processor time of all programs since the machine started."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def samples(run: Path) -> list[dict[str, Any]]:
    """The first answer to each of the first held-out prompts, before the run and after it."""
    import pyarrow.parquet as pq

    files = sorted((run / "rollouts").glob("eval-step-*.parquet"))
    if len(files) < 2:
        return []
    columns = ["draw_id", "index", "prompt", "answer", "text", "reward"]
    first, last = (
        {row["draw_id"]: row for row in pq.read_table(path, columns=columns).to_pylist() if row["index"] == 0}
        for path in (files[0], files[-1])
    )
    both = [draw for draw in first if draw in last and first[draw]["prompt"] == last[draw]["prompt"]]
    return [
        {"prompt": first[draw]["prompt"][:LONGEST], "right": (first[draw]["answer"] or "")[:LONGEST]}
        | {when: _answer(rows[draw]) for when, rows in (("before", first), ("after", last))}
        for draw in both[:NUM_PROMPTS]
    ]


def _answer(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"text": row["text"][:LONGEST], "cut": len(row["text"]) > LONGEST, "reward": row["reward"]}


def figures(recipe: Shown, run: Path) -> dict[str, Any]:
    """All that a page says of a run."""
    summary = json.loads((run / "summary.json").read_text())
    measure = recipe.measure or next((name for name in MEASURES if course(run, name)), "")
    learnt = "reward/mean" if course(run, "reward/mean", "train") else "training/loss"
    held_out = course(run, measure)
    kept = ("num_steps", "setup_s", "train_s", "evaluate_s", "peak_rss_bytes", "generated_tokens_per_s")
    return {
        "example": f"examples/{recipe.example}",
        "learns": recipe.learns,
        "pipeline": _pipeline(run),
        "needs": f"examples/{recipe.needs.example}" if recipe.needs else None,
        "measure": measure,
        "before": held_out[0][1] if held_out and held_out[0][0] == 0 else None,
        "after": held_out[-1][1] if held_out else None,
        "learnt": learnt,
        "curves": {"held-out": _rounded(held_out), "training": _rounded(course(run, learnt, "train"))},
        "samples": samples(run),
        **{key: summary[key] for key in kept},
    }


def _pipeline(run: Path) -> str:
    import yaml

    return str(yaml.safe_load((run / "config.yaml").read_text())["pipeline"])


def _rounded(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(step, round(value, 4)) for step, value in points]


def wanted(arguments: argparse.Namespace) -> Iterator[Shown]:
    """Examples to make or to read: of those that were named all, of others those without results."""
    names = arguments.only.split(",") if arguments.only else [recipe.name for recipe in EXAMPLES]
    unknown = set(names) - {recipe.name for recipe in EXAMPLES}
    if unknown:
        sys.exit(f"no such example: {', '.join(sorted(unknown))}")
    for recipe in EXAMPLES:
        if recipe.name in names and (arguments.only or not (RESULTS / "gallery" / f"{recipe.name}.json").exists()):
            yield recipe


def make(recipe: Shown, directory: Path, *, again: bool) -> None:
    """Run an example, unless that was done, and write its results."""
    run = directory / f"{recipe.name}-0"
    if again:
        shutil.rmtree(run, ignore_errors=True)
    if recipe.needs is not None:
        run_of(recipe.needs, 0, directory)
    made = not (run / "summary.json").exists()
    if not made and (RESULTS / "gallery" / f"{recipe.name}.json").exists():
        return  # read now, it would be said to be of this machine and moment
    with Others() as others:
        run_of(recipe, 0, directory)
    report(f"gallery/{recipe.name}", figures(recipe, run) | {"cores_of_others": others.cores if made else None})
    if recipe.name not in NEEDED:
        shutil.rmtree(run / "checkpoints", ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="examples, by comma")
    parser.add_argument("--again", action="store_true", help="also where a run is complete")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "gallery")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for recipe in wanted(arguments):
        make(recipe, arguments.directory, again=arguments.again)
    write_pages()
    return 0


if __name__ == "__main__":
    sys.exit(main())
