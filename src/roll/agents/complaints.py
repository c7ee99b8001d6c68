"""Explain why an agent failed: the endpoint's refusals first, then the agent's own output."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["complaint", "with_refusals"]

LONGEST = 1200
"""Most characters of a program's output in a message."""
LONGEST_END = 300
"""Number of characters that are shown from the end of an error: the last line of a traceback has the cause."""
LONGEST_REFUSAL = 400
MOST_REFUSALS = 3


def complaint(how: int | str, stdout: bytes, stderr: bytes) -> str:
    """Return how a program failed, with its output.

    Args:
        how: The exit code, or the reason the program was ended.
        stdout: Standard output, for programs that print errors there.
        stderr: Standard error.
    """
    said = stderr.decode(errors="replace").strip() or stdout.decode(errors="replace").strip()
    head = f"exit code {how}" if isinstance(how, int) else how
    return f"{head}: {shortened(said)}" if said else head


def shortened(text: str) -> str:
    """Return a long text without its middle: its start, and its last lines."""
    if len(text) <= LONGEST:
        return text
    begin, end = text[: LONGEST - LONGEST_END], text[-LONGEST_END:]
    begin = begin[: begin.rfind("\n")] if "\n" in begin[len(begin) // 2 :] else begin
    end = end[end.find("\n") + 1 :] if "\n" in end[: len(end) // 2] else end
    return f"{begin}\n[… {len(text) - len(begin) - len(end)} characters …]\n{end}"


def with_refusals(problem: str, refused: Sequence[str]) -> str:
    """Return the problem behind the endpoint's refusals, which are usually the cause."""
    if not refused:
        return problem
    listed = "; ".join(_one_line(each) for each in refused[:MOST_REFUSALS])
    more = f", and {len(refused) - MOST_REFUSALS} more" if len(refused) > MOST_REFUSALS else ""
    return f"the endpoint refused {listed}{more}. The agent: {problem}"


def _one_line(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= LONGEST_REFUSAL else f"{line[: LONGEST_REFUSAL - 1]}…"
