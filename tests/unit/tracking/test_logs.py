"""Nothing but ROLL's own display reaches the terminal; run in processes of their own, for pytest captures ours."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from roll.config.pipelines.rlvr import RLVRConfig
from roll.tracking import RunDirectory, Tracker
from roll.tracking.logs import read_tail

NOISE = """
import ctypes, logging, os, subprocess, sys, warnings
def make_noise():
    print("NOISE python")
    print("NOISE stderr", file=sys.stderr)
    os.write(1, b"NOISE descriptor\\n")
    ctypes.CDLL(None).printf(b"NOISE stdio in C\\n")  # buffered: must not reach the terminal later either
    subprocess.run(["sh", "-c", "echo NOISE child; echo NOISE child error >&2"])
    logging.getLogger("vllm").warning("NOISE logger")
    warnings.warn("NOISE warning")
"""


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", NOISE + script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_run_log_all_noise_goes_to_the_log_and_none_to_the_terminal(tmp_path: Path) -> None:
    script = """
from pathlib import Path
from roll.tracking.logs import redirect_infrastructure_logs
print("before")
with redirect_infrastructure_logs(Path(sys.argv[1])) as terminal:
    make_noise()
    terminal.file.write("display\\n")
print("after")
print("after, on stderr", file=sys.stderr)
"""
    log = tmp_path / "controller-0.log"
    done = run_script(script, str(log))
    assert done.stdout == "before\ndisplay\nafter\n"
    assert done.stderr == "after, on stderr\n"
    text = log.read_text()
    sources = ("python", "stderr", "descriptor", "stdio in C", "child", "child error", "logger", "warning")
    assert all(f"NOISE {source}" in text for source in sources)
    assert "before" not in text and "after" not in text


def test_run_log_the_terminal_is_given_back_after_an_exception(tmp_path: Path) -> None:
    script = """
from pathlib import Path
from roll.tracking.logs import redirect_infrastructure_logs
try:
    with redirect_infrastructure_logs(Path(sys.argv[1])):
        raise RuntimeError("boom")
except RuntimeError as error:
    print(error)
"""
    assert run_script(script, str(tmp_path / "log")).stdout == "boom\n"


def test_run_log_a_log_on_a_full_disk_does_not_take_the_place_of_what_ended_the_run() -> None:
    script = """
from pathlib import Path
from roll.tracking.logs import redirect_infrastructure_logs
try:
    with redirect_infrastructure_logs(Path("/dev/full")):
        logging.getLogger("roll").warning("lost")
        raise RuntimeError("no room for metrics.jsonl")
except (OSError, RuntimeError) as error:
    print(error)
"""
    assert run_script(script).stdout == "no room for metrics.jsonl\n"


def test_run_log_the_tail_of_a_log_is_its_last_lines_with_text(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {i}\n\n" for i in range(100_000)) + "end without newline")
    assert read_tail(log, 3) == ["line 99998", "line 99999", "end without newline"]
    assert read_tail(tmp_path / "missing") == []


RUN = """
import time
from roll.config.pipelines.rlvr import RLVRConfig
from roll.tracking import RunDirectory, Tracker
config = RLVRConfig.model_validate({
    "name": "demo", "output_dir": sys.argv[1], "model": "smollm2-135m-instruct",
    "data": [{"source": "arithmetic", "reward": "math"}],
    "training": {"num_steps": 3, "learning_rate": 1e-5}, "tracking": {"console": sys.argv[2]},
})
with RunDirectory.create(config.run_dir, {}) as run, Tracker(run, config, num_steps=3) as tracker:
    make_noise()
    for step in (1, 2, 3):
        with tracker.spans.step(step), tracker.spans.phase("train"):
            tracker.log_step(step, {"reward/mean": step / 4, "time/step_s": 2.0, "time/train_s": 1.0})
"""


def test_run_log_a_broken_run_points_to_its_log(tmp_path: Path) -> None:
    done = run_script(RUN + "    raise RuntimeError('fell over')\n", str(tmp_path), "plain")
    assert "step 3/3  reward  0.750" in done.stdout
    assert f"Last lines of {tmp_path}/demo/logs/controller-0.log:" in done.stdout
    assert "  RuntimeError: fell over" in done.stdout


@pytest.mark.parametrize("kind", ["DataError", "LossError", "EngineError", "CallbackError", "NoEngineError"])
def test_run_log_an_error_that_names_its_cause_is_not_answered_with_logs(tmp_path: Path, kind: str) -> None:
    failing = f"    from roll.errors import {kind}\n    raise {kind}('file missing')\n"
    done = run_script(RUN + failing, str(tmp_path), "plain")
    assert "Last lines" not in done.stdout
    assert f"{kind}: file missing" in done.stderr


def test_run_log_a_run_goes_on_when_nobody_reads_its_lines_any_more(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", NOISE + RUN, str(tmp_path), "plain"], stdout=writing)
    os.close(writing)
    os.close(reading)
    assert process.wait(timeout=60) == 0
    assert len((tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()) == 3


def in_terminal(script: str, arguments: list[str], interrupt_on: bytes = b"") -> tuple[str, int]:
    """Run a script in a pseudo-terminal of 90 × 30; press Ctrl-C once `interrupt_on` was seen."""
    process_id, terminal = pty.fork()
    if process_id == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "-c", NOISE + script, *arguments])
    output = b""
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline and select.select([terminal], [], [], 60)[0]:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # the other side is closed
                break
            output += chunk
            if interrupt_on and interrupt_on in output:
                os.write(terminal, b"\x03")
                interrupt_on = b""
        status = os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
    finally:
        os.close(terminal)
    return output.decode(), status


def test_run_log_the_live_display_shows_the_run_and_nothing_writes_over_it(tmp_path: Path) -> None:
    output, status = in_terminal(RUN, [str(tmp_path), "auto"])
    assert status == 0
    assert "NOISE" not in output
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert "ROLL demo" in plain and "3/3" in plain and "0.750" in plain and "train 50%" in plain
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # the cursor is shown again


def test_run_log_ctrl_c_gives_the_terminal_back(tmp_path: Path) -> None:
    script = RUN + "    with tracker.spans.phase('generate'):\n        time.sleep(60)\n"
    output, status = in_terminal(script, [str(tmp_path), "live"], interrupt_on=b"generate")
    assert status == -signal.SIGINT
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    assert "KeyboardInterrupt" in output[output.rindex("\x1b[?25h") :]  # Python's own message, on the terminal again


def test_run_log_our_own_streams_are_as_before_after_a_tracker(
    run: RunDirectory, config: RLVRConfig, demo: SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    with Tracker(run, config, num_steps=config.training.num_steps) as tracker:
        print("inside")
        demo.step(tracker, 1)
    print("outside")
    os.write(2, b"outside\n")
    captured = capfd.readouterr()
    assert "outside" in captured.out and captured.err == "outside\n"
    assert "inside" not in captured.err


def test_run_log_a_forked_worker_warns_in_the_log_and_not_on_the_display(tmp_path: Path) -> None:
    forking = """
    if (child := os.fork()) == 0:
        logging.getLogger("roll.rewards").warning("from the worker")
        os._exit(0)
    os.waitpid(child, 0)
    logging.getLogger("roll.rewards").warning("from the controller")
"""
    done = run_script(RUN + forking, str(tmp_path), "plain")
    assert "warning: from the controller" in done.stdout
    assert "from the worker" not in done.stdout
    assert "from the worker" in (tmp_path / "demo" / "logs" / "controller-0.log").read_text()
