"""Models that tests share."""

from __future__ import annotations

import gc
import signal
from pathlib import Path

import hypothesis
import pytest
from worlds.tiny_model import write_tiny_model

from roll.errors import ModelError
from roll.models import resolve_model
from roll.openmp import start_spin_control

# A machine with other work is no failure, and the same code passes every time; `make explore` looks for new examples.
hypothesis.settings.register_profile("roll", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile("roll")


def pytest_configure() -> None:
    """Ctrl-C works in the tests' processes also where a script started pytest in the background, which ignores it."""
    start_spin_control()  # two processes of tests share the cores
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of these directories, which make whole runs, so that `make test` can leave them out."""
    here = Path(__file__).parent
    directories = {here / "integration", here / "chaos"}
    for item in items:
        if item.path.parent in directories:
            item.add_marker(pytest.mark.integration)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was imported and collected stays: a million objects that each collection of garbage would look through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random Llama (float32, tied embeddings) with its own tokenizer. Read-only, please."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def servable_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose attention heads are wide enough for vLLM's CPU kernels. Read-only, please."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "servable", hidden=128)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Directory of `smollm2-135m-instruct`, prepared on first use (about 20 s, once per machine)."""
    try:
        return resolve_model("smollm2-135m-instruct")
    except ModelError as error:
        pytest.skip(f"the default model is not here: {error}")
