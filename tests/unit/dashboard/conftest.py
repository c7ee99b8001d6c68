"""Small runs for the tests of the dashboard, written by what writes real ones; and clients of a server on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from unit.tracking.conftest import make_config, make_group

from roll.config.load import dump_config
from roll.dashboard.web import make_app
from roll.tracking.metrics_file import MetricsFile
from roll.tracking.rollout_table import write_rollouts
from roll.tracking.run_directory import RunDirectory
from roll.tracking.trace import TraceFile

OWN = "http://127.0.0.1:7265"


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run of three steps with two groups of two rollouts each, and an evaluation before them."""

    def make(name: str = "demo", num_steps: int = 3) -> Path:
        config = make_config(tmp_path / "runs").model_copy(update={"name": name})
        with RunDirectory.create(tmp_path / "runs" / name, dump_config(config)) as run:
            metrics = MetricsFile(run.metrics_path)
            metrics.append(0, "evaluation", {"eval/accuracy": 0.25, "time/evaluate_s": 2.0})
            write_rollouts(run.get_evaluation_path(0), 0, [make_group(0, (1.0, 0.0))])
            for step in range(1, num_steps + 1):
                write_step(run, metrics, step)
            TraceFile(run.trace_path).append(trace_of(num_steps))
            run.get_log_path("controller").write_text(
                "2026-01-01 10:00:00,000 INFO roll: it begins\n"
                "2026-01-01 10:00:01,000 WARNING roll.x: nothing is learnt (3 steps in a row; alarms.no_signal)\n"
            )
            checkpoint = run.get_checkpoint_path(num_steps)
            checkpoint.mkdir()
            entries = [("trained", ""), ("filtered", "zero variance: every reward is 0"), ("expired", "")]
            (checkpoint / "ledger.jsonl").write_text(
                "".join(
                    json.dumps({"draw_id": i, "outcome": f, "why": why}) + "\n" for i, (f, why) in enumerate(entries)
                )
            )
        return run.path

    return make


def write_step(run: RunDirectory, metrics: MetricsFile, step: int) -> None:
    """Draws 2 step and 2 step + 1; in the second group, the second rollout failed."""
    groups = [make_group(2 * step, (1.0, 0.0)), make_group(2 * step + 1, (0.5, None))]
    first = f"{2 * step}.0"
    tokens = {
        first: {
            "trainer_logprobs": np.array([-0.5, -0.5, -0.5], np.float32),
            "update_logprobs": np.array([-0.5, -1.5, np.nan], np.float32),
            "token_advantages": np.array([-1.0, -1.0, np.nan], np.float32),
        }
    }
    write_rollouts(run.get_rollouts_path(step), step, groups, {first: -1.0}, tokens)
    figures = {
        "reward/mean": step / 10,
        "time/step_s": 10.0,
        "policy_version": float(step),
        "ledger/trained": 2.0 * step,
        "ledger/filtered": float(step),
        "alarm/no_signal": float(step),
        "memory/peak_rss_bytes": 1e9,
        "sync/bytes": 5.0,
    }
    metrics.append(step, "train", figures)


def trace_of(num_steps: int) -> list[dict[str, Any]]:
    """Steps of ten seconds: six to generate, three to train (all of it forward), one rollout that takes five."""
    events: list[dict[str, Any]] = []
    for step in range(num_steps):
        begin = 1_000_000_000 + 10_000_000 * step
        rollout = {"pid": 1_000_000_003, "tid": 0, "cat": "rollout", "id": f"train-{step}.0"}
        events += [
            {"ts": begin, "name": "generating", "ph": "b", **rollout},
            {"ts": begin + 5_000_000, "name": "generating", "ph": "e", **rollout},
            {"ts": begin + 5_000_000, "name": "trained", "ph": "n", **rollout},
            {"ts": begin, "name": "generate", "ph": "X", "dur": 6_000_000, "pid": 7, "tid": 0},
            {"ts": begin + 6_000_000, "name": "forward_backward", "ph": "X", "dur": 3_000_000, "pid": 7, "tid": 0},
            {"ts": begin + 6_000_000, "name": "train", "ph": "X", "dur": 3_000_000, "pid": 7, "tid": 0},
            {"ts": begin, "name": f"step {step + 1}", "ph": "X", "dur": 10_000_000, "pid": 7, "tid": 0},
        ]
    return [*events, {"ts": begin + 10_000_000, "name": "reward", "ph": "C", "pid": 7, "args": {"value": 1.0}}]


def client_of(*paths: Path, host: str = "127.0.0.1", token: str | None = None, own: str = OWN) -> TestClient:
    """A browser, of sorts, at a server on these paths."""
    app = make_app(list(paths), host, token)
    return TestClient(app, base_url=own, raise_server_exceptions=False, follow_redirects=False)


def ids(client: TestClient) -> dict[str, str]:
    """Of all runs, by name."""
    return {run["name"]: run["id"] for run in client.get("/api/runs").json()}


def endpoints(run: str, row: int) -> Sequence[str]:
    """All of one run's, with some of their arguments; the one that never ends is left out."""
    own = f"/api/runs/{run}"
    return (
        f"{own}/metrics",
        f"{own}/series?names=reward/mean,time/step_s",
        f"{own}/config",
        f"/api/diff?runs={run},{run}",
        f"{own}/rollouts?sort=reward&desc=1",
        f"{own}/rollouts?q=answer",
        f"{own}/facets",
        f"{own}/rollouts/{row}",
        f"{own}/rollouts/{row}/group",
        f"{own}/rollouts/{row}/tokens",
        f"{own}/trace/lanes",
        f"{own}/trace/steps",
        f"{own}/health",
        f"{own}/plan",
        f"{own}/answers",
    )
