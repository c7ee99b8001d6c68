"""The comparison with other libraries: every entry of ROLL's column has tests or a command behind it."""

import re
from typing import get_args

from docs.pages import ROOT

from roll.cli.commands import roll
from roll.config.preference import MethodName

PAGE = (ROOT / "docs" / "comparison.md").read_text()


def rows(heading: str) -> dict[str, list[str]]:
    """The table under a heading, by its first column."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: rest for name, *rest in cells}


CLAIMS, EVIDENCE = rows("Features"), rows("Evidence")


def test_docs_comparison_names_evidence_for_every_row_and_for_no_other():
    assert list(EVIDENCE) == list(CLAIMS) and len(CLAIMS) > 15


def test_docs_comparison_evidence_is_there():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name, (tests, command) in EVIDENCE.items():
        files = re.findall(r"`(tests/[^`]+)`", tests)
        assert files or command, name
        for file in files:
            assert re.search(r"^ *(async )?def test_", (ROOT / file).read_text(), re.MULTILINE), file
        for program, word in re.findall(r"`(make|roll) ([a-z-]+)[^`]*`", command):
            assert word in (targets if program == "make" else roll.commands), command


def test_docs_comparison_counts_are_those_of_the_code():
    assert CLAIMS["DPO and variants"][0] == f"yes, {len(get_args(MethodName))} methods"
