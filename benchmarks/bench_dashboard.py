"""`roll dashboard` on a long run, and what watching costs a run.

    make bench NAME=dashboard [ARGS="--steps 100 --watched-steps 0"]

A run of 1,000 steps x 1,024 rollouts x 2,000 tokens is made (see `_long_run.py`), and a server is started on it. First
view: what the page asks for when it opens (itself, the runs, names of metrics, four curves), of a server that has read
nothing yet. Filters: over all rollouts, each with its page of 100 rows. Token view: a rollout in full and its tokens.
Memory is the server's largest resident set over all of it, index of rollouts and whole trace included.

What watching costs is measured within one run that trains (SmolLM2-135M on this machine): the server and a reader that
asks for everything that changed, as an open page does, are there in every other pair of steps and stopped in between.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from _long_run import make_run
from _report import RESULTS, report

ROLL = "import sys; from roll.cli.main import run; sys.exit(run(sys.argv[1:], own_process=True))"
FILTERS: tuple[dict[str, Any], ...] = (
    {"sort": "reward", "desc": True},
    {"sort": "advantage", "reward_min": 0.5},
    {"sort": "num_tokens", "desc": True, "domain": "domain-3"},
    {"sort": "step", "verdict": "wrong", "correct": False},
    {"sort": "staleness", "desc": True, "step_min": 400, "step_max": 600},
    {"sort": "verdict", "status": "completed"},
    {"sort": "row", "offset": 900_000},
    {"sort": "reward", "offset": 500_000, "desc": True},
    {"draw_id": 17, "sort": "step"},
)

ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/series", {"names": "reward/mean,time/step_s,accuracy"}),
    ("/rollouts", {"sort": "step", "desc": True}),
    ("/health", {}),
)
"""What an open page asks again when something changed."""


def main() -> None:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--made", type=int, default=16, help="steps whose rollouts are made; the others are links")
    parser.add_argument("--no-trace", action="store_true", help="without the states of rollouts (a gigabyte)")
    parser.add_argument("--watched-steps", type=int, default=60, help="of the run that is watched; 0 leaves it out")
    parser.add_argument("--watch-only", action="store_true", help="other figures stay as they are")
    parser.add_argument("--directory", type=Path, default=None, help="for the runs; removed afterwards")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="roll-bench-", dir=arguments.directory) as directory:
        kept = json.loads((RESULTS / "dashboard.json").read_text())["figures"] if arguments.watch_only else None
        figures = look(Path(directory), arguments) if kept is None else kept
        if arguments.watched_steps:
            figures |= watch(Path(directory), arguments.watched_steps)
    report("dashboard", figures)


def look(directory: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Times and memory on the long run."""
    begin = time.perf_counter()
    make_run(
        directory / "long",
        num_steps=arguments.steps,
        num_rollouts=arguments.rollouts,
        num_tokens=arguments.tokens,
        num_made=min(arguments.made, arguments.steps),
        trace=not arguments.no_trace,
    )
    figures = {"making_s": time.perf_counter() - begin}
    with served(directory / "long") as (address, server):
        figures["rss_started_mib"] = _peak_mib(server)
        begin = time.perf_counter()
        ask(address, "/", plain=True)
        (run,) = ask(address, "/api/runs")
        own = f"/api/runs/{run['id']}"
        ask(address, f"{own}/metrics")
        found = ask(address, f"{own}/series", names="reward/mean,group1/metric_1,group2/metric_2,time/step_s")
        figures["first_view_ms"] = _ms_since(begin)
        assert len(found["steps"]) == min(arguments.steps, 2000), found
        begin = time.perf_counter()
        ask(address, f"{own}/rollouts", sort="step", desc=True)
        figures["first_rollouts_ms"] = _ms_since(begin)
        while "indexing" in (shown := ask(address, f"{own}/rollouts", limit=1)):
            time.sleep(0.05)
        figures["index_s"] = time.perf_counter() - begin
        figures["num_rollouts"] = shown["total"]
        figures |= _percentiles("filter", [_timed(address, f"{own}/rollouts", **f) for f in FILTERS * 3])
        figures["facets_ms"] = _timed(address, f"{own}/facets")
        figures["search_slice_ms"] = _timed(address, f"{own}/rollouts", q="no such text 7f3a")
        figures |= _rollouts(address, own, shown["total"])
        figures["rss_rollouts_mib"] = _peak_mib(server)
        if not arguments.no_trace:
            figures |= _time(address, own)
        figures["health_ms"] = _timed(address, f"{own}/health")
        figures["answers_ms"] = _timed(address, f"{own}/answers")
        figures["rss_peak_mib"] = _peak_mib(server)
    shutil.rmtree(directory / "long")
    return figures


def _rollouts(address: str, own: str, total: int) -> dict[str, float]:
    """One rollout in full, its tokens and its group, for some anywhere in the run."""
    rows = [
        ask(address, f"{own}/rollouts", limit=1, offset=at)["rows"][0]["row"] for at in range(0, total, total // 20)
    ]
    details, tokens, groups = (
        [_timed(address, f"{own}/rollouts/{row}{part}") for row in rows] for part in ("", "/tokens", "/group")
    )
    both = [a + b for a, b in zip(details, tokens, strict=True)]
    return _percentiles("token_view", both) | _percentiles("tokens", tokens) | _percentiles("group", groups)


def _time(address: str, own: str) -> dict[str, float]:
    """Lanes of the whole run and of one step."""
    begin = time.perf_counter()
    figures = {"first_lanes_ms": _timed(address, f"{own}/trace/lanes")}
    while "indexing" in ask(address, f"{own}/trace/lanes", max=1):
        time.sleep(0.05)
    return figures | {
        "trace_s": time.perf_counter() - begin,
        "lanes_all_ms": _timed(address, f"{own}/trace/lanes"),
        "lanes_step_ms": _timed(address, f"{own}/trace/lanes", from_s=600, to_s=660),
        "steps_ms": _timed(address, f"{own}/trace/steps"),
    }


@contextmanager
def served(path: Path) -> Iterator[tuple[str, psutil.Process]]:
    """`roll dashboard` on a run: its address, and its process."""
    command = [sys.executable, "-c", ROLL, "dashboard", str(path), "--port", "0", "--no-open"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[2].rstrip("/")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(address + "/api/nothing", timeout=5)
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.02)
        yield address, psutil.Process(server.pid)
    finally:
        server.send_signal(signal.SIGCONT)
        server.terminate()
        server.wait()


def ask(address: str, path: str, *, plain: bool = False, **query: Any) -> Any:
    """An answer, as JSON; of the page itself, whatever it is."""
    url = f"{address}{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=120) as answer:
            content = answer.read()
    except urllib.error.HTTPError as error:
        if not plain:
            raise
        content = error.read()
    return content if plain else json.loads(content)


def watch(directory: Path, num_steps: int) -> dict[str, float]:
    """Step times of a run with and without somebody who watches it."""
    example = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
    changes = [
        f"output_dir={directory}",
        "name=watched",
        f"training.num_steps={num_steps}",
        "training.learning_rate=1e-12",
        "evaluation.every_num_steps=0",
        "evaluation.before_training=false",
        "checkpoint.at_end=false",
        "tracking.console=quiet",
        "algorithm.filters.skip_zero_variance=false",
        "algorithm.advantage.std=none",
        "alarms.no_signal=false",
        "data.0.min_operand=3",
        "data.0.max_operand=3",
        "data.0.held_out=0",
        "rollout.temperature=0.01",
        "rollout.prompts_per_step=4",
    ]  # the same prompt and answers in every step: the same work
    run = directory / "watched"
    trainer = subprocess.Popen([sys.executable, "-c", ROLL, "train", str(example), *changes])
    while not (run / "metrics.jsonl").is_file() and trainer.poll() is None:
        time.sleep(0.1)
    watched: dict[int, bool] = {}
    with served(run) as (address, server):
        (shown,) = ask(address, "/api/runs")
        reader = _Reader(address, f"/api/runs/{shown['id']}")
        busy = server.cpu_times()
        while trainer.poll() is None:
            done = _num_lines(run / "metrics.jsonl")
            on = done % 4 in (0, 3)
            if done + 1 not in watched:
                watched[done + 1] = on
                server.resume() if on else None
                reader.watching.set() if on else reader.watching.clear()
                None if on else server.suspend()
            time.sleep(0.02)
        server.resume()
        spent = server.cpu_times()
        reader.stop()
    assert trainer.returncode == 0, trainer.returncode
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = {row["step"]: row["time/step_s"] for row in rows if row["kind"] == "train"}
    return _compared(times, watched) | {
        "watch_requests": float(reader.num_requests),
        "watch_server_cpu_share": (spent.user + spent.system - busy.user - busy.system)
        / (sum(times[step] for step, on in watched.items() if on and step in times) * (os.cpu_count() or 1)),
    }


def _compared(times: dict[int, float], watched: dict[int, bool]) -> dict[str, float]:
    """Differences of neighbouring steps, one with and one without; the first four warm up."""
    ratios = []
    for step in range(5, max(times), 2):
        if step + 1 in times and watched[step] != watched[step + 1]:
            on, off = (step, step + 1) if watched[step] else (step + 1, step)
            ratios.append(math.log(times[on] / times[off]))
    half = 1.96 * float(np.std(ratios, ddof=1)) / math.sqrt(len(ratios))
    return {
        "watch_pairs": float(len(ratios)),
        "watch_step_s": float(np.mean(list(times.values()))),
        "watch_change": math.expm1(float(np.mean(ratios))),
        "watch_change_median": math.expm1(float(np.median(ratios))),
        "watch_change_half_interval": half,
    }


class _Reader:
    """What an open page does: it listens for changes and asks again for what changed."""

    def __init__(self, address: str, own: str) -> None:
        self.watching = threading.Event()
        self.num_requests = 0
        self._address, self._own, self._ended = address, own, False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._ended = True
        self.watching.set()
        self._thread.join(timeout=10)

    def _read(self) -> None:
        while not self._ended:
            self.watching.wait()
            try:
                with urllib.request.urlopen(f"{self._address}{self._own}/events", timeout=30) as events:
                    for line in events:
                        if self._ended:
                            break
                        if line.startswith((b"event", b"retry")):
                            for path, query in ASKED:
                                ask(self._address, self._own + path, **query)
                                self.num_requests += 1
            except (OSError, TimeoutError):
                time.sleep(0.1)


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def _timed(address: str, path: str, **query: Any) -> float:
    begin = time.perf_counter()
    ask(address, path, **query)
    return _ms_since(begin)


def _ms_since(begin: float) -> float:
    return 1e3 * (time.perf_counter() - begin)


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}_p50_ms": float(np.median(values)), f"{name}_max_ms": max(values)}


def _peak_mib(server: psutil.Process) -> float:
    """The largest resident set so far (Linux keeps it)."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


if __name__ == "__main__":
    main()
