"""A browser, runs and a server for tests of the page; all are skipped, saying why, where no Chromium is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config
from dashboard.served import Site, copy, make_hostile

import roll

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def chromium() -> str | None:
    """Where the browser is: `CHROMIUM` in the environment, or on the path."""
    named = os.environ.get("CHROMIUM", "")
    return named if named.startswith("/") else next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make setup")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium is here: make setup CHROMIUM=apt, or name one: CHROMIUM=/path/to/chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def trained(browser: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a real run of six steps that has ended."""
    directory = tmp_path_factory.mktemp("trained")
    sizes = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6}
    roll.train({**tiny_config(tiny_model, num_steps=6), "output_dir": str(directory), "rollout": sizes})
    return directory / "run"


@pytest.fixture(scope="session")
def site(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A dashboard over a run that has ended, one that grows, one with hostile texts and one that cannot be read."""
    runs = tmp_path_factory.mktemp("runs")
    shutil.copytree(trained, runs / "ended")
    shutil.copytree(trained, runs / "hostile <b>run<b>")
    make_hostile(runs / "hostile <b>run<b>")
    copy(trained, runs / "growing", num_steps=3)
    (runs / "broken").mkdir()
    (runs / "broken" / "config.yaml").write_text("pipeline: [unclosed")
    (runs / "broken" / "metrics.jsonl").write_text("this is no JSON\n")
    command = [sys.executable, "-c", "from roll.cli import main; main()", "dashboard", str(runs), "--port", "0"]
    with subprocess.Popen([*command, "--no-open"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = next(word for word in server.stdout.readline().split() if word.startswith("http"))
        yield Site(address, runs)
        server.terminate()


@pytest.fixture
def page(browser: Any, site: Site) -> Iterator[Any]:
    """A page whose console stays silent, and that nothing hostile has reached."""
    context = browser.new_context(viewport={"width": 1280, "height": 860}, accept_downloads=True)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.set_default_timeout(30_000)
    yield page
    assert not page.evaluate("window.hacked")
    assert said == []
    context.close()
