"""What `scripts/setup.sh` does outside `.venv`: nothing, unless it was asked to."""

import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "setup.sh"
HEAD, TAIL = "# Sandboxes (code rewards)", "\nstep=0\n"


def offer(tmp_path: Path, choice: str) -> tuple[str, str]:
    """Its output, and the commands it ran, on a machine with apt-get and without bubblewrap."""
    text = SCRIPT.read_text()
    functions = text[text.index(HEAD) : text.index(TAIL)]
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("id", "env", "timeout", "bash"):
        (tools / name).symlink_to(str(shutil.which(name)))
    called = tmp_path / "called"
    (tools / "apt-get").write_text(f'#!/bin/bash\necho "$@" >>{called}\n')
    (tools / "sudo").write_text(f'#!/bin/bash\nshift; echo "sudo $@" >>{called}\n')
    for name in ("apt-get", "sudo"):
        (tools / name).chmod(0o755)
    program = f"set -euo pipefail\nLOG={tmp_path}/log\nBUBBLEWRAP={choice}\n{functions}\noffer_bubblewrap\n"
    done = subprocess.run(
        [str(shutil.which("bash")), "-c", program], env={"PATH": str(tools)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, called.read_text() if called.exists() else ""


def test_setup_without_being_asked_it_installs_nothing_of_the_system_and_says_what_is_missing(tmp_path):
    shown, called = offer(tmp_path, "")
    assert called == ""
    assert "Not here: bubblewrap" in shown and "make setup BUBBLEWRAP=apt" in shown


def test_setup_asked_it_installs_bubblewrap(tmp_path):
    shown, called = offer(tmp_path, "apt")
    assert "install" in called and "bubblewrap" in called
    assert shown == ""
