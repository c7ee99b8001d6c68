"""An answer to a question about a run, with its figures and links to the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RECENT_STEPS", "Answer", "link"]

RECENT_STEPS = 5
"""Number of steps at the beginning and at the end that are compared."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer of the page."""

    id: str
    question: str
    text: str
    tone: str = ""
    """`good`, `warn` or `bad`; empty for a neutral answer."""
    figures: Sequence[tuple[str, float | str | None]] = ()
    links: Sequence[dict[str, Any]] = field(default_factory=list)


def link(text: str, view: str, **params: Any) -> dict[str, Any]:
    """Return a link to a view of the page with its parameters."""
    return {"text": text, "view": view, "params": params}
