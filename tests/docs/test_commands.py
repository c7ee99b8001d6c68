"""Every command in the documentation is one that there is: its name, options, files and keys."""

import re

import click
import pytest
from docs.pages import PAGES, ROOT, blocks, inline_commands

from roll.cli.commands import roll
from roll.config.load import load_config
from roll.config.simulation import load_simulation

LANGUAGES = {"", "sh", "bash", "console", "python", "{.python}", "yaml", "json", "text", "mermaid"}
FENCED = [pytest.param(words, id=f"{block}:{' '.join(words)[:60]}") for block in blocks() for words in block.commands]
INLINE = [pytest.param(words, id=f"{page}:{' '.join(words)[:60]}") for page, words in inline_commands()]


def test_docs_commands_every_block_has_a_language_that_these_tests_know():
    assert {str(block): block.language for block in blocks() if block.language not in LANGUAGES} == {}
    assert len(blocks()) > 100 and len(FENCED) > 40


def parsed(words: list[str]) -> tuple[click.Command, dict]:
    """The command of the command line and its arguments, as `roll` itself parses them."""
    command, context = roll, None
    words = words[1:]
    while isinstance(command, click.Group):
        context = command.make_context(command.name, words, parent=context, resilient_parsing=False)
        words = [*context._protected_args, *context.args]
        _, command, words = command.resolve_command(context, words)
    context = command.make_context(command.name, words, parent=context)
    return command, context.params


@pytest.mark.parametrize("words", FENCED)
def test_docs_commands_a_command_of_a_block_is_one(words):
    program = words[0].removeprefix(".venv/bin/")
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert [
            word for word in words[1:] if "=" not in word and not word.startswith("-") and word not in targets
        ] == []
    elif program == "python":
        scripts = [word for word in words[1:] if word.endswith(".py")]
        assert [script for script in scripts if not (ROOT / script).is_file()] == []
    elif program == "roll" and not (set(words) & {"--help", "-h", "--version"}):
        command, given = parsed(words)
        file = str(given.get("file") or "")
        if file.startswith("examples/") and not file.startswith("examples/extension/"):  # tests/integration runs these
            load = load_simulation if command.name in ("simulate", "plan") else load_config
            assert load(ROOT / file, list(given["overrides"])) is not None


@pytest.mark.parametrize("words", INLINE)
def test_docs_commands_a_command_in_the_text_is_one(words):
    """Its arguments may be left out there."""
    command, rest = roll, [word for word in words[1:] if word != "…"]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        inner = command.get_command(click.Context(command), rest[0])
        assert inner is not None, f"there is no `{' '.join(words)}`"
        command, rest = inner, rest[1:]
    known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
    options = [word.split("=")[0] for word in rest if word.startswith("-") and word != "--"]
    assert set(options) <= known | {"--help", "-h"}


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_docs_commands_a_path_that_a_page_names_is_there(page):
    pattern = (
        r"(?:\.\./)*(?:packages|examples|tools|src|tests|benchmarks|scripts|docs)/[\w./-]+\.(?:yaml|py|md|sh|jsonl|txt)"
    )
    paths = set(re.findall(pattern, page.read_text()))
    assert sorted(path for path in paths if not ((ROOT / path).exists() or (page.parent / path).exists())) == []
