"""Implementations that installed packages and users' files add to a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roll import extensions
from roll.errors import ConfigError
from roll.extensions import ExtensibleRegistry, has_user_code

GROUP = "roll.tests"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Install a package with one module `NAME_package` and entry points of `GROUP`, for the time of the test."""

    def install(name: str, points: str) -> None:
        site = tmp_path / name
        information = site / f"{name}-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(f"[{GROUP}]\n{points}\n")
        (site / f"{name}_package.py").write_text("def implementation():\n    return __name__\n")
        monkeypatch.syspath_prepend(site)
        forget()

    yield install
    forget()


def forget() -> None:
    for known in (extensions._find_installed_extensions, extensions._load_entry_points, extensions._list_names):
        known.cache_clear()


def registry() -> ExtensibleRegistry[Callable[[], object]]:
    return ExtensibleRegistry("codec", {"json": "json:JSONDecoder"}, GROUP)


def test_extensions_of_an_installed_package_are_known_by_their_entry_point(
    installed: Callable[[str, str], None],
) -> None:
    installed("fast", "quick = fast_package:implementation")
    codecs = registry()
    assert list(codecs) == ["json", "quick"] and codecs.built_in_names == ("json",)
    assert "quick" in codecs and codecs.path("quick") == "fast_package:implementation"
    assert codecs.get("quick")() == "fast_package"


def test_extensions_never_replace_a_name_of_the_registry(installed: Callable[[str, str], None]) -> None:
    installed("fast", "json = fast_package:implementation")
    assert list(registry()) == ["json"] and registry().path("json") == "json:JSONDecoder"


def test_extensions_by_one_name_of_two_packages_are_refused_with_both(installed: Callable[[str, str], None]) -> None:
    installed("fast", "quick = fast_package:implementation")
    installed("swift", "quick = swift_package:implementation")
    with pytest.raises(ConfigError) as caught:
        registry().path("quick")
    message = str(caught.value)
    assert "'quick' is registered by several installed packages" in message
    assert "fast_package:implementation" in message and "swift_package:implementation" in message


def test_extensions_in_a_file_are_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_extensions.py").write_text("class Codec:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    path = "mine_for_extensions.py:Codec"
    assert path in registry() and registry().path(path) == path
    assert registry().get(path).__name__ == "Codec"
    with pytest.raises(ConfigError, match=r"has no 'Code'. Did you mean 'Codec'"):
        registry().get("mine_for_extensions.py:Code")


def test_extensions_that_are_unknown_are_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        registry().path("jsn")
    assert str(caught.value) == (
        "unknown codec 'jsn'. Did you mean 'json'? Known: json, path/to/file.py:Name, package.module:Name."
    )


@pytest.mark.parametrize("points", ["quick", "quick = ???", "quick = fast_package"])
def test_extensions_whose_entry_point_is_malformed_end_nothing_else(
    installed: Callable[[str, str], None], points: str, caplog: pytest.LogCaptureFixture
) -> None:
    installed("swift", "other = swift_package:implementation")
    installed("fast", points)
    assert registry().get("other")() == "swift_package" and has_user_code(["other"])
    with pytest.raises(ConfigError, match=r"^import path '.*' is malformed|^unknown codec 'quick'\."):
        registry().get("quick")
    assert ("entry points of a package in" in caplog.text) == (points == "quick")


def test_extensions_are_seen_wherever_a_configuration_names_it() -> None:
    """It may need PyTorch, which `roll check` otherwise does not load."""
    assert has_user_code({"inference": {"engine": "engines/mine.py:Engine"}})
    assert has_user_code({"data": [{"options": {"tools": ("python", "package.tools:Search")}}]})
    assert not has_user_code({"model": "smollm2", "data": [{"prompt_template": "{prompt} Answer: a number."}, 3]})
