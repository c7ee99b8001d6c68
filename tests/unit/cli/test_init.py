"""`roll init`, and completion in shells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll.cli.init import find_shipped_examples
from roll.cli.main import run
from roll.cli.scaffold import OWN_CODE, PIPELINES
from roll.config.load import load_config

ROLL = [sys.executable, "-c", "from roll.cli import main; main()"]


def test_cli_init_the_examples_are_written_where_the_documentation_finds_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert run(["init", str(tmp_path / "work"), "--examples"]) == 0
    said = capsys.readouterr().out
    assert f"cd {tmp_path / 'work'}" in said and "roll train examples/quickstart.yaml" in said
    source = find_shipped_examples()
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert (tmp_path / "work" / "examples" / path.relative_to(source)).read_bytes() == path.read_bytes()
    assert run(["init", str(tmp_path / "work"), "--examples"]) == 0, "written again, nothing differs"


def test_cli_init_names_the_command_by_its_path_if_it_is_not_on_the_path(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "argv", [".venv/bin/roll"])
    assert run(["init", str(tmp_path / "work"), "--examples"]) == 0
    assert f"  {Path.cwd()}/.venv/bin/roll train examples/quickstart.yaml\n" in capsys.readouterr().out


def test_cli_init_a_file_that_the_user_changed_is_never_overwritten(tmp_path, capsys):
    mine = tmp_path / "examples" / "sft.yaml"
    mine.parent.mkdir()
    mine.write_text("name: mine\n")
    assert run(["init", str(tmp_path), "--examples"]) == 2
    assert "1 of " in (said := capsys.readouterr().err) and "'sft.yaml'" in said
    assert mine.read_text() == "name: mine\n"
    assert sorted(path.name for path in mine.parent.iterdir()) == ["sft.yaml"], "nothing was written"


def test_cli_init_a_directory_that_is_a_file_is_a_message(tmp_path, capsys):
    (tmp_path / "work").write_text("")
    assert run(["init", str(tmp_path / "work"), "--examples"]) == 2
    assert "Traceback" not in capsys.readouterr().err


NEEDED = {
    "agentic": {"config.yaml", "environment.py"},
    "rlvr": {"config.yaml", "data.jsonl", "reward.py"},
}


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_cli_init_writes_a_configuration_of_every_pipeline_that_check_accepts(
    pipeline, tmp_path, tiny_model, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    more = ["--teacher", str(tiny_model)] if pipeline.startswith("distill") else []
    more += ["--reward", OWN_CODE] if pipeline == "rlvr" else []
    assert run(["init", "work", "--yes", "--pipeline", pipeline, "--model", str(tiny_model), *more]) == 0
    written = {path.name for path in Path("work").iterdir()} - {"__pycache__"}  # of reward.py, which was imported
    assert written == NEEDED.get(pipeline, {"config.yaml", "data.jsonl"})
    said = capsys.readouterr().out
    stub = next(
        (
            f"  # edit {name} first: it is only an example\n"
            for name in NEEDED.get(pipeline, ())
            if name.endswith(".py")
        ),
        "",
    )
    assert f"work: {pipeline}" in said and said.endswith(f"Next:\n\n  cd work\n{stub}  roll train config.yaml\n")


@pytest.mark.integration
def test_cli_init_stub_of_a_reward_trains(tmp_path, tiny_model, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["init", "--yes", "--model", str(tiny_model), "--reward", OWN_CODE]) == 0
    assert "# edit reward.py first: it is only an example\n" in capsys.readouterr().out
    written = Path("reward.py").read_text()
    assert "in text else 0.0" in written
    # a random model is never right and never ends: any two answers get another reward
    Path("reward.py").write_text(written.replace("else 0.0", "else sum(map(ord, text)) / 1e6"))
    config = Path("config.yaml").read_text()
    Path("config.yaml").write_text(config.replace("require_finished: true", "require_finished: false"))
    small = ["training.num_steps=1", "rollout={prompts_per_step: 2, group_size: 4, max_new_tokens: 4}"]
    small += ["evaluation={every_num_steps: 0, num_prompts: 1, samples_per_prompt: 1}", "inference.engine=hf"]
    assert run(["train", "config.yaml", *small, "name=first"]) == 0
    rows = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1]


def test_cli_init_stub_of_an_environment_passes_the_check_of_environments(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["init", "--yes", "--model", str(tiny_model), "--pipeline", "agentic"]) == 0
    assert run(["env", "check", "environment.py:Environment"]) == 0


def test_cli_init_asks_what_is_not_given(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"id": n, "question": f"{n} + 1 =", "solution": str(n + 1)} for n in range(20)]
    Path("sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = []

    def answer(question, **_):
        asked.append(question)
        return {"Which model?": str(tiny_model), "How are answers scored?": "exact"}.get(question, "sums.jsonl")

    monkeypatch.setattr("click.prompt", answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert run(["init", "work", "--pipeline", "rlvr"]) == 0
    assert [question.split("?")[0] for question in asked] == [
        "Which model", "Which JSONL or Parquet file", "How are answers scored",
    ]  # fmt: skip
    data = load_config("work/config.yaml").data[0]
    assert (data.prompt_key, data.answer_key, data.reward[0].type) == ("question", "solution", "exact")


def test_cli_init_uses_an_existing_reward_function(tmp_path, tiny_model, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    for file in ("work/mine.py", "other.py"):
        Path(file).write_text("def grade(text, answer, metadata):\n    return float(answer in text)\n")
    for file, expected in (("work/mine.py", "mine.py:grade"), ("other.py", f"{tmp_path / 'other.py'}:grade")):
        assert run(["init", "work", "--yes", "--model", str(tiny_model), "--reward", f"{file}:grade"]) == 0
        assert load_config("work/config.yaml").data[0].reward[0].function == expected
        assert not Path("work/reward.py").exists() and "only an example" not in capsys.readouterr().out
        Path("work/config.yaml").unlink()
        Path("work/data.jsonl").unlink()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--reward", "rewards"], "'rewards' is not a reward: use one of math, exact"),
        (["--reward", "none.py:score"], "file 'none.py' does not exist"),
        (["--pipeline", "distill"], "--teacher is required: Which teacher model?"),
        (["--pipeline", "sft", "--reward", "math"], "the pipeline 'sft' does not support --reward"),
        (["--data", "rows.jsonl"], "(columns: q, a): rename it to 'prompt'"),
        (["--data", "none.jsonl"], "cannot be read"),
        (["--data", "rows.csv"], "must be a .jsonl or .parquet file"),
        (["--data", "list.jsonl"], "must have one JSON object per line"),
        (["--examples", "--reward", "math"], "--reward cannot be combined with --examples"),
    ],
)
def test_cli_init_options_that_cannot_be_followed_write_nothing(options, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"q": "1 + 1 =", "a": "2"}\n')
    Path("list.jsonl").write_text("[1, 2]\n")
    assert run(["init", "work", "--yes", *options]) == 2
    assert words in capsys.readouterr().err
    assert not Path("work").exists()


def test_cli_init_never_overwrites_a_configuration(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("mine")
    assert run(["init", str(tmp_path), "--yes"]) == 2
    assert "config.yaml' already exists: nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == "mine"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_cli_init_the_shell_is_given_a_script_that_completes(shell):
    done = subprocess.run(
        ROLL, env={**os.environ, "_ROLL_COMPLETE": f"{shell}_source"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and f"_ROLL_COMPLETE={shell}_complete" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("roll do", ["doctor"]),
        ("roll config e", ["explain"]),
        ("roll doctor --p", ["--peer"]),
        ("roll env li", ["list"]),
    ],
)
def test_cli_init_commands_and_options_are_completed(words, completed):
    environment = {
        **os.environ,
        "_ROLL_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = subprocess.run(ROLL, env=environment, capture_output=True, text=True, timeout=60)
    assert [line.partition(",")[2] for line in done.stdout.split()] == completed, done.stderr


@pytest.mark.parametrize(("words", "completed"), [("roll train ex", "file,ex"), ("roll resume ru", "dir,ru")])
def test_cli_init_configurations_and_runs_are_completed_as_paths(words, completed):
    environment = {**os.environ, "_ROLL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "2"}
    done = subprocess.run(ROLL, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [completed], done.stderr
