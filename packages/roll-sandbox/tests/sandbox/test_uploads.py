"""Directories of a client in sandboxes of a service: uploaded once, by the digest of their content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sandbox.conftest import missing, served

from roll_sandbox import (
    Command,
    Mount,
    OversizedUploadError,
    PythonCode,
    SandboxError,
    SandboxManager,
    SandboxQuotaError,
    SandboxRequestError,
    SandboxSpec,
    connect,
)
from roll_sandbox.remote import RemoteRuntime
from roll_sandbox.uploads import (
    MAX_BYTES,
    UploadDirectories,
    UploadStore,
    compute_digest,
    format_upload_source,
    read_directory,
)
from roll_sandbox.wire import decode, encode, spec_from_json, spec_to_json, validate_client_message
from roll_sandbox.worker import Worker

HELPERS = {"helper.py": b"def answer():\n    return 42\n", "data/words.txt": b"one two"}


def written(directory: Path, files: dict[str, bytes] = HELPERS) -> Path:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def spec_with(directory: Path) -> SandboxSpec:
    return SandboxSpec(
        mounts=(Mount(source=str(directory), target="/opt/helpers", upload=True),), python_path=("/opt/helpers",)
    )


def test_sandbox_upload_hold_files_without_links_and_compiled_python(tmp_path: Path) -> None:
    directory = written(tmp_path / "helpers", {**HELPERS, "__pycache__/helper.pyc": b"x"})
    (directory / "link").symlink_to("/etc/passwd")
    assert read_directory(directory) == HELPERS
    assert compute_digest(HELPERS) == compute_digest(dict(reversed(HELPERS.items())))
    assert compute_digest({"ab": b"c"}) != compute_digest({"a": b"bc"}) != compute_digest({"a": b"b", "c": b""})
    (directory / "large").write_bytes(b"0" * MAX_BYTES)
    with pytest.raises(OversizedUploadError, match="exceeds the upload limits"):
        read_directory(directory)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../up", "a/../../b", "a//b", "a/./b", "", "a\0b", "a/", "x" * 2000, 7]
)
def test_sandbox_upload_with_names_outside_of_their_directory_are_refused(name: Any) -> None:
    files = {name: b"hostile"}
    for add in (UploadStore().add, lambda owner, digest, files: UploadDirectories().add(digest, files)):
        with pytest.raises(SandboxRequestError, match="invalid file"):
            add("ann", "0" * 64, files)


def test_sandbox_upload_are_what_their_digest_says() -> None:
    uploads = UploadStore()
    for wrong in ({}, {"a": b"b"}, None, [b"a"], {"a": "text"}):
        with pytest.raises(SandboxRequestError):
            uploads.add("ann", compute_digest(HELPERS), wrong)
    uploads.add("ann", compute_digest(HELPERS), HELPERS)


def test_sandbox_upload_of_one_owner_are_bounded_and_unknown_to_others() -> None:
    uploads, large = UploadStore(), {"a": b"0" * (MAX_BYTES - 1)}
    specs = [
        SandboxSpec(mounts=(Mount(source=format_upload_source(compute_digest(files)), target="/x"),))
        for files in (large, HELPERS)
    ]
    uploads.add("ann", compute_digest(large), large)
    uploads.add("ann", compute_digest(large), large)
    uploads.check("ann", specs[0])
    with pytest.raises(SandboxQuotaError, match="total upload size"):
        uploads.add("ann", compute_digest(HELPERS), HELPERS)
    with pytest.raises(SandboxQuotaError, match="total upload size"):
        uploads.check("ann", specs[1])
    with pytest.raises(SandboxRequestError, match="'bob' has not uploaded"):
        uploads.check("bob", specs[0])
    assert uploads.select("ann", specs[0], exclude=()) == {compute_digest(large): large}
    assert (
        uploads.select("ann", specs[0], exclude={compute_digest(large)})
        == uploads.select("bob", specs[0], exclude=())
        == {}
    )


def test_sandbox_upload_are_written_for_every_user_to_read_and_deleted_at_the_end() -> None:
    uploads, digest = UploadDirectories(), compute_digest(HELPERS)
    mount = Mount(source=format_upload_source(digest), target="/x")
    with pytest.raises(SandboxError, match="did not reach"):
        uploads.resolve_mount(mount)
    uploads.add(digest, HELPERS)
    uploads.add(digest, HELPERS)
    shown = uploads.resolve_mount(mount)
    assert shown is not None and read_directory(shown.source) == HELPERS and shown.target == "/x"
    place = Path(shown.source)
    assert {oct(path.stat().st_mode & 0o777) for path in (place, place / "data", place.parent)} == {"0o755"}
    assert oct((place / "helper.py").stat().st_mode & 0o777) == "0o644"
    assert uploads.resolve_mount(Mount(source="/etc", target="/x")) is None
    for other in ("../../etc", "0" * 64, ""):
        with pytest.raises(SandboxError, match="did not reach"):
            uploads.resolve_mount(Mount(source=format_upload_source(other), target="/x"))
    both = {"a": b"", "a/b": b""}
    with pytest.raises(SandboxRequestError, match="a file and a directory with the same name"):
        uploads.add(compute_digest(both), both)
    uploads.close()
    assert not place.parent.exists()


def test_sandbox_upload_and_specs_with_them_are_messages() -> None:
    message = {"op": "upload", "sandbox": compute_digest(HELPERS), "files": HELPERS}
    assert validate_client_message(decode(encode(message))) == message
    spec = SandboxSpec(mounts=(Mount(source="upload:0", target="/x", upload=True),))
    assert spec_to_json(spec)["mounts"] == [{"source": "upload:0", "target": "/x"}]
    assert spec_from_json(spec_to_json(spec)).mounts == (Mount(source="upload:0", target="/x"),)


def test_sandbox_upload_a_mount_to_upload_that_comes_from_outside_shows_no_directory_of_the_worker() -> None:
    worker = Worker(SandboxManager(warm=0))
    with pytest.raises(SandboxRequestError, match="is not permitted on this worker"):
        worker._check_mounts(SandboxSpec(mounts=(Mount(source="/etc", target="/x", upload=True),)))


async def test_sandbox_upload_a_local_manager_mounts_what_a_service_would_be_sent(tmp_path: Path) -> None:
    if reason := missing("bubblewrap"):
        pytest.skip(reason)
    tmp_path.chmod(0o755)
    async with SandboxManager(spec=spec_with(written(tmp_path / "helpers")), warm=0) as manager:
        assert (await manager.execute(PythonCode(source="import helper; print(helper.answer())"))).stdout == b"42\n"


async def test_sandbox_upload_a_directory_is_uploaded_once_and_seen_by_every_sandbox(tmp_path: Path) -> None:
    if reason := missing("service"):
        pytest.skip(reason)
    with served(tmp_path, "--warm", "0") as (url, token):
        spec = spec_with(written(tmp_path / "helpers"))
        async with connect(url, token, spec=spec, warm=0) as manager:
            runtime = manager.runtime
            assert isinstance(runtime, RemoteRuntime)
            sent: list[str] = []
            transmit = runtime._transmit
            runtime._transmit = lambda message: (sent.append(message["op"]), transmit(message))  # type: ignore[method-assign]
            runtime._service._transmit = runtime._transmit
            code = PythonCode(
                source="import helper; print(helper.answer(), open('/opt/helpers/data/words.txt').read())"
            )
            for _ in range(2):
                assert (await manager.execute(code)).stdout == b"42 one two\n"
                async with await manager.create() as own:
                    assert (await own.execute(Command(argv=("ls", "/opt/helpers")))).stdout == b"data\nhelper.py\n"
            assert sent.count("upload") <= 1
            assert runtime._socket is not None
            await runtime._socket.close()  # the next line may be to another server
            assert (await manager.execute(code)).stdout == b"42 one two\n"
            assert "upload" in sent
