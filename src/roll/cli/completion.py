"""Shell completion of path arguments. docs/operations/install.md describes how to enable completion."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

__all__ = ["complete_directories", "complete_files"]


def complete_files(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete file names with the shell's own completion."""
    return [CompletionItem(incomplete, type="file")]


def complete_directories(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete directories, such as runs, with the shell's own completion."""
    return [CompletionItem(incomplete, type="dir")]
