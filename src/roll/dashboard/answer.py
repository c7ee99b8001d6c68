"""An answer to a question about a run, with figures and links to views of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RECENT_STEPS", "Answer", "build_link"]

RECENT_STEPS = 5
"""Number of steps at the start and at the end of a run that are compared with each other."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a question about a run: text, figures and links to views of the page."""

    id: str
    question: str
    text: str
    tone: str = ""
    """`good`, `warn` or `bad`; empty for a neutral answer."""
    figures: Sequence[tuple[str, float | str | None]] = ()
    links: Sequence[dict[str, Any]] = field(default_factory=list)


def build_link(text: str, view: str, **params: Any) -> dict[str, Any]:
    """Build a link to a view of the page.

    Args:
        text: Text of the link.
        view: Name of the view.
        params: Parameters of the view.
    """
    return {"text": text, "view": view, "params": params}
