"""How the command begins, whatever lies in the current directory and however the terminal is set."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONFIG = """
name: run
model: model
data: [{source: arithmetic, reward: math, system_prompt: "3 → 4 …"}]
training: {num_steps: 1}
"""


def roll(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m roll`, which Python lets look for modules in the current directory first."""
    return subprocess.run(
        [sys.executable, "-m", "roll", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        encoding="latin1",
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")} | variables,
        check=False,
    )


@pytest.mark.parametrize("encoding", ["latin1", "iso8859-15"])
def test_cli_start_output_that_cannot_be_encoded_is_written_with_question_marks(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    done = roll(tmp_path, "config", "show", "run.yaml", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 ? 4 " in done.stdout


def test_cli_start_files_of_the_current_directory_do_not_shadow_modules(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    for name in ("tokenizers", "random", "yaml", "click", "pydantic", "tempfile", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    done = roll(tmp_path, "check", "run.yaml")
    assert "shadowed" not in done.stdout + done.stderr
    assert "arithmetic: '8' (correct) scores 1" in done.stdout


def test_cli_start_a_package_in_an_archive_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "library.zip", "w") as archive:
        for file in ("roll_rl.py", "roll/__init__.py", "roll/__main__.py"):
            archive.write(ROOT / "src" / file, file)
    done = roll(tmp_path, "--version", PYTHONPATH=str(tmp_path / "library.zip"))
    assert done.returncode == 2
    assert f"ROLL is imported from the archive '{tmp_path / 'library.zip'}'" in done.stderr


def test_cli_start_an_interrupt_before_the_command_begins_leaves_no_traceback(tmp_path: Path) -> None:
    """As while Python still imports: here of the first module of the command line."""
    program = (
        "import sys, roll_rl\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'roll.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "roll_rl.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")
