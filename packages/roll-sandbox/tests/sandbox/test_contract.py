"""What every runtime does alike."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import replace
from typing import Any

import pytest
from sandbox.conftest import LIMITS

from roll_sandbox import (
    Command,
    Limit,
    Outcome,
    OversizedUploadError,
    PythonCode,
    SandboxError,
    SandboxManager,
    SandboxPathError,
    SandboxSessionError,
    SandboxSpec,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_sandbox_a_program_gets_its_input_and_its_output_comes_back(sandboxes: SandboxManager) -> None:
    result = await sandboxes.execute(
        PythonCode(
            source="import sys, os\nprint(input() * 2, sys.argv[1:])\nprint('oh', file=sys.stderr)\nos.write(3, b'42')",
            argv=("a", "b c"),
            stdin=b"ab\n",
            result=True,
        )
    )
    assert (result.outcome, result.exit_code) == (Outcome.EXITED, 0)
    assert (result.stdout, result.stderr, result.result) == (b"abab ['a', 'b c']\n", b"oh\n", b"42")
    assert result.ok and not result.limits_hit
    assert 0 < result.cpu_s < 5 and result.peak_memory_bytes > 2**20


async def test_sandbox_commands_run_with_files_variables_and_directory(sandboxes: SandboxManager) -> None:
    result = await sandboxes.execute(
        Command(
            argv=("bash", "-c", "cat name; echo $X; pwd | sed 's:.*/::'"),
            files={"sub/name": b"content\n"},
            env={"X": "value"},
            cwd="sub",
        )
    )
    assert result.stdout == b"content\nvalue\nsub\n"


@pytest.mark.parametrize(
    ("source", "code", "outcome"),
    [
        ("pass", 0, Outcome.EXITED),
        ("import sys; sys.exit(7)", 7, Outcome.EXITED),
        ("exit(3)", 3, Outcome.EXITED),
        ("raise SystemExit('text')", 1, Outcome.EXITED),
        ("1 / 0", 1, Outcome.EXITED),
        ("def", 1, Outcome.EXITED),
        ("import os; os._exit(255)", 255, Outcome.EXITED),
        ("import os; os.kill(os.getpid(), 15)", 143, Outcome.SIGNALLED),
        ("import os; os.abort()", 134, Outcome.SIGNALLED),
    ],
)
async def test_sandbox_exit_codes_are_real(sandboxes: SandboxManager, source: str, code: int, outcome: Outcome) -> None:
    result = await sandboxes.execute(PythonCode(source=source))
    assert (result.exit_code, result.outcome) == (code, outcome)


async def test_sandbox_a_missing_command_is_127_as_in_a_shell(sandboxes: SandboxManager) -> None:
    result = await sandboxes.execute(Command(argv=("no-such-command",)))
    assert result.exit_code == 127
    assert b"no-such-command" in result.stderr


async def test_sandbox_python_programs_end_as_under_python(sandboxes: SandboxManager) -> None:
    source = """
import atexit, threading
class Noisy:
    def __del__(self): print("deleted")
noisy = Noisy()
atexit.register(print, "at exit")
file = open("out", "w"); file.write("flushed")
threading.Thread(target=lambda: print("thread")).start()
"""
    result = await sandboxes.execute(PythonCode(source=source))
    assert sorted(result.stdout.split(b"\n")) == [b"", b"at exit", b"deleted", b"thread"]
    trace = await sandboxes.execute(PythonCode(source="def f():\n    return [][1]\nf()"))
    assert trace.stderr.decode().splitlines() == [
        "Traceback (most recent call last):",
        '  File "program.py", line 3, in <module>',
        '  File "program.py", line 2, in f',
        "IndexError: list index out of range",
    ]


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        (PythonCode(source="import time; time.sleep(100)", wall_s=0.3), Outcome.WALL_TIME),
        (PythonCode(source="while True: pass", cpu_s=0.3), Outcome.CPU_TIME),
        (PythonCode(source="x = bytearray(2**30)"), Outcome.MEMORY),
        (PythonCode(source="while True: print('x' * 1000)", output_bytes=5000), Outcome.OUTPUT),
        (PythonCode(source="open('f', 'wb').truncate(2**31)"), Outcome.FILE_SIZE),
    ],
)
async def test_sandbox_every_limit_is_an_outcome(
    sandboxes: SandboxManager, program: PythonCode, outcome: Outcome
) -> None:
    result = await sandboxes.execute(program)
    assert result.outcome is outcome, result
    assert result.exit_code is None
    assert Limit(outcome.value) in result.limits_hit
    assert len(result.stdout) <= 5000


@pytest.mark.parametrize("ignores", ["", "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "])
async def test_sandbox_no_program_can_hide_that_it_hit_the_limit_on_files(
    sandboxes: SandboxManager, ignores: str
) -> None:
    """Python ignores the signal, and would go on with an OSError."""
    if sandboxes.runtime.name == "subprocess":
        pytest.skip("without a filter, programs may ignore the signal")
    for size in ("truncate(2**31)", "write(bytes(2**24))"):
        source = f"{ignores}open('f', 'wb').{size}; print('on')"
        for program in (PythonCode(source=source), Command(argv=("python3", "-c", source))):
            result = await sandboxes.execute(program)
            assert (result.outcome, result.stdout) == (Outcome.FILE_SIZE, b""), result


async def test_sandbox_one_program_finds_nothing_of_another(sandboxes: SandboxManager) -> None:
    await sandboxes.execute(PythonCode(source="open('left', 'w').write('x')"))
    result = await sandboxes.execute(PythonCode(source="import os; print(os.listdir('.'))"))
    assert result.stdout == b"[]\n"


async def test_sandbox_programs_find_no_module_of_the_agent_imported(sandboxes: SandboxManager) -> None:
    """They may import a `roll_sandbox` that a mount brings, and would meet the agent's parts instead."""
    source = "import sys; print([name for name in sys.modules if name.startswith('roll')])"
    assert (await sandboxes.execute(PythonCode(source=source))).stdout == b"[]\n"


async def test_sandbox_programs_run_at_the_same_time(sandboxes: SandboxManager) -> None:
    programs = [PythonCode(source=f"import time; time.sleep(0.2); print({index})") for index in range(6)]
    results = await asyncio.gather(*map(sandboxes.execute, programs))
    assert [result.stdout for result in results] == [f"{index}\n".encode() for index in range(6)]


async def test_sandbox_files_are_written_and_read(sandboxes: SandboxManager) -> None:
    data = bytes(range(256)) * 5000
    async with await sandboxes.create() as sandbox:
        await sandbox.write_file("a/b/data", data, mode=0o755)
        assert await sandbox.read_file("a/b/data") == data
        await sandbox.write_file("a/b/data", b"shorter")
        assert await sandbox.read_file("a/b/data") == b"shorter"
        listing = await sandbox.execute(Command(argv=("ls", "-l", "a/b")))
        assert b"-rw-r--r--" in listing.stdout


async def test_sandbox_files_that_cannot_be_read_say_why(sandboxes: SandboxManager) -> None:
    async with await sandboxes.create() as sandbox:
        await sandbox.write_file("large", bytes(1000))
        await sandbox.execute(
            Command(argv=("bash", "-c", "mkdir directory; mkfifo fifo || python3 -c 'import os; os.mkfifo(\"fifo\")'"))
        )
        for path, word in (
            ("none", "No such file"),
            ("directory", "directory"),
            ("fifo", "Invalid"),
            ("large", "large"),
        ):
            with pytest.raises(SandboxPathError, match=word):
                await sandbox.read_file(path, max_bytes=100)


async def test_sandbox_a_snapshot_brings_files_back_also_elsewhere(sandboxes: SandboxManager) -> None:
    async with await sandboxes.create() as sandbox:
        await sandbox.write_file("kept", b"1", mode=0o750)
        await sandbox.execute(
            Command(argv=("bash", "-c", "mkdir -p d/e; ln -s ../kept d/link; ln kept d/hard; cd d/e; echo 2 > f"))
        )
        snapshot = await sandbox.snapshot()
        await sandbox.execute(Command(argv=("bash", "-c", "rm -r d kept; mkdir new; echo x > new/y")))
        await sandbox.restore(snapshot)
        look = Command(argv=("bash", "-c", "find . -printf '%y %m %n %p %l\\n' | sort; cat d/e/f d/link"))
        first = (await sandbox.execute(look)).stdout
    async with await sandboxes.create(snapshot=snapshot) as other:
        second = (await other.execute(look)).stdout
    assert first == second
    assert b"f 750 2 ./d/hard" in first and b"l 777 1 ./d/link ../kept" in first and b"new" not in first


async def test_sandbox_a_session_keeps_its_state(sandboxes: SandboxManager) -> None:
    async with await sandboxes.create() as sandbox:
        shell = await sandbox.session()
        await shell.run("mkdir -p deep; cd deep; export NAME=value; local_one=2; greet() { echo hello $1; }")
        result = await shell.run("greet you; echo $NAME $local_one; pwd | sed 's:.*/::'; echo oops >&2")
        assert result.stdout == b"hello you\nvalue 2\ndeep\n"
        assert result.stderr == b"oops\n"
        other = await sandbox.session()
        assert (await other.run("echo [$NAME]; ls")).stdout == b"[]\ndeep\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("true", 0),
        ("false", 1),
        ("(exit 42)", 42),
        ("no-such-thing", 127),
        ("if", 2),
        ("echo 'unclosed", 2),
        ("cat", 0),
    ],
)
async def test_sandbox_session_exit_codes_are_real(sandboxes: SandboxManager, command: str, code: int) -> None:
    async with await sandboxes.create() as sandbox:
        shell = await sandbox.session()
        result = await shell.run(command)
        assert (result.outcome, result.exit_code) == (Outcome.EXITED, code)
        assert (await shell.run("echo $?")).stdout == f"{code}\n".encode()


@pytest.mark.parametrize("command", ["sleep 50; echo not reached", "while :; do :; done", "cat <(sleep 50)"])
async def test_sandbox_a_command_over_its_time_is_interrupted_and_the_session_goes_on(
    sandboxes: SandboxManager, command: str
) -> None:
    async with await sandboxes.create() as sandbox:
        shell = await sandbox.session()
        await shell.run("cd /tmp; variable=1")
        late = await shell.run(command, wall_s=0.3)
        assert (late.outcome, late.exit_code) == (Outcome.WALL_TIME, None)
        assert b"not reached" not in late.stdout
        assert (await shell.run("echo $variable; pwd")).stdout == b"1\n/tmp\n"


async def test_sandbox_a_session_that_cannot_be_interrupted_ends(sandboxes: SandboxManager) -> None:
    async with await sandboxes.create() as sandbox:
        shell = await sandbox.session()
        await shell.run("trap '' INT")
        late = await shell.run("while :; do :; done", wall_s=0.2)
        assert late.outcome is Outcome.WALL_TIME
        assert shell.closed
        with pytest.raises(SandboxError, match="ended"):
            await shell.run("true")
        assert (await (await sandbox.session()).run("echo new")).stdout == b"new\n"


async def test_sandbox_leaving_a_session_closes_it(sandboxes: SandboxManager) -> None:
    async with await sandboxes.create() as sandbox:
        shell = await sandbox.session()
        assert (await shell.run("exit 5")).exit_code == 5
        assert shell.closed


async def test_sandbox_a_session_that_does_not_open_says_why_and_the_sandbox_goes_on(
    sandboxes: SandboxManager, request: pytest.FixtureRequest
) -> None:
    spec = SandboxSpec(limits=replace(LIMITS, max_processes=6), trust="trusted")
    async with await sandboxes.create(spec) as sandbox:
        with pytest.raises(SandboxSessionError, match="'/no/such'"):
            await sandbox.session(cwd="/no/such")
        shells = [await sandbox.session()]
        if "subprocess" not in request.node.name:  # which counts processes while a program runs
            with pytest.raises(SandboxSessionError, match="close a session or stop a program"):
                shells += [await sandbox.session() for _ in range(12)]
        await shells[0].run("exit")
        assert (await (await sandbox.session()).run("echo new")).stdout == b"new\n"


async def test_sandbox_output_streams_while_a_command_runs(sandboxes: SandboxManager) -> None:
    async with await sandboxes.create() as sandbox:
        shell = await sandbox.session()
        await shell.run("mkfifo fifo")
        job = await shell.start("echo first; read line < fifo; echo $line", wall_s=30)
        seen = []
        async for chunk in job.stream():
            seen.append(chunk.data)
            if len(seen) == 1:  # the command goes on only after this
                await sandbox.execute(Command(argv=("bash", "-c", "echo second > fifo")))
        assert seen == [b"first\n", b"second\n"]
        assert (await job.wait()).ok


async def test_sandbox_background_jobs_report_their_own_exit_code(sandboxes: SandboxManager) -> None:
    async with await sandboxes.create() as sandbox:
        shell = await sandbox.session()
        await shell.run("export WORD=there; cd /tmp")
        job = await shell.background("echo $WORD; pwd; exit 9")
        long = await shell.background("sleep 100")
        result = await job.wait()
        assert (result.exit_code, result.stdout) == (9, b"there\n/tmp\n")
        assert not long.done()
        long.kill()
        ended = await long.wait()
        assert ended.outcome is Outcome.SIGNALLED
        started = await shell.run("sleep 100 & jobs -r | wc -l")
        assert started.stdout.strip() == b"1"


async def test_sandbox_sessions_end_what_they_left_in_the_background(sandboxes: SandboxManager) -> None:
    """A job outlives its command, and not its session; files and the network of the sandbox are shared all the time."""
    serve = """
import os, socket
server = socket.create_server(("127.0.0.1", 0))
open(".port", "w").write(str(server.getsockname()[1]))
os.rename(".port", "port")
while True: server.accept()[0].send(b"here")
"""
    ask = """
import socket
try: print(socket.create_connection(("127.0.0.1", int(open("port").read()))).recv(4).decode())
except ConnectionRefusedError: print("gone")
"""
    async with await sandboxes.create() as sandbox:
        await sandbox.write_file("serve.py", serve.encode())
        for end in ("close", "exit"):
            shell = await sandbox.session()
            await shell.run("rm -f port; python3 serve.py >log 2>&1 & while ! [ -e port ]; do sleep 0.01; done")
            assert (await shell.run("jobs -r | wc -l")).stdout.strip() == b"1"
            job = await shell.background("sleep 1000")
            assert (await sandbox.execute(PythonCode(source=ask))).stdout == b"here\n"
            if end == "close":
                await shell.close()
            else:
                await shell.run("exit")
            assert (await job.wait()).outcome is Outcome.SIGNALLED
            assert (await sandbox.execute(PythonCode(source=ask))).stdout == b"gone\n"


async def test_sandbox_sessions_that_end_while_a_background_job_is_begun_begin_none(sandboxes: SandboxManager) -> None:
    async with await sandboxes.create() as sandbox:
        shell = await sandbox.session()
        begins = asyncio.create_task(shell.background("sleep 1000"))
        await asyncio.sleep(0)  # it asks for the session's variables
        shell.end()
        with pytest.raises(SandboxSessionError, match="open another session"):
            await begins


async def test_sandbox_programs_that_are_kept_end_what_they_started(sandboxes: SandboxManager) -> None:
    loop = "(while :; do echo x >> {0}; sleep 0.01; done) </dev/null >/dev/null 2>&1 & while ! [ -s {0} ]; do :; done"
    async with await sandboxes.create() as sandbox:
        for name, argv in (("a", ("bash", "-c")), ("b", ("setsid", "-w", "bash", "-c"))):
            assert (await sandbox.execute(Command(argv=(*argv, loop.format(name))))).ok
            sizes = [len(await sandbox.read_file(name)) for _ in range(8)]
            assert len(set(sizes)) == 1, (name, sizes)


async def test_sandbox_what_cannot_be_passed_on_is_refused_by_name(sandboxes: SandboxManager) -> None:
    with pytest.raises(ValueError, match="null byte"):
        await sandboxes.execute(Command(argv=("echo", "a\0b")))


async def test_sandbox_a_cancelled_execution_ends_its_program(sandboxes: SandboxManager) -> None:
    task = asyncio.create_task(sandboxes.execute(PythonCode(source="import time; time.sleep(100)")))
    for _ in range(1000):
        await asyncio.sleep(0)
        if not sandboxes.health()["idle"]:  # it has one; another may take its place at once
            break
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await sandboxes.execute(PythonCode(source="print(1)"))).stdout == b"1\n"


async def test_sandbox_an_interactive_program_is_answered(sandboxes: SandboxManager) -> None:
    source = "import sys\nfor line in sys.stdin: print(line.strip().upper(), flush=True)\nprint('over')"
    async with sandboxes.run_interactive(PythonCode(source=source, stdin=b"one\n", interactive=True)) as job:
        heard = b""
        async for chunk in job.stream():
            heard += chunk.data
            if heard == b"ONE\n":
                job.write(b"two\n")
            elif heard == b"ONE\nTWO\n":
                job.end_input()
        assert heard == b"ONE\nTWO\nover\n"
        assert (await job.wait()).ok


async def test_sandbox_input_larger_than_a_pipe_arrives_whole(sandboxes: SandboxManager) -> None:
    source = "import sys, zlib\ndata = sys.stdin.buffer.read()\nprint(len(data), zlib.crc32(data))"
    data = bytes(range(256)) * 10_000
    async with sandboxes.run_interactive(PythonCode(source=source, stdin=data, interactive=True)) as job:
        job.end_input()
        assert (await job.wait()).stdout == f"{len(data)} {zlib.crc32(data)}\n".encode()


async def test_sandbox_input_that_nobody_reads_holds_nothing_up(sandboxes: SandboxManager) -> None:
    program = PythonCode(source="import os\nos.close(0)\nprint('x')", stdin=bytes(2**21), interactive=True)
    async with sandboxes.run_interactive(program) as job:
        assert (await job.wait()).stdout == b"x\n"
        job.write(b"late")
    deaf = PythonCode(source="import time\ntime.sleep(1000)", stdin=bytes(2**21), interactive=True)
    async with sandboxes.run_interactive(deaf) as job:
        job.write(bytes(2**20))
        job.kill()
        assert (await job.wait()).exit_code == 137


async def test_sandbox_a_program_that_is_talked_to_ends_with_its_block(sandboxes: SandboxManager) -> None:
    async with sandboxes.run_interactive(PythonCode(source="input()", interactive=True)) as job:
        assert not job.done()
    assert job.done() and (await job.wait()).exit_code == 137


async def test_sandbox_an_oversized_upload_is_refused_and_says_which_limit(sandboxes: SandboxManager) -> None:
    size = LIMITS.disk_bytes + 1
    with pytest.raises(
        OversizedUploadError, match=f"the size of a program's files must not exceed .* got {size:,}: .*disk_bytes"
    ):
        await sandboxes.execute(PythonCode(source="", files={"x": bytes(size)}))
    with pytest.raises(
        OversizedUploadError, match=r"standard input and source must not exceed 33,554,432 bytes, .*memory_bytes"
    ):
        await sandboxes.execute(PythonCode(source="", stdin=bytes(2**25 + 1)))
    assert (await sandboxes.execute(PythonCode(source="print(1)"))).ok


STEPS = """
import sys, time
for line in sys.stdin:
    end = time.process_time() + float(line)
    while time.process_time() < end: pass
    print("done", flush=True)
"""


async def test_sandbox_new_limits_count_from_then_on_and_say_what_was_used(sandboxes: SandboxManager) -> None:
    """So a host can bound the parts of a dialogue, and know what each has cost, without asking the program."""
    program = PythonCode(source=STEPS, interactive=True, wall_s=30.0, cpu_s=30.0)
    async with sandboxes.run_interactive(program) as job:
        before = await job.set_limits(wall_s=20.0, cpu_s=5.0)
        used = []
        for _ in range(2):
            seen = sum(chunk.data.count(b"done") for chunk in await _so_far(job))
            job.write(b"0.2\n")
            while sum(chunk.data.count(b"done") for chunk in await _so_far(job)) == seen:
                await asyncio.sleep(0.005)
            used.append(await job.set_limits(wall_s=20.0, cpu_s=0.3) - before)
            before += used[-1]
        assert all(0.19 <= each < 1.5 for each in used), used
        job.write(b"100\n")
        result = await job.wait()
        assert result.outcome is Outcome.CPU_TIME
        assert 0.65 <= result.cpu_s < 3.0
        assert await job.set_limits(wall_s=1.0, cpu_s=1.0) == result.cpu_s


async def _so_far(job: Any) -> list[Any]:
    """Output up to now."""
    await asyncio.sleep(0)
    return list(job._job.chunks)
