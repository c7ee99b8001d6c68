"""`roll chat` with a tiny model: through a pipe, and as on a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from worlds import tiny_model

from roll.cli.main import run as roll
from roll.config.document import dump
from roll.data import ChatRenderer

SHORT = ["--max-new-tokens", "8", "--temperature", "0", "--dtype", "float32"]


class Terminal(io.StringIO):
    """Standard input or output of a person."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, the second in a run that began with the first."""
    place = tmp_path_factory.mktemp("chat")
    tiny_model.write_tiny_model(place / "first", seed=1)
    tiny_model.write_tiny_model(place / "run" / "checkpoints" / "step-000002" / "model", seed=2)
    (place / "run" / "config.yaml").write_text(dump({"model": {"path": str(place / "first")}}))
    return place


def through_a_pipe(monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return roll(["chat", *arguments, *SHORT])


def at_a_terminal(monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr("sys.stdin", Terminal(text))
    shown = Terminal()
    monkeypatch.setattr("sys.stdout", shown)
    return roll(["chat", *arguments, *SHORT]), shown.getvalue()


def test_cli_chat_through_a_pipe_each_line_is_a_message_and_only_answers_are_printed(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ChatRenderer, "decode", lambda self, ids: f"<{len(ids)}>")
    assert through_a_pipe(monkeypatch, "hello\n\nagain\n", str(models / "first")) == 0
    said = capsys.readouterr()
    assert [line[0] + line[-1] for line in said.out.splitlines()] == ["<>", "<>"]
    assert said.err == ""


def test_cli_chat_the_same_questions_get_the_same_answers_and_another_model_other_ones(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for source in ("first", "first", "run"):
        assert through_a_pipe(monkeypatch, "what is 1 + 1?\n/again\n", str(models / source)) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


def test_cli_chat_on_a_terminal_sources_answer_beside_each_other(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, first = str(models / "run"), str(models / "first")
    code, shown = at_a_terminal(monkeypatch, "hello\n/help\n/quit\nnever read\n", run, "--base")
    assert code == 0
    assert shown.index(f"── {run}") < shown.index(f"── {first}")
    assert "/reset" in shown and "never read" not in shown


def test_cli_chat_what_a_speaker_said_stays_in_its_conversation(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[list[tuple[str, str]]] = []
    render = ChatRenderer.render

    def listening(self, messages, tools=()):
        heard.append([(message.role, message.text) for message in messages])
        return render(self, messages, tools)

    monkeypatch.setattr(ChatRenderer, "render", listening)
    monkeypatch.setattr(ChatRenderer, "decode", lambda self, ids: "yes")
    lines = "one\ntwo\n/again\n/reset\nthree\n/system short\nfour\n"
    assert through_a_pipe(monkeypatch, lines, str(models / "first")) == 0
    one, two = ("user", "one"), [("user", "one"), ("assistant", "yes"), ("user", "two")]
    assert heard == [[one], two, two, [("user", "three")], [("system", "short"), ("user", "four")]]


def test_cli_chat_a_conversation_that_is_too_long_is_refused_and_stays_as_it_was(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = at_a_terminal(monkeypatch, "word " * 5000 + "\nhello\n", str(models / "first"))
    assert code == 0
    assert "/reset" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/rest", "unknown command /rest. Did you mean 'reset'?"),
        ("/temperature warm", "expected a number from 0 to 1,000,000, got 'warm'"),
        ("/tokens 0", "expected a number from 1 to 1,000,000, got '0'"),
        ("/tokens nan", "expected a number from 1 to 1,000,000, got 'nan'"),
        ("/again", "the conversation is empty"),
    ],
)
def test_cli_chat_a_mistyped_command_gets_one_message_and_the_conversation_goes_on(
    line: str, message: str, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert through_a_pipe(monkeypatch, f"{line}\nhello\n", str(models / "first")) == 0
    said = capsys.readouterr()
    assert message in said.err and len(said.out.splitlines()) >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "not a catalog name, a directory or a Hub ID"),
        (["{models}/first", "--base"], "is not a run"),
    ],
)
def test_cli_chat_a_source_that_is_no_model_gets_one_message(
    arguments: list[str],
    message: str,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [argument.format(models=models) for argument in arguments]
    assert through_a_pipe(monkeypatch, "hello\n", *given) == 2
    assert message in capsys.readouterr().err


def test_cli_chat_what_a_model_writes_does_not_act_on_the_terminal(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\x9b31m \u202egnp.exe \ud800 [red]x[/red]"
    monkeypatch.setattr(ChatRenderer, "decode", lambda self, ids: hostile[: 4 * len(ids)])
    code, shown = at_a_terminal(monkeypatch, "hello\n", str(models / "first"))
    assert code == 0 and "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_cli_chat_an_interrupted_answer_leaves_the_engine_free_for_the_next(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, calls = ChatRenderer.decode, []

    def interrupted_once(self, ids):
        calls.append(len(ids))
        if len(calls) == 1:
            raise KeyboardInterrupt
        return decode(self, ids)

    monkeypatch.setattr(ChatRenderer, "decode", interrupted_once)
    code, shown = at_a_terminal(monkeypatch, "hello\nagain\n", str(models / "first"))
    assert code == 0 and shown.count("(interrupted)") == 1 and len(calls) > 1


@pytest.mark.parametrize("mark", ["architectures", "score.weight"])
def test_cli_chat_with_a_reward_model_is_one_clear_error(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model.write_tiny_model(tmp_path / "scorer")
    if mark == "architectures":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForSequenceClassification"]}))
    else:
        weights = load_file(model / "model.safetensors")
        save_file({**weights, "score.weight": torch.zeros(1, 32)}, model / "model.safetensors", {"format": "pt"})
    assert through_a_pipe(monkeypatch, "hello\n", str(model)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"Error: '{model}' is a reward model")
    assert len(said.err.strip().splitlines()) == 1
