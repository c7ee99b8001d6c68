"""What a person does wrong with a service, and is told: what, the value, what to do."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path
from typing import Any

import click
import pytest

sqlalchemy = pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")

from aiohttp import ServerDisconnectedError  # noqa: E402
from fastapi.exceptions import RequestValidationError  # noqa: E402

from roll_sandbox import Command, Limits, Program, PythonCode, connect  # noqa: E402
from roll_sandbox.__main__ import run  # noqa: E402
from roll_sandbox.cli.common import ByteSize  # noqa: E402
from roll_sandbox.connect_options import load_tls_context, make_token_header, make_unreachable_error  # noqa: E402
from roll_sandbox.errors import (  # noqa: E402
    BadImageError,
    ConfigError,
    SandboxRequestError,
    SandboxUnavailableError,
)
from roll_sandbox.images.sources import open_source  # noqa: E402
from roll_sandbox.requests import make_run_request  # noqa: E402
from roll_sandbox.service.archives import check_archive  # noqa: E402
from roll_sandbox.service.bodies import describe_validation_error  # noqa: E402
from roll_sandbox.service.quotas import Quota  # noqa: E402
from roll_sandbox.service.server import serve  # noqa: E402
from roll_sandbox.service.settings import Settings  # noqa: E402
from roll_sandbox.service.store import Store  # noqa: E402
from roll_sandbox.service.tokens import TokenStore  # noqa: E402
from roll_sandbox.wire import validate_client_message  # noqa: E402
from roll_sandbox.worker.connection import WorkerConnection  # noqa: E402


@pytest.mark.parametrize("url", ["127.0.0.1:8741", "localhost", "ftp://localhost:8741", "http://", ""])
def test_sandbox_user_error_an_address_without_its_scheme_or_host_is_refused_before_anybody_is_asked(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"the address of a sandbox service must be an HTTP.* URL.* 'http://127\.0\.0\.1:8741'"
    ):
        connect(url, "token")


def test_sandbox_user_error_a_token_keeps_no_line_end_of_its_file_and_is_one_word() -> None:
    assert make_token_header("roll_1_x\n") == {"Authorization": "Bearer roll_1_x"}
    for token, what in (("", "is empty"), (" \n", "is empty"), ("a b", "whitespace"), ("a\nb", "control characters")):
        with pytest.raises(ConfigError, match=what):
            make_token_header(token)


def test_sandbox_user_error_certificates_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.pem' cannot be loaded: No such file"):
        load_tls_context(str(tmp_path / "nope.pem"))
    (tmp_path / "empty.pem").touch()
    with pytest.raises(ConfigError, match="it contains no certificate in PEM format"):
        load_tls_context(str(tmp_path / "empty.pem"))
    assert load_tls_context(None) is True


def test_sandbox_user_error_why_nothing_answers_says_what_to_do() -> None:
    assert "use https:// if the server uses TLS" in str(make_unreachable_error("http://a:1", ServerDisconnectedError()))
    assert "(timeout): start a service with `roll-sandbox serve`." in str(
        make_unreachable_error("http://a:1", TimeoutError())
    )


@pytest.mark.asyncio
async def test_sandbox_user_error_nobody_at_a_port_is_said_in_the_systems_words(unused_tcp_port: int) -> None:
    manager = connect(f"http://127.0.0.1:{unused_tcp_port}", "token")
    with pytest.raises(
        SandboxUnavailableError, match=r"\(Connection refused\): start a service with `roll-sandbox serve`"
    ):
        await manager.start()


@pytest.mark.asyncio
async def test_sandbox_user_error_a_worker_that_reaches_nobody_says_so_once(
    unused_tcp_port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, third = 0, asyncio.Event()
    joined = WorkerConnection(None, f"http://127.0.0.1:{unused_tcp_port}", "token", name="worker-one", capacity=1)  # type: ignore[arg-type]
    dial = joined._connect

    async def counted(session: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 3:
            third.set()
        return await dial(session)

    monkeypatch.setattr(joined, "_connect", counted)
    monkeypatch.setattr("roll_sandbox.worker.connection._BACKOFF_S", (0.0,))
    serving = asyncio.create_task(joined.serve())
    await asyncio.wait_for(third.wait(), 30)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 1 and "Connection refused" in said[0] and said[0].endswith("Reconnecting.")


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"runtime": "bubblewarp"}, "Did you mean 'bubblewrap'"),
        ({"mounts": ("/no/such/directory",)}, "--mounts: directory '/no/such/directory' does not exist"),
        ({"lifetime_s": float("nan")}, "--lifetime must be a positive, finite number of seconds, got nan"),
        ({"quota": Quota(lifetime_s=-5)}, "--owner-lifetime must be a positive, finite number of seconds, got -5"),
        ({"audit": Path("/")}, "--audit must be a file, got the directory '/'"),
        (
            {"database": "nonsense"},
            "'nonsense' is not a valid database URL: expected, for example, sqlite:////a/file.db",
        ),
        ({"database": "sqlite://"}, "in-memory databases are not supported"),
    ],
)
def test_sandbox_user_error_a_service_refuses_its_settings_before_it_listens(
    settings: dict[str, Any], what: str, tmp_path: Path
) -> None:
    settings = {"database": f"sqlite:///{tmp_path}/s.db", **settings}
    with pytest.raises(ConfigError, match=what.replace("(", r"\(")):
        serve(Settings(**settings), "127.0.0.1", 0, certificate=None, key=None, print_line=print)


def test_sandbox_user_error_a_certificate_that_is_none_is_refused_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "cert.pem"
    file.write_text("no certificate")
    with pytest.raises(ConfigError, match="cannot load the TLS certificate"):
        serve(Settings(), "127.0.0.1", 0, certificate=file, key=file, print_line=print)


def test_sandbox_user_error_a_file_that_is_no_database_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_text("This is a text, and was never anything else.")
    with pytest.raises(ConfigError, match="cannot be used: file is not a database"):
        Store(f"sqlite:///{tmp_path}/s.db").lock()


def test_sandbox_user_error_a_token_is_good_for_a_time_that_a_calendar_has(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/s.db")
    store.migrate()
    for days in (-1.0, 0.0, float("nan"), 1e12):
        with pytest.raises(ConfigError, match=r"a token lifetime must be above 0 and at most 36,500"):
            TokenStore(store).create("ann", lifetime_s=days * 86_400)


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("print(1)", "a program must be .* got str"),
        (Command(argv="ls"), "must be a tuple of strings"),  # type: ignore[arg-type]
        (PythonCode(source="1", stdin="text"), "'standard input' of a program must be bytes"),  # type: ignore[arg-type]
        (PythonCode(source="1", files={"a": "text"}), "'a' of a program must be bytes"),  # type: ignore[dict-item]
        (PythonCode(source="1", cpu_s="2"), "cpu_s of a program must be a positive number, got '2'"),  # type: ignore[arg-type]
        (Command(argv=("ls",), wall_s=-1), "wall_s of a program must be a positive number, got '-1'"),
    ],
)
def test_sandbox_user_error_what_is_no_program_never_reaches_a_sandbox(program: Program, what: str) -> None:
    with pytest.raises((TypeError, ValueError), match=what):
        make_run_request(program, Limits(), alone=True, fresh=True)


def test_sandbox_user_error_a_message_is_refused_in_plain_words() -> None:
    with pytest.raises(SandboxRequestError, match="must be a positive number of seconds, got '-1'"):
        validate_client_message({"op": "extend", "sandbox": "a" * 8, "lifetime_s": -1})


def test_sandbox_user_error_a_link_in_an_archive_is_not_called_compression() -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        member = tarfile.TarInfo("link")
        member.type, member.linkname = tarfile.SYMTYPE, "file"
        archive.addfile(member)
    with pytest.raises(SandboxRequestError, match=r"^the archive's entry 'link' is neither a file nor a directory\.$"):
        check_archive(data.getvalue(), 1000, 10)


def test_sandbox_user_error_an_image_is_not_made_of_an_empty_directory_or_a_text(tmp_path: Path) -> None:
    with pytest.raises(BadImageError, match="is empty: expected a root file system or an OCI layout"):
        open_source(tmp_path)
    text = tmp_path / "text"
    text.write_text("not an image archive" * 100)
    with pytest.raises(BadImageError, match="it is not a tar archive") as refused, open_source(text):
        pass
    assert "\n" not in str(refused.value)


def test_sandbox_user_error_a_body_that_is_no_json_is_called_the_body() -> None:
    error = RequestValidationError([{"type": "json_invalid", "loc": ("body", 0), "msg": "JSON decode error"}])
    assert (
        describe_validation_error(error)
        == "the body (must be JSON, with Content-Type: application/json): JSON decode error"
    )
    error = RequestValidationError([{"type": "extra_forbidden", "loc": ("body", "spce"), "msg": "not permitted"}])
    assert describe_validation_error(error) == "spce: not permitted"


def test_sandbox_user_error_sizes_have_units_and_a_number_alone_counts_as_before() -> None:
    assert ByteSize().convert("1GiB", None, None) == 2**30 and ByteSize().convert("7", None, None) == 7
    assert ByteSize(unit=2**20).convert("512", None, None) == 2**29
    with pytest.raises(click.BadParameter, match="size of at least 16MiB such as 8GiB"):
        ByteSize(unit=2**20, min_size=2**24).convert("1", None, None)
    with pytest.raises(click.BadParameter, match="must be a size such as 8GiB"):
        ByteSize().convert("64GB", None, None)


def test_sandbox_user_error_a_misspelt_command_is_told_what_it_may_have_been(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["shel"]) == 2
    assert "No such command 'shel'. Did you mean 'shell'?" in capsys.readouterr().err


def test_sandbox_user_error_options_after_the_program_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    async def seen(_: object, program: Command) -> int:
        asked.append(tuple(program.argv))
        return 0

    monkeypatch.setattr("roll_sandbox.cli.run._run_program", seen)
    for words in (["ls", "-la", "--time", "x"], ["--", "ls", "-la", "--time", "x"]):
        assert run(["run", "--token", "t", *words]) == 0
    assert asked == [("ls", "-la", "--time", "x")] * 2
