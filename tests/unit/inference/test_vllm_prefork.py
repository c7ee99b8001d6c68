"""A process that waits for what it is to become: as a spawned one in all but the moment of its start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe, get_context, resource_tracker, spawn
from pathlib import Path

import psutil
import pytest

from roll.errors import EngineDiedError
from roll.inference import EngineSpec
from roll.inference.vllm import child, launch
from roll.inference.vllm import prefork as module
from roll.inference.vllm.prefork import PreforkedProcess, _Context, claim_process, open_preforked_process

pytestmark = pytest.mark.integration

LIGHT = "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=%d, pipe_handle=%d)"
NOTHING = "import sys; sys.exit(3)  # %d %d"


def variables(name: str = "a") -> dict[str, str]:
    return {child.OWNER_VARIABLE: str(os.getpid()), child.LAUNCH_VARIABLE: name, child.LOG_VARIABLE: os.devnull}


@pytest.fixture(autouse=True)
def imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process waits at once: what it would import is tested with an engine."""
    monkeypatch.setattr(module, "_CHILD_PROGRAM", LIGHT)


@pytest.fixture
def waiting() -> Iterator[PreforkedProcess]:
    ahead = PreforkedProcess(variables(), None)
    yield ahead
    if ahead.process.poll() is None:
        ahead.close()


SAY = """
import os, pathlib
pathlib.Path({found!r}).write_text(f"{{os.getpid()}} {{os.environ.get('SET_LATER')}} {{os.environ.get('ONLY_THEN')}}")
print("said in the log", flush=True)
"""


def test_vllm_prestart_it_runs_what_it_is_given_with_the_environment_and_the_log_of_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = PreforkedProcess({**variables(), "ONLY_THEN": "yes"}, None)
    found, log = tmp_path / "found", tmp_path / "log"
    monkeypatch.setenv("SET_LATER", "yes")
    monkeypatch.setenv(child.LOG_VARIABLE, str(log))
    process = _Context(waiting).Process(target=exec, args=(SAY.format(found=str(found)),))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert found.read_text() == f"{waiting.process.pid} yes None"
    assert process.pid == waiting.process.pid
    assert log.read_text() == "said in the log\n"


def test_vllm_prestart_only_the_first_process_of_a_context_is_the_one_that_waited(waiting: PreforkedProcess) -> None:
    context = _Context(waiting)
    first = context.Process(target=os.getpid)
    second = context.Process(target=os.getpid)
    for process in (second, first):
        process.start()
        process.join(30)
        assert process.exitcode == 0
    assert first.pid == waiting.process.pid
    assert second.pid != waiting.process.pid


def test_vllm_prestart_one_that_has_named_itself_ends_with_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("setproctitle")
    named = tmp_path / "named"
    os.mkfifo(named)
    naming = f"from setproctitle import setproctitle; setproctitle('new'); open({str(named)!r}, 'w').close(); "
    monkeypatch.setattr(module, "_CHILD_PROGRAM", naming + LIGHT)
    ahead = PreforkedProcess(launch._build_environment("its launch", None, Path(os.devnull), cpu=True), None)
    named.read_text()  # once it has its name
    launch.cancel_launch("another")
    assert ahead.process.poll() is None
    launch.cancel_launch("its launch")
    assert ahead.process.wait(30) == -signal.SIGKILL
    ahead.close_pipes()


def test_vllm_prestart_a_signal_that_ends_it_is_its_exit_code_and_closes_its_sentinel(
    waiting: PreforkedProcess,
) -> None:
    process = _Context(waiting).Process(target=signal.pause)
    process.start()
    assert process.is_alive()
    process.kill()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert not process.is_alive()


def test_vllm_prestart_one_that_nobody_took_is_gone_after_the_block() -> None:
    with open_preforked_process(variables("b"), None):
        (ahead,) = module._unclaimed_processes
        assert psutil.pid_exists(ahead.process.pid)
    assert module._unclaimed_processes == []
    assert not psutil.pid_exists(ahead.process.pid)


def test_vllm_prestart_one_that_was_taken_is_its_takers() -> None:
    with open_preforked_process(variables("c"), None):
        ahead = claim_process(None)
        assert ahead is not None
        assert ahead.name == "c"
        assert claim_process(None) is None
    assert ahead.process.poll() is None
    ahead.close()


def test_vllm_prestart_it_is_not_used_where_libraries_would_have_read_something_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with open_preforked_process(variables(), 2):
        assert claim_process(None) is None
        assert claim_process(1) is None
        with monkeypatch.context() as changed:
            changed.setenv("OMP_SCHEDULE", "dynamic")
            assert claim_process(2) is None
        ahead = claim_process(2)
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == [
        "it has 2 threads, and the engine None", "it has 2 threads, and the engine 1", "OMP_SCHEDULE",
    ]  # fmt: skip
    assert ahead is not None
    ahead.close()


def test_vllm_prestart_is_used_after_scikit_learn_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers imports scikit-learn if it is installed, which sets variables of Intel's OpenMP runtime."""
    for name in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):
        monkeypatch.delenv(name, raising=False)
    with open_preforked_process(variables(), 2):
        program = (
            "import json, os; before = dict(os.environ); import sklearn; "
            "print(json.dumps({name: os.environ[name] for name in os.environ.keys() - before.keys()}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True, timeout=60
        )
        set_by_import = json.loads(done.stdout)
        assert set_by_import
        for name, value in set_by_import.items():
            monkeypatch.setenv(name, value)
        ahead = claim_process(2)
    assert ahead is not None
    ahead.close()


def test_vllm_prestart_one_that_has_died_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHILD_PROGRAM", NOTHING)
    with open_preforked_process(variables(), None):
        module._unclaimed_processes[0].process.wait()
        assert claim_process(None) is None


def test_vllm_prestart_one_that_dies_before_it_has_heard_all_is_spawned_anew(
    tmp_path: Path, waiting: PreforkedProcess
) -> None:
    found = tmp_path / "found"
    more_than_a_pipe_holds = "#" * 2**20
    process = _Context(waiting).Process(target=exec, args=(SAY.format(found=str(found)) + more_than_a_pipe_holds,))
    waiting.process.kill()
    waiting.process.wait()
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert found.read_text() == f"{process.pid} None None"
    assert not waiting.is_used


def test_vllm_prestart_what_a_process_must_inherit_goes_to_one_that_is_spawned(waiting: PreforkedProcess) -> None:
    receiver, sender = Pipe(duplex=False)
    process = _Context(waiting).Process(target=sender.send, args=("heard",))
    process.start()
    assert receiver.poll(30)
    assert receiver.recv() == "heard"
    process.join(30)
    assert process.pid != waiting.process.pid
    assert not waiting.is_used


def test_vllm_prestart_it_imports_what_this_process_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what lies in the current directory; but what is on the path."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "colorsys.py").write_text("raise SystemExit(9)")
    (tmp_path / "found_nowhere_else.py").write_text("")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "_CHILD_PROGRAM", "import colorsys, found_nowhere_else; " + LIGHT)
    waiting = PreforkedProcess(variables(), None)
    process = _Context(waiting).Process(target=os.getpid)
    process.start()
    process.join(30)
    assert (process.pid, process.exitcode) == (waiting.process.pid, 0)


def test_vllm_prestart_what_is_on_the_path_and_no_text_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As imports do."""
    monkeypatch.setattr(sys, "path", [Path("/somewhere"), *sys.path])
    waiting = PreforkedProcess(variables(), None)
    process = _Context(waiting).Process(target=os.getpid)
    process.start()
    process.join(30)
    assert (process.pid, process.exitcode) == (waiting.process.pid, 0)


def opened_pipes() -> set[str]:
    """Pipes and sockets that this process has open, by the kernel's number of each."""
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in found if link.startswith(("pipe:", "socket:"))}


@pytest.mark.parametrize("entry", ["/nowhere\0", "/\ud800"], ids=["null", "surrogate"])
def test_vllm_prestart_a_run_goes_on_without_one_where_no_process_can_be_told_the_path(
    monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    monkeypatch.setattr(launch, "is_cpu_build", lambda: True)
    monkeypatch.setattr(sys, "path", [entry, *sys.path])
    resource_tracker.ensure_running()
    before = opened_pipes()
    with launch.prestart_engine(None):
        assert claim_process(None) is None
    assert opened_pipes() <= before  # what earlier tests left may be closed meanwhile


UNNAMED = """
import os
from roll.inference.vllm import child
child._end_with_parent = child._redirect_output = lambda: None
os.environ._data[b""] = b"inherited"  # as `env '=inherited' …` leaves it; it can be neither set nor deleted
os.environ["GONE_THEN"] = "1"
child.set_up_process({name: value for name, value in os.environ.items() if name != "GONE_THEN"} | {"NEW": "yes"})
print(os.environ[""], os.environ["NEW"], "GONE_THEN" in os.environ)
"""


def test_vllm_prestart_a_variable_without_a_name_stays_as_it_was_inherited() -> None:
    done = subprocess.run([sys.executable, "-c", UNNAMED], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == "inherited yes False\n"


ORPHANED = """
import os, signal, sys
from roll.inference.vllm import prefork, child
prefork._CHILD_PROGRAM = (
    "from roll.inference.vllm import child; child._PRELOADED_MODULES = (); child.PARENT_POLL_S = 0.01; "
    "child.wait_for_work(tracker_fd=%d, pipe_handle=%d)"
)
variables = {child.OWNER_VARIABLE: str(os.getpid()), child.LAUNCH_VARIABLE: "a", child.LOG_VARIABLE: os.devnull}
waiting = prefork.PreforkedProcess(variables, None)
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
signal.alarm(20)
os.read(waiting.ended, 1)
print("it has ended")
"""


def test_vllm_prestart_it_ends_with_its_owner_also_where_another_process_holds_the_owner_s_pipe() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHANED], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.stdout == "it has ended\n"


TRACKED = """
import os, psutil
from multiprocessing import resource_tracker
from roll.inference.vllm import prefork, launch
prefork._CHILD_PROGRAM = "pass  # %d %d"
launch.is_cpu_build = lambda: True
with launch.prestart_engine(None):
    tracker = psutil.Process(resource_tracker._resource_tracker._pid)
    print(tracker.environ().get("PYTHONWARNINGS"), os.environ.get("PYTHONWARNINGS"))
"""


def test_vllm_prestart_the_resource_tracker_that_starts_with_it_is_quiet_about_killed_engines() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    command = [sys.executable, "-c", TRACKED]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True, env=environment)
    assert done.stdout == "ignore:resource_tracker:UserWarning None\n"


def test_vllm_prestart_a_run_goes_on_without_one_where_none_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(launch, "is_cpu_build", lambda: True)
    monkeypatch.setattr(module.subprocess, "Popen", refuse)
    resource_tracker.ensure_running()
    before = opened_pipes()
    with launch.prestart_engine(None):
        assert claim_process(None) is None
    assert opened_pipes() <= before  # what earlier tests left may be closed meanwhile
    assert launch._launch_lock.acquire(blocking=False)
    launch._launch_lock.release()


def test_vllm_prestart_there_is_none_while_another_engine_starts_whose_environment_this_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "is_cpu_build", lambda: True)
    with launch._launch_lock, launch.prestart_engine(None):
        assert module._unclaimed_processes == []


def spec(log: Path) -> EngineSpec:
    return EngineSpec(engine_id="e", kind="vllm", model_path="none", max_context=8, log_path=log)


def test_vllm_prestart_a_start_that_fails_before_vllm_is_asked_ends_it(
    tmp_path: Path, waiting: PreforkedProcess
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        launch.launch(spec(tmp_path / "file" / "log"), waiting.name, waiting)
    assert waiting.process.returncode == -signal.SIGKILL


def test_vllm_prestart_a_start_that_is_cancelled_before_its_turn_starts_nothing(
    tmp_path: Path, waiting: PreforkedProcess
) -> None:
    launch.cancel_launch(waiting.name)
    with pytest.raises(EngineDiedError, match="canceled"):
        launch.launch(spec(tmp_path / "log"), waiting.name, waiting)
    assert waiting.process.returncode == -signal.SIGKILL
    assert not (tmp_path / "log").exists()


def test_vllm_prestart_a_start_that_is_cancelled_before_it_has_a_process_has_none(tmp_path: Path) -> None:
    process = get_context("spawn").Process(target=os.getpid)
    with launch._patch_multiprocessing(spec(tmp_path / "log"), "its name"):
        launch.cancel_launch("another name")
        spawn.get_preparation_data("any")
        launch.cancel_launch("its name")
        with pytest.raises(EngineDiedError, match="canceled"):
            process.start()
    assert process.pid is None
