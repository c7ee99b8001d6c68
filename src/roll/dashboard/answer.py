"""An answer to a question about a run, with its figures and links to the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RECENT_STEPS", "Answer", "build_link"]

RECENT_STEPS = 5
"""Number of first and of last steps that are compared with each other."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the page shows for a question about a run: the question, the answer in words, figures and links."""

    id: str
    question: str
    text: str
    tone: str = ""
    """`good`, `warn` or `bad`; empty for a neutral answer."""
    figures: Sequence[tuple[str, float | str | None]] = ()
    links: Sequence[dict[str, Any]] = field(default_factory=list)


def build_link(text: str, view: str, **params: Any) -> dict[str, Any]:
    """Return a link with this text to a view of the page; `params` are the view's parameters."""
    return {"text": text, "view": view, "params": params}
