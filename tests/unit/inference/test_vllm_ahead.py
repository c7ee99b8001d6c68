"""A process that waits for what it is to become: as a spawned one in all but the moment of its start."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from roll.inference.vllm import ahead as module
from roll.inference.vllm import child, launch
from roll.inference.vllm.ahead import Ahead, _Context, process_ahead, take

LIGHT = "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=%d, pipe_handle=%d)"
NOTHING = "import sys; sys.exit(3)  # %d %d"


def variables(name: str = "a") -> dict[str, str]:
    return {child.OWNER: str(os.getpid()), child.LAUNCH: name, child.LOG: os.devnull}


@pytest.fixture(autouse=True)
def imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process waits at once: what it would import is tested with an engine."""
    monkeypatch.setattr(module, "_PROGRAM", LIGHT)


@pytest.fixture
def waiting() -> Iterator[Ahead]:
    ahead = Ahead(variables(), None)
    yield ahead
    if ahead.process.poll() is None:
        ahead.close()


SAY = """
import os, pathlib
pathlib.Path({found!r}).write_text(f"{{os.getpid()}} {{os.environ.get('SET_LATER')}} {{os.environ.get('ONLY_THEN')}}")
print("said in the log", flush=True)
"""


def test_it_runs_what_it_is_given_with_the_environment_and_the_log_of_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Ahead({**variables(), "ONLY_THEN": "yes"}, None)
    found, log = tmp_path / "found", tmp_path / "log"
    monkeypatch.setenv("SET_LATER", "yes")
    monkeypatch.setenv(child.LOG, str(log))
    process = _Context(waiting).Process(target=exec, args=(SAY.format(found=str(found)),))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert found.read_text() == f"{waiting.process.pid} yes None"
    assert process.pid == waiting.process.pid
    assert log.read_text() == "said in the log\n"


def test_only_the_first_process_of_a_context_is_the_one_that_waited(waiting: Ahead) -> None:
    context = _Context(waiting)
    first = context.Process(target=os.getpid)
    second = context.Process(target=os.getpid)
    for process in (second, first):
        process.start()
        process.join(30)
        assert process.exitcode == 0
    assert first.pid == waiting.process.pid
    assert second.pid != waiting.process.pid


def test_one_that_has_named_itself_ends_with_its_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setproctitle")
    named = tmp_path / "named"
    os.mkfifo(named)
    naming = f"from setproctitle import setproctitle; setproctitle('new'); open({str(named)!r}, 'w').close(); "
    monkeypatch.setattr(module, "_PROGRAM", naming + LIGHT)
    ahead = Ahead(launch._variables("its launch", None, Path(os.devnull), cpu=True), None)
    named.read_text()  # once it has its name
    launch.end_launch("another")
    assert ahead.process.poll() is None
    launch.end_launch("its launch")
    assert ahead.process.wait(30) == -signal.SIGKILL
    ahead.close_pipes()


def test_a_signal_that_ends_it_is_its_exit_code_and_closes_its_sentinel(waiting: Ahead) -> None:
    process = _Context(waiting).Process(target=signal.pause)
    process.start()
    assert process.is_alive()
    process.kill()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert not process.is_alive()


def test_one_that_nobody_took_is_gone_after_the_block() -> None:
    with process_ahead(variables("b"), None):
        (ahead,) = module._waiting
        assert psutil.pid_exists(ahead.process.pid)
    assert module._waiting == []
    assert not psutil.pid_exists(ahead.process.pid)


def test_one_that_was_taken_is_its_takers() -> None:
    with process_ahead(variables("c"), None):
        ahead = take(None)
        assert ahead is not None
        assert ahead.name == "c"
        assert take(None) is None
    assert ahead.process.poll() is None
    ahead.close()


def test_it_is_not_used_where_libraries_would_have_read_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with process_ahead(variables(), 2):
        assert take(None) is None
        assert take(1) is None
        with monkeypatch.context() as changed:
            changed.setenv("OMP_SCHEDULE", "dynamic")
            assert take(2) is None
        ahead = take(2)
    assert ahead is not None
    ahead.close()


def test_one_that_has_died_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROGRAM", NOTHING)
    with process_ahead(variables(), None):
        module._waiting[0].process.wait()
        assert take(None) is None


def test_one_that_dies_as_it_is_started_is_a_process_that_has_ended(waiting: Ahead) -> None:
    process = _Context(waiting).Process(target=os.getpid)
    waiting.process.kill()
    waiting.process.wait()
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
