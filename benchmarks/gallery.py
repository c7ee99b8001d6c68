"""Run the examples on this machine, and store what each learned, its time and memory, and some of its answers.

    make gallery                                    every example that has no results yet (hours, on two idle cores)
    make gallery ARGS="--only quickstart,code"      some examples
    make gallery ARGS="--only quickstart --again"   run an example again

Each example has its own file `results/gallery/NAME.json`, which changes only if the example is run again.
`tools/gallery_page.py` generates the pages from these files alone. The answers are not selected: they are the first
answers to the first held-out prompts, before the first step and after the last.
"""

from __future__ import annotations

import argparse
import base64
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

from roll.media import decode_image, encode_thumbnail
from roll.media.stored_images import find_image, find_mentions, remove_mentions
from roll.tracking.reading.files import SafeDirectory

sys.path.insert(0, str(ROOT / "tools"))
from gallery_page import write_pages

NUM_PROMPTS = 3
MAX_LENGTH = 600
"""Maximum number of characters of an answer that are stored."""
NUM_IMAGES = 4
"""Maximum number of images of a prompt that are stored."""
LONGEST_SIDE = 192
"""Maximum width and height of a stored image, in pixels."""
MEASURES = ("eval/accuracy", "eval/reward", "eval/loss")
"""Held-out metrics, by preference: a page shows the first one that the run measured."""


@dataclass(frozen=True, kw_only=True)
class Shown(Recipe):
    """An example of the gallery."""

    learns: str
    """What the model learns, as the end of the sentence "The model learns …"."""
    measure: str = ""
    """The held-out metric to show; empty: the first of `MEASURES` that the run measured."""


def _of(name: str, learns: str, **more: Any) -> Shown:
    return Shown(name=name, example=f"{name}.yaml", learns=learns, **more)


def _after(name: str, first: Recipe, key: str, learns: str, **more: Any) -> Shown:
    return _of(name, learns, needs=first, where=(key,), **more)


QUICKSTART = _of("quickstart", "to add two numbers below ten; a correct answer is rewarded")
SFT = _of("sft", "to add, from examples with answers")
REWARD_MODEL = _of("reward_model", "to score preferred answers higher, from pairs of answers")
GUESS_FIRST = _of("agentic_guess_first", "the format of a guess")
CALCULATOR_FIRST = _of("agentic_calculator_first", "the format of a call to the calculator")
LAKE_FIRST = _of("agentic_lake_first", "the format of a move")
EXAMPLES = (
    QUICKSTART,
    _of("quantized", "to add, from rollouts that vLLM computes in int8"),
    _of("code", "to write small functions; hidden test cases in a sandbox decide the reward"),
    _of("reasoning", "to solve the sums and differences of a reasoning-gym task"),
    _of("own_algorithm", "to add, with a custom advantage and a custom loss"),
    _of("guess", "to guess a number in two turns, with a hint between them"),
    _of(
        "judge",
        "to write cheerful answers; the judge has only 135M parameters, and its scores are no better than chance",
        measure="eval/reward",
    ),
    _of("agent", "to add two numbers, in an agent program that offers it a calculator", measure="eval/accuracy"),
    _of("agentic_mixed", "to guess numbers and to name the next letter, in one asynchronous run"),
    _of("rejection_sampling", "to add, by fine-tuning on its own correct answers"),
    _of("preference_online", "to add, from pairs of its best and worst answer to each prompt"),
    SFT,
    _of("preference", "to answer with a number, from pairs of answers"),
    REWARD_MODEL,
    _after(
        "rlhf", REWARD_MODEL, "data.0.reward.0.path", "to maximize the score of a reward model", measure="eval/reward"
    ),
    _after("distill", QUICKSTART, "teacher", "to add, from a teacher's distribution at every token"),
    _after("distill_offline", SFT, "teacher", "to add, from stored log-probs of a teacher"),
    _after("agentic_calculator", CALCULATOR_FIRST, "model", "to call a calculator with the right arguments"),
    _after("agentic_guess", GUESS_FIRST, "model", "to halve the range in a guessing game"),
    _after("agentic_lake", LAKE_FIRST, "model", "to cross a frozen lake"),
)
NEEDED = {recipe.needs.name for recipe in EXAMPLES if recipe.needs is not None}


class Others:
    """Measures, while it is open, how many cores other programs keep busy on average."""

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
        """Record the CPU times of this benchmark's processes, which may end before the total is computed."""
        own = psutil.Process()
        while not self._done.wait(1.0):
            for process in [own, *own.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    self._own[process.pid, process.create_time()] = times.user + times.system


def _busy_s() -> float:
    """Return the CPU time of all programs since the machine started."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def samples(run: Path) -> list[dict[str, Any]]:
    """Return the first answer to each of the first held-out prompts, before and after training."""
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
        {
            "prompt": remove_mentions(first[draw]["prompt"])[:MAX_LENGTH],
            "right": (first[draw]["answer"] or "")[:MAX_LENGTH],
        }
        | images_of(run, first[draw]["prompt"])
        | {when: _answer(rows[draw]) for when, rows in (("before", first), ("after", last))}
        for draw in both[:NUM_PROMPTS]
    ]


def images_of(run: Path, prompt: str) -> dict[str, list[str]]:
    """Return the first images of a prompt as data URLs of small PNGs, as `images`; nothing for a prompt of text."""
    found = [find_image(SafeDirectory(run), prefix).digest for prefix in find_mentions([prompt])[:NUM_IMAGES]]
    files = [(run / "media" / digest[:2] / digest).read_bytes() for digest in found]
    small = [encode_thumbnail(decode_image(file, "an image"), LONGEST_SIDE) for file in files]
    return {"images": [f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in small]} if small else {}


def _answer(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"text": row["text"][:MAX_LENGTH], "cut": len(row["text"]) > MAX_LENGTH, "reward": row["reward"]}


def figures(recipe: Shown, run: Path) -> dict[str, Any]:
    """Return everything that the page of a run shows."""
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
    """Return the examples to run: those named by `--only`, or else those without results."""
    names = arguments.only.split(",") if arguments.only else [recipe.name for recipe in EXAMPLES]
    unknown = set(names) - {recipe.name for recipe in EXAMPLES}
    if unknown:
        sys.exit(f"no such example: {', '.join(sorted(unknown))}")
    for recipe in EXAMPLES:
        if recipe.name in names and (arguments.only or not (RESULTS / "gallery" / f"{recipe.name}.json").exists()):
            yield recipe


def make(recipe: Shown, directory: Path, *, again: bool) -> None:
    """Run an example, unless its run directory is complete, and write its results."""
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
