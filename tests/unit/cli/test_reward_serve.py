"""`roll reward serve` as a command: what it serves, how it ends, and mistakes on the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from roll.cli.main import run


def test_reward_serve_a_command_serves_until_sigterm(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def same(text, answer, metadata) -> bool:\n    return text == answer\n")
    command = [sys.executable, "-m", "roll", "reward", "serve", "own.py:same", "--port", "0", "-j", "1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Serving the reward 'python' at http://127.0.0.1:")
        url = line.split(" at ")[1].split(". ")[0]
        body = json.dumps({"items": [{"text": "a", "answer": "a"}, {"text": "b", "answer": "a"}]}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/score", data=body)) as response:
            results = json.load(response)["results"]
        assert [(r["value"], r["correct"]) for r in results] == [(1.0, True), (0.0, False)]
        os.kill(process.pid, signal.SIGTERM)
        assert "Stopping" in process.stdout.read()
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.py"], "'nothing.py' does not exist"),
        (["own.py"], "write 'own.py:FUNCTION'"),
        (["own.py:absent"], "absent"),
        (["missing.yaml"], "missing.yaml"),
        (["maths"], "math"),
        (["math", "a=1"], "is not a YAML file"),
        (["environment"], "cannot be served"),
        (["math", "--token-env", "NO_SUCH_TOKEN"], "NO_SUCH_TOKEN"),
        (["math", "--host", "203.0.113.1"], "cannot listen at 203.0.113.1:8600"),
    ],
)
def test_reward_serve_mistakes_are_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def same(text, answer, metadata):\n    return 1.0\n")
    assert run(["reward", "serve", *arguments]) == 2
    assert words in capsys.readouterr().err
