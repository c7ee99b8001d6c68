"""Error messages for failed agents: the requests that the endpoint rejected, then the agent's output."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["add_request_errors", "describe_failure"]

MAX_LENGTH = 1200
"""Maximum number of characters of a program's output in a message."""
TAIL_LENGTH = 300
"""Number of characters shown from the end of the output: the last line of a traceback has the cause."""
MAX_REQUEST_ERROR_LENGTH = 400
"""Maximum number of characters of one rejected request in a message."""
MAX_REQUEST_ERRORS = 3
"""Maximum number of rejected requests in a message."""


def describe_failure(reason: int | str, stdout: bytes, stderr: bytes) -> str:
    """Describe the failure of a program, with its output.

    Args:
        reason: The exit code, or the reason why the program was stopped.
        stdout: Standard output, for programs that print errors there.
        stderr: Standard error.
    """
    output = stderr.decode(errors="replace").strip() or stdout.decode(errors="replace").strip()
    head = f"exit code {reason}" if isinstance(reason, int) else reason
    return f"{head}: {shorten_output(output)}" if output else head


def shorten_output(text: str) -> str:
    """Return the text, or only its start and its last lines if it is long."""
    if len(text) <= MAX_LENGTH:
        return text
    begin, end = text[: MAX_LENGTH - TAIL_LENGTH], text[-TAIL_LENGTH:]
    begin = begin[: begin.rfind("\n")] if "\n" in begin[len(begin) // 2 :] else begin
    end = end[end.find("\n") + 1 :] if "\n" in end[: len(end) // 2] else end
    return f"{begin}\n[… {len(text) - len(begin) - len(end)} characters …]\n{end}"


def add_request_errors(problem: str, rejected: Sequence[str]) -> str:
    """Prepend the rejected requests to a failure message, because they usually caused the failure.

    Args:
        problem: The failure's message.
        rejected: The errors of the requests that the endpoint rejected.
    """
    if not rejected:
        return problem
    listed = "; ".join(_to_one_line(each) for each in rejected[:MAX_REQUEST_ERRORS])
    more = f", and {len(rejected) - MAX_REQUEST_ERRORS} more" if len(rejected) > MAX_REQUEST_ERRORS else ""
    return f"the endpoint rejected {listed}{more}. The agent: {problem}"


def _to_one_line(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= MAX_REQUEST_ERROR_LENGTH else f"{line[: MAX_REQUEST_ERROR_LENGTH - 1]}…"
