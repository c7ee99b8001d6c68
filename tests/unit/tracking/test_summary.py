"""Figures of a finished run, from lines written by hand; memory of processes that are really there."""

from __future__ import annotations

import io
import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from roll.errors import AlarmError, ConfigError
from roll.pipelines.stop import Interrupted
from roll.tracking.memory import PeakMemory, list_process_tree, measure_proportional_bytes
from roll.tracking.plot import is_loss_plotted, plot_run, smooth
from roll.tracking.run_directory import RunDirectory
from roll.tracking.summary import Ending, Summary, list_next_commands, summarize


def write_lines(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def step_row(step: int, reward: float | None, **values: float) -> dict:
    return {"step": step, "kind": "train", "reward/mean": reward, **values}


def evaluation_row(step: int, accuracy: float) -> dict:
    return {"step": step, "kind": "evaluation", "eval/accuracy": accuracy, "time/evaluate_s": 1.5}


def test_run_summary_figures_are_sums_over_all_steps(tmp_path: Path) -> None:
    tokens = {"rollout/num_tokens": 100.0, "training/num_tokens": 60.0}
    slow = {"time/step_s": 4.0, "time/generate_s": 2.0, "time/train_s": 1.0}
    fast = {"time/step_s": 2.0, "time/generate_s": 0.5, "time/train_s": 0.5}
    path = write_lines(
        tmp_path / "m.jsonl",
        evaluation_row(0, 0.25),
        *(step_row(i, i / 10, **tokens, **(slow if i == 1 else fast)) for i in range(1, 8)),
        step_row(8, None, **{"time/step_s": 1.0}),  # nothing was scored, nothing trained
        evaluation_row(4, 0.875),
        evaluation_row(8, 0.75),
    )
    summary = summarize("demo", tmp_path, path, setup_s=12.0, peak_rss_bytes=3 * 2**30)
    assert summary == Summary(
        name="demo",
        directory=str(tmp_path),
        num_steps=8,
        accuracy_before=0.25,
        accuracy_after=0.75,
        accuracy_best=0.875,
        score_before=0.25,
        score_after=0.75,
        score_best=0.875,
        reward_first5=pytest.approx(0.25),  # of four steps each, since eight are fewer than ten
        reward_last5=pytest.approx(0.6),  # 0.5, 0.6, 0.7, and a step without a reward
        setup_s=12.0,
        train_s=17.0,
        evaluate_s=4.5,
        seconds_per_step=17 / 8,
        generated_tokens_per_s=700 / 5.0,
        trained_tokens_per_s=420 / 4.0,
        peak_rss_bytes=3 * 2**30,
    )


def test_run_summary_what_was_not_measured_is_null_and_left_out_of_the_table(tmp_path: Path) -> None:
    summary = summarize("demo", tmp_path, write_lines(tmp_path / "m.jsonl", step_row(1, float("nan"))))
    assert summary.accuracy_before is None and summary.accuracy_after is None
    summary.write(tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text())["reward_last5"] is None
    assert summary.build_table().row_count == 1  # the reward alone


def test_run_summary_an_evaluation_that_is_not_before_the_first_step_is_not_called_before(tmp_path: Path) -> None:
    summary = summarize("demo", tmp_path, write_lines(tmp_path / "m.jsonl", evaluation_row(10, 0.5)))
    assert (summary.accuracy_before, summary.accuracy_after) == (None, 0.5)


def test_run_summary_a_run_that_did_nothing_says_so_and_an_evaluation_without_answers_is_not_0(tmp_path: Path) -> None:
    failed = {"data/groups_trained": 0.0, "rollout/infra_errors": 4.0, "rollout/infra_error_share": 1.0}
    empty = {"step": 2, "kind": "evaluation", "eval/num_answers": 0.0, "eval/infra_errors": 3.0}
    rows = [evaluation_row(0, 0.5), step_row(1, None, **failed), step_row(2, None, **failed), empty]
    summary = summarize("demo", tmp_path, write_lines(tmp_path / "m.jsonl", *rows))
    assert (summary.num_trained_steps, summary.accuracy_after, summary.score_after) == (0, None, None)
    assert (summary.infra_errors, summary.infra_error_share, summary.empty_evaluations) == (8, 1.0, 1)
    assert summary.evaluation_infra_errors == 3
    text = table_text(summary)
    assert "steps that updated the weights" in text and "8 (100.0%)" in text and "accuracy after" not in text


def test_run_summary_a_score_is_named_for_what_it_is(tmp_path: Path) -> None:
    graded = [{"step": s, "kind": "evaluation", "eval/score": s / 8, "eval/verified_share": 0.0} for s in (0, 4, 8)]
    summary = summarize("demo", tmp_path, write_lines(tmp_path / "m.jsonl", *graded))
    assert (summary.measure, summary.score_before, summary.score_after, summary.score_best) == ("mean reward", 0, 1, 1)
    assert summary.accuracy_after is None
    assert "mean reward after" in table_text(summary)


@pytest.mark.parametrize(
    ("num_steps", "shown"),
    [(2, "first step"), (5, "first 2 steps"), (6, "first 3 steps"), (10, "first 5 steps"), (50, "first 5 steps")],
)
def test_run_summary_compares_first_and_last_steps_that_do_not_overlap(
    tmp_path: Path, num_steps: int, shown: str
) -> None:
    path = write_lines(tmp_path / "m.jsonl", *(step_row(i, float(i)) for i in range(num_steps)))
    summary = summarize("demo", tmp_path, path)
    assert f"reward, {shown}" in table_text(summary)
    count = min(5, num_steps // 2)
    assert summary.reward_first5 == pytest.approx((count - 1) / 2)
    assert summary.reward_last5 == pytest.approx(num_steps - 1 - (count - 1) / 2)


def test_run_summary_the_next_commands_say_why_there_is_no_model(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for num_trained, reason in ((0, "no step updated the weights"), (3, "checkpoint.at_end is false")):
        summary = Summary(name="run", directory=str(run.path), num_steps=3, num_trained_steps=num_trained)
        (line,) = list_next_commands(run, summary, "rlvr", has_rollouts=True)
        assert line == f"there is no trained model, because no checkpoint was saved ({reason})"
    (run.checkpoints_dir / "step-000003" / "model").mkdir(parents=True)
    run.samples_dir.mkdir()
    lines = list_next_commands(run, summary, "diffusion", has_rollouts=False)
    assert lines[0] == f"samples  {run.samples_dir}" and "roll chat" not in lines[-1]


def test_run_summary_of_one_step_shows_its_reward(tmp_path: Path) -> None:
    text = table_text(summarize("demo", tmp_path, write_lines(tmp_path / "m.jsonl", step_row(1, 0.25))))
    assert "reward" in text and "first" not in text


def table_text(summary: Summary) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(summary.build_table())
    return console.file.getvalue()


def test_run_summary_smoothing_keeps_a_straight_line_and_the_ends() -> None:
    line = [i / 50 for i in range(50)]
    assert smooth(line) == pytest.approx(line)
    assert smooth([0.0, 1.0, 0.0]) == pytest.approx([0.0, 1 / 3, 0.0])


@pytest.mark.parametrize("rows", [[], [step_row(1, 0.5)], [step_row(1, -3.0), evaluation_row(1, 0.5)]])
def test_run_summary_a_plot_is_drawn_of_anything(rows: list[dict], tmp_path: Path) -> None:
    plot_run(tmp_path / "reward.png", "demo", rows)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


HOLD = """
import mmap, os, signal, sys
memory = mmap.mmap(-1, 64 * 2**20)  # shared with the child
for page in range(0, len(memory), 4096):
    memory[page] = 1
if os.fork() == 0:
    for page in range(0, len(memory), 4096):
        memory[page]
    os.write(1, b"child\\n")
    signal.pause()
os.write(1, b"parent\\n")
signal.pause()
"""


def test_run_summary_memory_of_a_process_tree_counts_shared_pages_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE)
    assert process.stdout is not None
    children: list[int] = []
    try:
        process.stdout.readline(), process.stdout.readline()
        tree = list_process_tree(process.pid)
        children = tree[1:]
        assert len(tree) == 2 and tree[0] == process.pid
        each = [measure_proportional_bytes([pid]) for pid in tree]
        assert all(32 * 2**20 <= size < 60 * 2**20 for size in each)
        assert 64 * 2**20 <= measure_proportional_bytes(tree) < 100 * 2**20
    finally:
        for pid in (process.pid, *children):
            subprocess.run(["kill", "-9", str(pid)], check=False)
        process.stdout.read()  # ends when both are dead
        process.wait()
        process.stdout.close()
    assert measure_proportional_bytes(tree) == 0


def test_run_summary_the_peak_is_kept_after_the_memory_is_freed() -> None:
    peak = PeakMemory()
    peak.sample()
    before = peak.peak_bytes
    with mmap.mmap(-1, 80 * 2**20) as block:  # fresh pages, whatever the allocator still holds
        block.write(b"x" * len(block))
        peak.sample(force=True)
    peak.sample(force=True)
    assert peak.peak_bytes >= before + 75 * 2**20
    assert measure_proportional_bytes(list_process_tree()) < peak.peak_bytes


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (AlarmError("rewards fail (alarms.infra_errors_above)"), "alarm", "rewards fail (alarms.infra_errors_above)"),
        (ExceptionGroup("two", [OSError("disk"), AlarmError("stop")]), "alarm", "stop"),
        (Interrupted("SIGTERM"), "interrupted", "SIGTERM"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
        (ConfigError("a key is wrong"), "error", "a key is wrong"),
        (ZeroDivisionError("division by zero"), "error", "ZeroDivisionError: division by zero"),
    ],
)
def test_run_summary_records_how_a_session_ended(error: BaseException, kind: str, message: str) -> None:
    assert Ending.from_error(error) == Ending(kind=kind, message=message)


def test_run_summary_plot_of_a_run_without_rewards_shows_the_loss() -> None:
    assert is_loss_plotted([{"step": 1, "kind": "train", "training/loss": 2.0}])
    assert not is_loss_plotted([{"step": 1, "kind": "train", "training/loss": 2.0, "reward/mean": 0.5}])
