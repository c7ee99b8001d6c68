"""How commands end: exit codes, messages, where details go."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from worlds.timing import LOOPS

from roll import running
from roll.cli.commands import CommandState
from roll.cli.main import exit_process as end_process
from roll.cli.main import run, run_guarded
from roll.errors import ConfigError, InfraError, TrainingDivergedError
from roll.pipelines.stop import Interrupted

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
HEAVY = {"torch", "transformers", "numpy", "ray", "vllm", "datasets", "pandas", "math_verify", "sympy"}


def end(error: BaseException, session: CommandState | None = None) -> int:
    def fail() -> None:
        raise error

    return run_guarded(fail, session or CommandState())


@pytest.fixture
def run_dir(tmp_path):
    for name in ("logs", "checkpoints"):
        (tmp_path / "runs" / "x" / name).mkdir(parents=True)
    return tmp_path / "runs" / "x"


def test_cli_main_a_user_error_is_its_message_alone_and_2(capsys):
    assert end(ConfigError("say this")) == 2
    assert capsys.readouterr().err == "Error: say this\n"


def test_cli_main_the_package_is_the_command_too():
    done = subprocess.run(
        [sys.executable, "-m", "roll", "train", "none.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith("Error: ") and "none.yaml" in done.stderr


def test_cli_main_a_user_error_among_several_failures_is_the_one_shown(capsys):
    group = ExceptionGroup("tasks", [InfraError("boom"), ExceptionGroup("inner", [ConfigError("say this")])])
    assert end(group) == 2
    assert capsys.readouterr().err == "Error: say this\n"


def test_cli_main_a_failure_of_the_run_is_a_message_and_a_log_and_1(capsys, run_dir):
    assert end(TrainingDivergedError("loss is nan"), CommandState(run_dir=run_dir)) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Error: loss is nan\nDetails: ")
    (log,) = (run_dir / "logs").iterdir()
    assert str(log) in shown
    assert "TrainingDivergedError: loss is nan" in log.read_text()


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ({"eval/loss": 1.5}, 0, ""),
        ({"eval/loss": 1.5, "eval/num_answers": 2.0}, 0, ""),
        ({"eval/num_answers": 0.0}, 1, "Error: no answers were generated, so there are no metrics.\n"),
    ],
    ids=["examples", "examples-and-answers", "nothing"],
)
def test_cli_main_eval_fails_only_where_answers_were_asked_for_and_none_came(capsys, monkeypatch, found, code, said):
    monkeypatch.setattr("roll.pipelines.commands.evaluate", lambda config, model: found)
    monkeypatch.setattr("roll.process_environment.prepare_environment", lambda: None)
    assert run(["eval", str(QUICKSTART.with_name("sft.yaml"))]) == code
    shown = capsys.readouterr()
    assert json.loads(shown.out) == found
    assert shown.err == said


def test_cli_main_a_failed_run_that_was_saved_says_how_to_go_on(capsys, run_dir):
    (run_dir / "checkpoints" / "step-000003").mkdir()
    assert end(TrainingDivergedError("loss is nan"), CommandState(run_dir=run_dir)) == 1
    assert capsys.readouterr().err.endswith(f"roll resume {run_dir}\n")


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_cli_main_a_signal_has_its_usual_code_also_where_nobody_reads(name, code, monkeypatch):
    monkeypatch.setattr("sys.stderr", open("/dev/full", "w"))  # noqa: SIM115
    assert end(Interrupted(name)) == code


def test_cli_main_an_unexpected_error_is_short_on_the_screen_and_whole_in_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert end(KeyError("first line\nsecond line")) == 1
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert len(shown.splitlines()) == 2
    (log,) = tmp_path.iterdir()
    assert str(log) in shown
    assert "Traceback" in log.read_text()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_cli_main_a_disk_that_cannot_be_written_is_the_users_to_mend(capsys, code):
    assert end(OSError(code, os.strerror(code), "/some/file")) == 2
    assert "'/some/file'" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort(), Interrupted("SIGINT")])
def test_cli_main_ctrl_c_says_how_to_go_on_and_130(capsys, run_dir, error):
    assert end(error, CommandState(run_dir=run_dir)) == 130
    assert f"roll resume {run_dir}" in capsys.readouterr().err


def test_cli_main_sigterm_is_143(capsys):
    assert end(Interrupted("SIGTERM")) == 143
    assert capsys.readouterr().err == "Interrupted.\n"


def test_cli_main_wrong_usage_is_2(capsys):
    assert run(["train"]) == 2
    assert "Missing argument 'FILE'" in capsys.readouterr().err
    assert run(["trian", "x"]) == 2
    assert "train" in capsys.readouterr().err


def test_cli_main_version_and_help_are_0(capsys):
    assert run(["--version"]) == 0
    assert re.fullmatch(r"roll \d+\.\d+.*\n", capsys.readouterr().out)
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in ("train", "resume", "check", "eval", "export", "config"):
        assert command in shown


def imported_by(*arguments: str) -> tuple[int, set[str], float]:
    """Exit code, top-level modules and CPU time (see `LOOPS`) of a command in a process of its own."""
    program = (
        f"{LOOPS}\n"
        "import sys, time\n"
        "from roll.cli.main import run\n"
        f"code = run({list(arguments)!r}, own_process=True)\n"
        "print('\\n', code, loops(time.process_time()), *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    code, loops, *modules = done.stdout.splitlines()[-1].split()
    return int(code), {module.partition(".")[0] for module in modules}, float(loops)


def test_cli_main_help_answers_at_once():
    code, modules, loops = imported_by("--help")
    assert code == 0
    assert not modules & (HEAVY | {"pydantic", "yaml", "rich"})
    assert loops < 25  # about 4


def test_cli_main_a_misspelt_key_answers_at_once():
    code, modules, loops = imported_by("train", str(QUICKSTART), "training.lerning_rate=1")
    assert code == 2
    assert not modules & HEAVY
    assert loops < 100  # about 25


def test_cli_main_a_wrong_change_to_a_run_answers_at_once(tmp_path):
    from roll.config.load import dump_yaml, load_config

    (tmp_path / "config.yaml").write_text(dump_yaml(load_config(QUICKSTART)))
    for override in ("training.lerning_rate=1", "seed=9"):
        code, modules, loops = imported_by("resume", str(tmp_path), override)
        assert code == 2
        assert not modules & {"torch", "transformers", "ray"}
        assert loops < 100
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml"}


def test_cli_main_importing_roll_imports_nothing_else():
    program = "import sys; before = set(sys.modules); import roll; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    imported = {name.partition(".")[0] for name in done.stdout.split()}
    assert imported <= {"roll", *sys.stdlib_module_names}
    assert not {name for name in done.stdout.split() if name.startswith("roll.")}


def test_cli_main_the_package_offers_what_it_says():
    import roll

    assert set(roll.__all__) <= set(dir(roll))
    assert roll.load_config(QUICKSTART).name == "quickstart"
    assert callable(roll.train) and callable(roll.resume)
    assert re.match(r"\d+\.\d+", roll.__version__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        roll.trian  # noqa: B018


def test_cli_main_config_show_prints_what_loads_again(capsys, tmp_path):
    assert run(["config", "show", str(QUICKSTART), "seed=7"]) == 0
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    from roll.config.load import load_config

    assert load_config(tmp_path / "again.yaml") == load_config(QUICKSTART, ["seed=7"])


def test_cli_main_config_schema_prints_json(capsys):
    import json

    assert run(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "RLVRConfig"


def test_cli_main_config_explain_prints_or_refuses(capsys):
    assert run(["config", "explain", "training.learning_rate"]) == 0
    assert "Peak learning rate" in capsys.readouterr().out
    assert run(["config", "explain", "training.lerning_rate"]) == 2
    assert "Did you mean 'learning_rate'?" in capsys.readouterr().err


def test_cli_main_cli_an_interrupt_while_the_end_waits_ends_at_once_with_the_same_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []

    class Ended(BaseException):
        """In the place of the process's end."""

    def has_detached_threads(timeout_s: float) -> bool:
        raise KeyboardInterrupt

    def exit_now(code: int) -> None:
        ended.append(code)
        raise Ended

    monkeypatch.setattr(running, "has_detached_threads", has_detached_threads)
    monkeypatch.setattr(os, "_exit", exit_now)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    with pytest.raises(Ended):
        end_process(130)
    assert ended == [130]
