"""Questions to a run, answered by clicking: `docs/questions.md` and its pictures, made in a real Chromium.

    make bench NAME=questions                       trains two small runs (about 5 minutes), asks, writes the page
    make bench NAME=questions ARGS="--no-pages"     only asks: fails where a question is not answered within its clicks

Every question says where one begins, what is clicked, and what must then be on the page. The page of the
documentation is written from the same list, so it cannot say what does not work. Runs that are complete in
`--directory` are read.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _gallery import ROLL
from _report import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from questions_page import QUESTIONS, Question, write_page

PICTURES = ROOT / "docs" / "questions"
SIZE = {"width": 1120, "height": 680}
MAX_BYTES = 80_000
WAIT_S = 60.0
SAME = ("tracking.console=plain", "evaluation.num_prompts=16", "evaluation.every_num_steps=16", "seed=0")
RUNS = {
    "learns": (
        "rollout.scheduling.async_ratio=1.0",
        "rollout.max_new_tokens=24",
        "algorithm.kl.coefficient=0.001",
        "training.num_steps=32",
    ),
    "flat": ("rollout.max_new_tokens=4", "alarms.action=stop", "training.num_steps=32"),
}
"""Runs of the quickstart: one asynchronous that learns, and one whose answers have no room, which an alarm stops."""
ALARM = 3
"""How `roll train` exits when an alarm stopped it."""
PLAN = ("device=h100", "placement.generation=7")
"""Beside the one that trains: eight."""


def make_runs(directory: Path) -> None:
    """Train what is not there yet, and plan beside the one that learns."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, changes in RUNS.items():
        if not (directory / name / "summary.json").exists():
            shutil.rmtree(directory / name, ignore_errors=True)
            changed = [f"name={name}", f"output_dir={directory}", *SAME, *changes]
            done = subprocess.run([*ROLL, "train", "examples/quickstart.yaml", *changed], cwd=ROOT)
            if done.returncode not in (0, ALARM):
                sys.exit(f"{name} ended with {done.returncode}")
    run = directory / "learns"
    if not (run / "plan.txt").exists():
        found = run / "calibration"
        subprocess.run([*ROLL, "simulate", "--calibrate", str(run)], cwd=ROOT, check=True)
        (model,) = (path for path in found.glob("*.yaml") if path.name not in ("device.yaml", "workload.yaml"))
        planned = [*ROLL, "plan", str(found / "workload.yaml"), f"model={os.path.relpath(model, ROOT)}", *PLAN]
        done = subprocess.run(planned, cwd=ROOT, check=True, capture_output=True, text=True)
        (run / "plan.txt").write_text(done.stdout)


@contextlib.contextmanager
def dashboard(directory: Path) -> Iterator[str]:
    """Its address."""
    command = [*ROLL, "dashboard", str(directory), "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            yield next(word for word in server.stdout.readline().split() if word.startswith("http"))
        finally:
            server.terminate()


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A Chromium: `CHROMIUM` in the environment, or on the path."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


def ask(page: Any, address: str, question: Question, runs: Mapping[str, str]) -> None:
    """Begin where the question does, click, and see what must be there.

    Raises:
        AssertionError: the answer is not on the page.
    """
    assert len(question.clicks) <= 3, question.title
    page.goto("about:blank")
    page.goto(f"{address}#/overview?runs={','.join(runs.values())}")
    page.wait_for_selector(".view:not([aria-busy])")
    for click in question.clicks:
        within = page.get_by_role("region", name=click.within) if click.within else page
        within.get_by_role(click.role, name=click.name, exact=click.exact).first.click()
        page.wait_for_selector(".view:not([aria-busy])")
    ended = time.monotonic() + WAIT_S
    while missing := [
        pattern for pattern in question.shows if not re.search(pattern, page.locator("main").inner_text())
    ]:
        assert time.monotonic() < ended, f"{question.title} {missing} is not on the page"
        page.wait_for_timeout(100)
    page.wait_for_timeout(400)  # curves are painted in the next frame


def picture(page: Any, path: Path) -> None:
    """What the page shows, in so few colours that it is small."""
    from PIL import Image

    shown = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    for colours in (64, 32, 16):
        shown.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size <= MAX_BYTES:
            return
    sys.exit(f"{path} has {path.stat().st_size:,} bytes")


def ids(address: str) -> dict[str, str]:
    """Of the runs, by name."""
    with urllib.request.urlopen(f"{address}api/runs", timeout=60) as answer:
        found = {run["name"]: run["id"] for run in json.load(answer)}
    return {name: found[name] for name in RUNS}


def ask_all(directory: Path, questions: Sequence[Question], pictures: Path | None) -> None:
    """Each on a page of its own, which must say nothing on its console."""
    with dashboard(directory) as address, browser() as chromium:
        runs = ids(address)
        for question in questions:
            context = chromium.new_context(viewport=SIZE, color_scheme="light")
            page = context.new_page()
            page.set_default_timeout(1000 * WAIT_S)
            said: list[str] = []
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            ask(page, address, question, runs)
            assert not said, said
            if pictures is not None:
                pictures.mkdir(parents=True, exist_ok=True)
                picture(page, pictures / f"{question.id}.png")
            print(f"{question.title} {len(question.clicks)} clicks", file=sys.stderr, flush=True)
            context.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "questions")
    parser.add_argument("--only", default="", help="questions, by their ids and comma")
    parser.add_argument("--no-pages", action="store_true", help="write nothing into docs/")
    arguments = parser.parse_args()
    make_runs(arguments.directory)
    chosen = [q for q in QUESTIONS if not arguments.only or q.id in arguments.only.split(",")]
    ask_all(arguments.directory, chosen, None if arguments.no_pages else PICTURES)
    if not arguments.no_pages:
        write_page()
    return 0


if __name__ == "__main__":
    sys.exit(main())
