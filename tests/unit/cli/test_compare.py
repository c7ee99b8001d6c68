"""`roll compare` on made-up runs whose figures are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit.tracking.conftest import make_config

from roll.cli.main import run as roll
from roll.tracking import RunDirectory
from roll.tracking.metrics_file import MetricsFile


def make_run(place: Path, rate: float, rewards: list[float], scores: dict[int, float], **settings: object) -> Path:
    """A run of one second per step."""
    config = make_config(place)
    tree = config.model_dump(mode="json") | settings
    tree["training"]["learning_rate"] = rate
    with RunDirectory.create(config.run_dir, tree) as run:
        metrics = MetricsFile(run.metrics_path)
        for step, score in scores.items():
            metrics.append(step, "evaluation", {"eval/accuracy": score, "eval/score": score, "time/evaluate_s": 2.0})
        for step, reward in enumerate(rewards, 1):
            metrics.append(step, "train", {"reward/mean": reward, "time/step_s": 1.0, "own/thing": float(step)})
    return run.path


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    first = make_run(tmp_path / "a", 1e-5, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5], {0: 0.25, 6: 0.5})
    second = make_run(tmp_path / "b", 2e-5, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0], {0: 0.25, 6: 0.75, 8: 1.0})
    return [str(first), str(second)]


def compared(runs: list[str], *arguments: str, capsys: pytest.CaptureFixture[str]) -> dict:
    assert roll(["compare", *runs, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_cli_compare_two_runs_are_compared_by_what_both_have(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(runs, capsys=capsys)
    assert found["runs"] == runs  # both are called demo, so their paths tell them apart
    assert found["configuration"] == {"training.learning_rate": [1e-5, 2e-5]}
    outcome = found["outcome"]
    assert outcome["steps"] == [6, 8]
    assert outcome["held out: before"] == [0.25, 0.25]
    assert outcome["held out: after"] == [0.5, 1.0]
    assert outcome["training (s)"] == [6.0, 8.0]
    assert outcome["evaluation (s)"] == [4.0, 6.0]
    # Steps 2 … 6, which both have: (0.1 + … + 0.5) / 5 and twice that; the evaluation after step 6.
    assert found["metrics"]["reward/mean"] == [pytest.approx(0.3), pytest.approx(0.6)]
    assert found["metrics"]["eval/accuracy"] == [0.5, 0.75]
    assert "own/thing" not in found["metrics"]


def test_cli_compare_metrics_can_be_named(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(runs, "-m", "own/*", capsys=capsys)["metrics"] == {"own/thing": [4.0, 4.0]}
    assert roll(["compare", *runs, "-m", "onw/*"]) == 2
    assert "no metric of these runs matches 'onw/*'. Known: eval/*, own/*, reward/*" in capsys.readouterr().err


def test_cli_compare_tables_show_the_change_of_two_runs(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert roll(["compare", *runs]) == 0
    lines = {
        line.split("  ")[1]: line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")
    }
    assert lines["training.learning_rate"][-2:] == ["1e-05", "2e-05"]
    assert lines["held out: after"][-4:] == ["0.5", "1", "+0.5", "(+100%)"]
    assert lines["reward/mean"][-4:] == ["0.3", "0.6", "+0.3", "(+100%)"]


def test_cli_compare_three_runs_stand_side_by_side(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = compared([*runs, runs[0]], capsys=capsys)
    assert found["outcome"]["steps"] == [6, 8, 6]


def test_cli_compare_a_run_that_has_not_finished_a_step_is_compared_too(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared([runs[0], str(make_run(tmp_path / "c", 1e-5, [], {}))], capsys=capsys)
    assert found["outcome"]["steps"] == [6, 0]
    assert found["configuration"] == {}


def test_cli_compare_one_run_and_no_run_get_one_message(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert roll(["compare", runs[0]]) == 2
    assert "at least two runs" in capsys.readouterr().err
    assert roll(["compare", runs[0], "nowhere"]) == 2
    assert "there is no run 'nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["{", "[1]", '"x"', '{"setup_s": "long"}', '{"peak_rss_bytes": "x"}', f'{{"setup_s": {"9" * 400}}}', "[" * 100_000],
)
def test_cli_compare_a_corrupted_summary_is_named_or_passed_over(
    runs: list[str], content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(runs[1], "summary.json").write_text(content)
    assert roll(["compare", *runs]) in (0, 2)
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out


@pytest.mark.parametrize(
    "line",
    [
        '{"step": "x", "kind": "train"}',
        '{"step": true, "kind": "train"}',
        '{"step": null, "kind": "evaluation"}',
        '{"step": 9, "kind": ["train"]}',
        '{"step": 9, "kind": "train", "reward/mean": %s}' % ("9" * 400),
        '{"step": 9, "kind": "train", "reward/mean": "x", "time/step_s": [1]}',
        '{"step": 9, "kind": "train", "a": %s' % ("[" * 100_000),
        '{"step": 9, "kind": "train", "reward/mean": NaN, "reward/x": Infinity, "reward/y": 1e400}',
    ],
)
def test_cli_compare_a_malformed_line_of_metrics_is_left_out_or_named(
    runs: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path(runs[1], "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    for more in ([], ["--json"]):
        assert roll(["compare", *runs, *more]) in (0, 2)
        assert capsys.readouterr().err.count("\n") <= 1


def test_cli_compare_hostile_settings_do_not_act_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = {"note": "\x1b[2J[red]x[/red]\u202e", "\x1b]0;owned\x07": 1, "long": "y" * 1_000_000}
    first = make_run(tmp_path / "a", 1e-5, [0.1], {}, **hostile)
    second = make_run(tmp_path / "b", 1e-5, [0.1], {})
    assert roll(["compare", str(first), str(second)]) == 0
    said = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in said)
    assert "\\x1b[2J[red]x[/red]\\x202e" in said and len(said) < 20_000
