"""Every tutorial and how-to page works as written: the test writes its files and runs its commands in their order."""

import subprocess
import sys
from pathlib import Path

import pytest
from docs.pages import ROOT, blocks

from roll.cli.main import run

pytestmark = pytest.mark.integration

FOLDERS = ("docs/tutorials/", "docs/how-to/")
BY_PAGE: dict[str, list] = {}
for _block in blocks():
    if _block.page.startswith(FOLDERS):
        BY_PAGE.setdefault(_block.page, []).append(_block)
QUICK = ("check", "config", "env", "reward")
"""Commands that train nothing; what needs a run, or tries one dry, is in the slow test."""

EVERY_GROUP = "algorithm.filters.skip_zero_variance=false"
"""A random model earns nothing, and a run in which no group says anything ends with a message of that and code 1."""

WITHOUT_FILTERS = {"docs/how-to/train-diffusion-models.md"}
"""Pages of pipelines that have no `algorithm.filters`."""


def test_docs_tutorials_there_are_tutorials():
    assert len(BY_PAGE) == sum(len(list((ROOT / folder).glob("*.md"))) for folder in FOLDERS) >= 10


def try_out(page: str, directory: Path, capsys: pytest.CaptureFixture, only: tuple[str, ...] = ()) -> None:
    """Write the page's files and run its commands, those of `only` or all."""
    for block in BY_PAGE[page]:
        if block.title:
            (directory / block.title).write_text(block.text)
        for words in block.commands:
            if words[0] == "python" and not only:  # prepares data that later commands read
                subprocess.run([sys.executable, *words[1:]], cwd=directory, check=True, capture_output=True)
            if words[0] != "roll":
                continue
            if not only or (words[1] in only and "--dry-run" not in words):
                further = [EVERY_GROUP] if words[1] == "train" and page not in WITHOUT_FILTERS else []
                assert run([*words[1:], *further]) == 0, (
                    f"{block}: {' '.join(words)}\n{capsys.readouterr().err[-2000:]}"
                )


@pytest.mark.parametrize("page", BY_PAGE)
def test_docs_tutorials_what_a_tutorial_looks_at(page, workplace, capsys):
    try_out(page, workplace, capsys, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("page", BY_PAGE)
def test_docs_tutorials_a_tutorial(page, workplace, capsys):
    try_out(page, workplace, capsys)
