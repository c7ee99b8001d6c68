"""Say why an agent failed: what the endpoint refused it, and then what it said itself."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["complaint", "with_refusals"]

LONGEST = 1200
"""Characters of a program's output in a message."""
LONGEST_END = 300
"""Characters of an error that are shown, from its end: the last line of a traceback says what happened."""
LONGEST_REFUSAL = 400
MOST_REFUSALS = 3


def complaint(how: int | str, stdout: bytes, stderr: bytes) -> str:
    """Return how a program failed and what it said.

    Args:
        how: its exit code, or what ended it.
        stdout: what it printed, for programs that complain there.
        stderr: its errors.
    """
    said = stderr.decode(errors="replace").strip() or stdout.decode(errors="replace").strip()
    head = f"exit code {how}" if isinstance(how, int) else how
    return f"{head}: {shortened(said)}" if said else head


def shortened(text: str) -> str:
    """Return a long text without its middle: where it begins, and its last lines."""
    if len(text) <= LONGEST:
        return text
    begin, end = text[: LONGEST - LONGEST_END], text[-LONGEST_END:]
    begin = begin[: begin.rfind("\n")] if "\n" in begin[len(begin) // 2 :] else begin
    end = end[end.find("\n") + 1 :] if "\n" in end[: len(end) // 2] else end
    return f"{begin}\n[… {len(text) - len(begin) - len(end)} characters …]\n{end}"


def with_refusals(problem: str, refused: Sequence[str]) -> str:
    """Return what went wrong, after what the endpoint refused: that is the reason more often than not."""
    if not refused:
        return problem
    listed = "; ".join(_one_line(each) for each in refused[:MOST_REFUSALS])
    more = f", and {len(refused) - MOST_REFUSALS} more" if len(refused) > MOST_REFUSALS else ""
    return f"the endpoint refused {listed}{more}. The agent: {problem}"


def _one_line(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= LONGEST_REFUSAL else f"{line[: LONGEST_REFUSAL - 1]}…"
