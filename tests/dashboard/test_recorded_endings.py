"""The page Answers in a real Chromium, on recorded runs of every pipeline and every kind of end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from dashboard.served import Site
from dashboard.test_page import show, until
from recorded.endings import combinations
from worlds.recorded_endings import extract_endings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A dashboard over the recorded runs."""
    runs = extract_endings(tmp_path_factory.mktemp("endings"))
    command = [sys.executable, "-c", "from roll.cli import main; main()", "dashboard", str(runs), "--port", "0"]
    with subprocess.Popen([*command, "--no-open"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = next(word for word in server.stdout.readline().split() if word.startswith("http"))
        yield Site(address, runs)
        server.terminate()


@pytest.mark.parametrize(("pipeline", "end"), combinations())
def test_dashboard_answers_page_shows_the_answers_of_a_recorded_run(
    page: Any, site: Site, pipeline: str, end: str
) -> None:
    name = f"{pipeline}-{end}"
    while "indexing" in (found := site.get(f"runs/{site.run(name)}/answers")):
        pass
    answers = found["answers"]
    show(page, site, "answers", run=name)
    until(page, "document.querySelector('.answer-card') && !document.querySelector('.answers [role=status]')")
    shown = page.locator(".view").inner_text()
    for answer in answers:
        assert answer["question"] in shown
        assert " ".join(answer["answer"].split())[:80] in " ".join(shown.split())
