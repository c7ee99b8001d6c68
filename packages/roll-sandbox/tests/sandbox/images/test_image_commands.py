"""`roll-sandbox image`, as a person types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sandbox.images.oci import Built, build, file, write_layout
from sandbox.images.registry_server import registry_of, serving

from roll_sandbox.cli import sandbox
from roll_sandbox.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path / "cache" / "sandbox-images"


@pytest.fixture
def built() -> Built:
    return build([[file("one", b"1")]])


def image(*arguments: str) -> Result:
    return CliRunner().invoke(sandbox, ["image", *arguments])


def test_sandbox_image_commands_an_image_is_imported_listed_and_removed(
    tmp_path: Path, built: Built, cache: Path
) -> None:
    path = write_layout(tmp_path / "layout", built)
    assert image("import", str(path), "world:1").output.startswith(f"world:1  {built.config}  ")
    image("import", str(path), "other")
    (line,) = image("list").output.splitlines()
    assert line.startswith(built.config[7:19])
    assert line.endswith("other:latest world:1")
    assert image("remove", "world:1").exit_code == 0
    assert image("list").output.endswith(" other:latest\n")
    assert image("remove", built.config).exit_code == 0
    assert image("list").output == ""
    assert list((cache / "layers").iterdir()) == []


def test_sandbox_image_commands_an_image_is_pulled_and_named(built: Built) -> None:
    with serving(registry_of(built)) as address:
        assert image("pull", f"{address}/a/world", "--as", "world").output.startswith(f"world:latest  {built.config}")
        assert image("pull", f"{address}/a/world").output.startswith(f"{address}/a/world:latest  {built.config}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["remove", "nothing"], "image 'nothing' was not found"),
        (["remove", "NOTHING"], "invalid image name"),
        (["pull", "python:3"], "has no registry"),
        (["pull", "127.0.0.1:1/x", "--as", "A B"], "invalid image name"),
        (["import", "missing", "x"], "no image found at 'missing'"),
        (["import", "{layout}", "x", "--tag", "7"], "tag '7' was not found"),
        (["import", "{layout}", "x", "--budget", "0.00001"], "more bytes than the budget allows"),
    ],
    ids=lambda arguments: " ".join(arguments) if isinstance(arguments, list) else "",
)
def test_sandbox_image_commands_what_cannot_be_done_is_the_users_to_mend(
    tmp_path: Path, built: Built, arguments: list[str], message: str
) -> None:
    path = write_layout(tmp_path / "layout", built)
    error = image(*(each.format(layout=path) for each in arguments)).exception
    assert isinstance(error, UserError)
    assert message in str(error)
