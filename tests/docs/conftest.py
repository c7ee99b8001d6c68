"""Where the documentation is tried out."""

import importlib.util
from pathlib import Path

import pytest
from docs.pages import ROOT

import roll.models.resolve


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> Path:
    """A directory like the repository's root.

    The model `smollm2-135m-instruct` is a tiny random one in it, and the engine ROLL's own, so a page takes seconds.
    """
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(roll.models.resolve, "prepare", lambda entry: tiny_model)
    monkeypatch.setattr(roll.models.resolve, "get_cached_directory", lambda entry: tiny_model)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find(name, *rest))
    return tmp_path
