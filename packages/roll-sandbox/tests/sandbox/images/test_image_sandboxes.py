"""Sandboxes whose files and programs are an image's, here and through a service."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sandbox.conftest import LIMITS, missing, served
from sandbox.images.oci import Entry, build, entry, file, programs, symlink, write_layout

from roll_sandbox import (
    Command,
    ExecutionResult,
    Mount,
    Outcome,
    PythonCode,
    SandboxManager,
    SandboxSpec,
    SandboxUnavailableError,
    UnknownImageError,
    connect,
)
from roll_sandbox.bubblewrap import BubblewrapRuntime
from roll_sandbox.images import Image, ImageCache
from roll_sandbox.images.sources import open_source

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORLD = "world:1"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of this module: `$ROLL_CACHE`, which services that tests start have, too."""
    if reason := missing("bubblewrap"):
        pytest.skip(reason)
    before = os.environ.get("ROLL_CACHE")
    os.environ["ROLL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    found = ImageCache()
    upper = [file("app/.wh.gone"), file("etc/.wh..wh..opq"), file("etc/new", b"new\n"), file("app/data", b"upper\n")]
    lower = [
        file("app/data", b"lower\n"),
        file("app/gone", b""),
        file("etc/old", b"old\n"),
        entry("opt/box", mode=0o555),
    ]
    tools = [*programs(), file("opt/bin/hello", b"#!/bin/sh\necho hello $1 $WORLD\n", 0o755)]
    settings = {"Env": ["PATH=/opt/bin:/bin", "WORLD=flat"], "WorkingDir": "/app"}
    put(found, WORLD, [*tools, *lower], upper, **settings)
    yield found
    os.environ.pop("ROLL_CACHE") if before is None else os.environ.update(ROLL_CACHE=before)


def put(cache: ImageCache, name: str, *layers: Iterable[Entry], **config: Any) -> Image:
    path = cache.root / "sources" / name.replace(":", "-")
    shutil.rmtree(path, ignore_errors=True)
    with open_source(write_layout(path, build(layers, packed=False, **config))) as source:
        return cache.add(name, source)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["bubblewrap", "service"])
async def sandboxes(
    request: pytest.FixtureRequest, cache: ImageCache, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SandboxManager]:
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "service":
            url, token = stack.enter_context(served(tmp_path_factory.mktemp("service"), "--warm", "1"))
            yield await stack.enter_async_context(connect(url, token, spec=spec(WORLD)))
        else:
            manager = SandboxManager(warm=1, spec=spec(WORLD))
            try:
                yield await stack.enter_async_context(manager)
            except SandboxUnavailableError as error:
                pytest.skip(str(error))


def spec(image: str, **settings: Any) -> SandboxSpec:
    return SandboxSpec(image=image, limits=LIMITS, **settings)


async def sh(sandboxes: SandboxManager, command: str, **settings: Any) -> ExecutionResult:
    return await sandboxes.execute(Command(argv=("sh", "-c", command)), **settings)


async def test_sandbox_image_programs_see_the_image_its_variables_and_directory(sandboxes: SandboxManager) -> None:
    result = await sandboxes.execute(Command(argv=("hello", "world")))
    assert (result.stdout, result.stderr) == (b"hello world flat\n", b"")
    result = await sh(
        sandboxes, "echo $PWD $HOME $PATH; id -u; id -g; cat data /etc/new; ls -A / /app; ls /etc/old gone"
    )
    assert result.stdout.decode().split() == [
        *(
            "/app",
            "/home/user",
            "/opt/bin:/bin",
            "1000",
            "1000",
            "upper",
            "new",
            "/:",
            ".roll",
            "app",
            "bin",
            "dev",
            "etc",
        ),
        *("home", "lib", "lib64", "opt", "proc", "tmp", "/app:", "data"),
    ]
    assert result.stderr.count(b"No such file") == 2


async def test_sandbox_image_each_program_changes_an_image_of_its_own(sandboxes: SandboxManager) -> None:
    change = "echo mine >> data; rm /etc/new; mkdir /new /opt/box/in; echo x > /bin/tool; cat data; ls /etc/new"
    look = "cat data /etc/new; ls /new /bin/tool /opt/box/in"
    changed, after = await sh(sandboxes, change), await sh(sandboxes, look)
    assert changed.stdout == b"upper\nmine\n"
    assert changed.stderr.count(b"\n") == 1
    assert (after.stdout, after.stderr.count(b"No such file")) == (b"upper\nnew\n", 3)


async def test_sandbox_image_a_sandbox_to_keep_keeps_what_was_changed(sandboxes: SandboxManager) -> None:
    async with await sandboxes.create() as one, await sandboxes.create() as other:
        await one.execute(Command(argv=("sh", "-c", "echo mine > data; rm -r /opt/bin")))
        assert (await one.execute(Command(argv=("cat", "data")))).stdout == b"mine\n"
        assert await one.read_file("/app/data") == b"mine\n"
        await one.write_file("/app/further", b"written")
        assert (await one.execute(Command(argv=("cat", "/app/further")))).stdout == b"written"
        assert (await other.execute(Command(argv=("cat", "data")))).stdout == b"upper\n"


async def test_sandbox_image_sessions_begin_in_the_image_and_need_no_bash_in_it(sandboxes: SandboxManager) -> None:
    async with await sandboxes.create() as sandbox:
        session = await sandbox.session()
        assert (await session.run("pwd; x=5; cd /etc")).stdout == b"/app\n"
        assert (await session.run("echo $x *; command -v bash")).stdout == b"5 group hosts new passwd\n"


async def test_sandbox_image_python_needs_none_in_the_image(sandboxes: SandboxManager) -> None:
    source = "import os, sqlite3, ssl, sys; print([os.getcwd(), open('/app/data').read()], sys.prefix)"
    result = await sandboxes.execute(PythonCode(source=source))
    assert result.stderr == b""
    assert result.stdout.decode().startswith("['/home/user', 'upper\\n'] /.roll/")


async def test_sandbox_image_home_is_the_same_as_without_an_image(sandboxes: SandboxManager) -> None:
    files = {"given": b"1", "/tmp/too": b"2"}
    program = Command(argv=("sh", "-c", "cat ~/given /tmp/too; echo 3 > /dev/shm/x; cat /dev/shm/x"), files=files)
    assert (await sandboxes.execute(program)).stdout == b"123\n"
    async with await sandboxes.create() as sandbox:
        await sandbox.write_file("kept", b"kept")
        taken = await sandbox.snapshot()
        async with await sandboxes.create(sandbox.spec, snapshot=taken) as copy:
            assert await copy.read_file("kept") == b"kept"


@pytest.mark.parametrize("place", ["/app", "/", "/home/user", "/tmp"])
async def test_sandbox_image_what_is_written_anywhere_counts(sandboxes: SandboxManager, place: str) -> None:
    command = f"for i in 1 2 3; do dd if=/dev/zero of={place}/big$i bs=1M count=7; done 2>&1"
    result = await sh(sandboxes, command)
    assert result.outcome is Outcome.DISK
    assert b"No space left" in result.stdout
    result = await sh(sandboxes, f"i=0; while [ $i -lt 600 ]; do echo > {place}/f$i || exit 3; i=$((i+1)); done")
    assert result.outcome is Outcome.DISK


async def test_sandbox_image_our_own_places_cannot_be_changed(sandboxes: SandboxManager) -> None:
    result = await sh(
        sandboxes, "rm -r /.roll/usr/bin; echo x > /.roll/x; mkdir /dev/x; echo x > /proc/x; ls / ; ls /.roll"
    )
    assert b".roll" not in result.stdout
    assert b"usr" in result.stdout
    assert result.stderr.count(b"Read-only file system") >= 3


async def test_sandbox_image_nothing_tells_where_the_image_lies(sandboxes: SandboxManager, cache: ImageCache) -> None:
    look = Command(argv=("cat", "/proc/self/mountinfo", "/proc/self/mounts", "/proc/1/mountinfo"))
    fresh = await sandboxes.execute(look)
    async with await sandboxes.create() as sandbox:
        kept = await sandbox.execute(look)
    for result in (fresh, kept):
        assert b"overlay" in result.stdout
        assert str(cache.root.parent).encode() not in result.stdout


async def test_sandbox_image_an_unknown_image_is_told_alike_everywhere(sandboxes: SandboxManager) -> None:
    with pytest.raises(UnknownImageError, match=r"'nowhere:7'.*roll-sandbox image pull"):
        await sh(sandboxes, "true", spec=spec("nowhere:7"))
    with pytest.raises(UnknownImageError):
        await sandboxes.create(spec("sha256:" + "0" * 64))


async def test_sandbox_image_a_name_means_what_it_means_when_a_sandbox_is_asked_for(
    sandboxes: SandboxManager, cache: ImageCache
) -> None:
    tools = programs()
    old = put(cache, "moving", [*tools, file("which", b"old")])
    async with await sandboxes.create(spec("moving")) as before:
        new = put(cache, "moving", [*tools, file("which", b"new")])
        assert (await sh(sandboxes, "cat /which", spec=spec("moving"))).stdout == b"new", "no warm one of the old"
        assert (await before.execute(Command(argv=("cat", "/which")))).stdout == b"old"
        assert before.spec.image == old.digest != new.digest
        async with await sandboxes.create(before.spec, snapshot=await before.snapshot()) as copy:
            assert (await copy.execute(Command(argv=("cat", "/which")))).stdout == b"old"


async def test_sandbox_image_an_image_in_use_is_not_removed(sandboxes: SandboxManager, cache: ImageCache) -> None:
    put(cache, "used", programs())
    async with await sandboxes.create(spec("used")):
        with pytest.raises(SandboxUnavailableError, match="stop them"):
            cache.remove("used")


async def test_sandbox_image_the_user_of_the_image_is_that_of_programs(
    sandboxes: SandboxManager, cache: ImageCache
) -> None:
    users = file("etc/passwd", b"root:x:0:0::/:/bin/sh\nann:x:1234:55::/:/bin/sh")
    put(cache, "user", [*programs(), users, file("mine", b"x", 0o600)], User="ann")
    result = await sh(sandboxes, "id; echo y >> /mine && cat /mine; stat -c %u /mine", spec=spec("user"))
    assert result.stdout == b"uid=1234(ann) gid=55(user) groups=55(user)\nxy\n1234\n"
    put(cache, "number", programs(), User="77")
    assert (await sh(sandboxes, "id -un", spec=spec("number"))).stdout == b"user\n"


async def test_sandbox_image_an_image_cannot_put_itself_in_our_places(
    sandboxes: SandboxManager, cache: ImageCache
) -> None:
    hostile = [
        *(symlink(name, "/app") for name in (".roll", "tmp", "home", "proc", "dev", ".image", ".space", ".layers")),
        *(entry("app"), symlink("etc/hosts", "/app/x"), symlink("etc/resolv.conf", "../run/resolv.conf")),
    ]
    put(cache, "hostile", [*programs(), *hostile], [file(".roll.txt"), file("etc/.wh.group")])
    script = "cat /etc/hosts; echo x > /tmp/x; cd ~; echo y > y; ls /app /tmp /dev/null /proc/self/comm; ls /etc"
    result = await sh(sandboxes, script, spec=spec("hostile"))
    assert result.stdout.decode().split() == [
        *("127.0.0.1", "localhost", "sandbox", "::1", "localhost", "/dev/null", "/proc/self/comm", "/app:", "/tmp:"),
        *("x", "group", "hosts", "passwd", "resolv.conf"),
    ]
    code = await sandboxes.execute(PythonCode(source="import json; print(1)"), spec=spec("hostile"))
    assert code.stdout == b"1\n"


@pytest.mark.parametrize("bin", [symlink("bin", "bin"), file("bin", b"not a directory"), entry("empty")])
async def test_sandbox_image_an_image_without_programs_has_none(
    sandboxes: SandboxManager, cache: ImageCache, bin: Entry
) -> None:
    put(cache, "empty", [bin], Env=["PATH=/bin"])
    result = await sh(sandboxes, "true", spec=spec("empty"))
    assert (result.outcome, result.exit_code) in ((Outcome.EXITED, 126), (Outcome.EXITED, 127))
    assert result.stderr.startswith(b"sandbox: sh:")
    code = await sandboxes.execute(PythonCode(source="print(open('/etc/hosts').read())"), spec=spec("empty"))
    assert code.ok, "our own code needs nothing of it"


async def test_sandbox_image_a_directory_to_start_in_that_is_not_there_is_home(
    sandboxes: SandboxManager, cache: ImageCache
) -> None:
    put(cache, "nowhere", programs(), WorkingDir="/missing")
    assert (await sh(sandboxes, "echo $PWD", spec=spec("nowhere"))).stdout == b"/home/user\n"


async def test_sandbox_image_programs_have_no_privileges(sandboxes: SandboxManager) -> None:
    result = await sh(sandboxes, "while read line; do echo $line; done < /proc/self/status")
    found = dict(line.split(": ", 1) for line in result.stdout.decode().splitlines() if ": " in line)
    assert {found[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    result = await sh(sandboxes, "ls /proc/1/fd; echo 1000 > /proc/1/oom_score_adj")
    if os.geteuid() == 0:  # elsewhere, too, but in a container whose user is this machine's root
        assert result.stderr.count(b"ermission denied") == 2, "the first process is out of reach"


async def test_sandbox_image_many_layers_are_one_image(sandboxes: SandboxManager, cache: ImageCache) -> None:
    layers = [[file("last", str(number).encode()), file(f"f{number}")] for number in range(126)]
    put(cache, "deep", programs(), *layers)
    assert (await sh(sandboxes, "cat /last /f0 /f99", spec=spec("deep"))).stdout == b"125"


async def test_sandbox_image_mounts_are_in_an_image_too(cache: ImageCache, tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir(mode=0o755)
    (tmp_path / "packages" / "given.py").write_text("value = 7")
    os.chmod(tmp_path, 0o755)
    mounts = (Mount(source=str(tmp_path / "packages"), target="/opt/bin/packages"),)
    settings = spec(WORLD, mounts=mounts, python_path=("/opt/bin/packages",), preload=("given",))
    async with SandboxManager(warm=0) as sandboxes:
        result = await sandboxes.execute(PythonCode(source="import given; print(given.value)"), spec=settings)
        assert (result.stdout, result.stderr) == (b"7\n", b"")
        for target in ("/.roll/x", "/.layers/0", "relative", "/a/../../b", "/"):
            with pytest.raises(SandboxUnavailableError):
                await sh(sandboxes, "", spec=spec(WORLD, mounts=(Mount(source=str(tmp_path), target=target),)))


async def test_sandbox_image_without_overlays_an_image_is_read_only(cache: ImageCache) -> None:
    runtime = BubblewrapRuntime()
    runtime._supports_overlays = False
    async with SandboxManager(runtime, warm=0) as sandboxes:
        result = await sh(
            sandboxes, "hello; cat data; ls; echo x > data; echo y > /tmp/y; cat /tmp/y", spec=spec(WORLD)
        )
    assert result.stdout == b"hello flat\nupper\ndata\ny\n"
    assert b"Read-only file system" in result.stderr


async def test_sandbox_image_what_many_images_leave_behind_is_bounded(
    cache: ImageCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll_sandbox.roots.MAX_UNUSED_ROOTS", 1)
    images = [put(cache, f"one{number}", programs(), [file("n", str(number).encode())]) for number in range(4)]
    async with SandboxManager(warm=0) as sandboxes:
        for number in (0, 1, 2, 3, 0):
            assert (await sh(sandboxes, "cat /n", spec=spec(f"one{number}"))).stdout == str(number).encode()
        held = [entry.image for entry in cache.list() if entry.in_use]
        assert [image for image in images if image in held] == [images[0]]
        assert (await sandboxes.execute(PythonCode(source="print(1)"))).stdout == b"1\n"
    assert not any(entry.in_use for entry in cache.list() if entry.image in images)
