"""`roll compare` and `roll view` on run directories that anybody may have written: a part, or one clear line."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.tracking.conftest import make_config, make_group

from roll.cli.main import run as roll
from roll.tracking import RunDirectory
from roll.tracking.metrics_file import MetricsFile
from roll.tracking.rollout_table import write_rollouts

GIB = 2**30


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = make_config(tmp_path / "runs")
    with RunDirectory.create(config.run_dir, config.model_dump(mode="json")) as directory:
        MetricsFile(directory.metrics_path).append(1, "train", {"reward/mean": 0.5, "time/step_s": 1.0})
        write_rollouts(directory.get_rollouts_path(1), 1, [make_group(2)])
        directory.summary_path.write_text('{"setup_s": 1.0}')
    return directory.path


def _fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _link_out(path: Path) -> None:
    secret = path.parents[2] / "secret"
    path.replace(secret)
    path.symlink_to(secret)


def _endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


HARMS: tuple[Callable[[Path], None], ...] = (_fifo, _directory, _link_out, _endless, _terabyte)


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__.strip("_"))
@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json"])
def test_cli_hostile_run_only_regular_files_of_a_bounded_size_are_compared(
    run: Path, name: str, harm: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    harm(run / name)
    assert roll(["compare", str(run), str(run)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("Error: ") and str(run) in said.err
    if name != "config.yaml":  # without one it is no run
        assert said.err.count("\n") == 1 and name in said.err


@pytest.mark.parametrize(
    ("content", "is_shown"),
    [
        (b'{"step": 2, "kind": "train", "reward/mean": NaN}\n', True),
        (b'{"step": 2, "kind": "train", "reward/mean": ' + b"[" * 200_000 + b"\n", True),
        (b'{"step": 2, "kind": "train", "' + b"x" * (5 * 2**20) + b'": 1}\n', True),
        (b"\x00\xff\xfe" * 100_000, True),
        (b'{"step": 2, "kind": "tr', True),
        (b"{}\n" * 10_000, False),
        (b'{"step": 2, "kind": "train", %s}\n' % b", ".join(b'"%d": 1' % i for i in range(10_000)), False),
    ],
    ids=["nan", "deep", "long line", "binary", "half a line", "very many lines", "very many values"],
)
def test_cli_hostile_run_harmed_metrics_are_compared_by_what_can_be_read(
    run: Path,
    content: bytes,
    is_shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("roll.tracking.metrics_file._MAX_LINES", 5000)
    monkeypatch.setattr("roll.tracking.metrics_file._MAX_VALUES", 5000)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert roll(["compare", str(run), str(run)]) == (0 if is_shown else 2)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < GIB
    said = capsys.readouterr()
    assert ("reward/mean" in said.out) is is_shown
    assert said.err == "" if is_shown else ("`roll dashboard`" in said.err and said.err.count("\n") == 1)


@pytest.mark.parametrize("harm", [_link_out, _endless, _terabyte], ids=lambda harm: harm.__name__.strip("_"))
def test_cli_hostile_run_rollouts_are_read_from_regular_files_alone(
    run: Path, harm: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    harm(run / "rollouts" / "step-000001.parquet")
    assert roll(["view", str(run)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1


def test_cli_hostile_run_rollouts_behind_a_link_are_not_followed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "rollouts").rename(run.parent / "elsewhere")
    (run / "rollouts").symlink_to(run.parent / "elsewhere")
    assert roll(["view", str(run)]) == 2
    assert "is a symbolic link, which is not followed" in capsys.readouterr().err


def test_cli_hostile_run_a_file_that_is_deleted_while_the_others_are_read_is_left_out(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from roll.cli.view import show

    write_rollouts(run / "rollouts" / "step-000002.parquet", 2, [make_group(4)])
    listed = show.list_rollout_files

    def then_deleted(directory: Path) -> list:
        found = listed(directory)
        found[0].path.unlink()
        return found

    monkeypatch.setattr(show, "list_rollout_files", then_deleted)
    assert roll(["view", str(run)]) == 0
    said = capsys.readouterr()
    assert "2.0" in said.out and "4.0" not in said.out
    assert said.err == "Skipped: 'rollouts/step-000002.parquet' does not exist.\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind=foo", "kind must be train or eval"),
        ("correct=maybe", "correct must be yes or no"),
        ("finish!=stopped", "finish must be stop or length or abort or context"),
        ("status=done", "status must be "),
        ("domain=a domain=b", "the filter has several conditions `domain=…`"),
    ],
)
def test_cli_hostile_run_a_filter_that_no_rollout_can_match_is_refused(
    run: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert roll(["view", str(run), "-f", text]) == 2
    assert message in capsys.readouterr().err
