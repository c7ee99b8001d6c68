"""Log once per run what agents send that the endpoint does not support, and so ignores."""

from __future__ import annotations

import logging

from roll.tracking.visible import printable

__all__ = ["Notes"]

logger = logging.getLogger(__name__)

MOST_NOTES = 64
"""Most kinds of notes: a hostile agent could invent any number of kinds."""


class Notes:
    """The notes of one run."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def add(self, kind: str, text: str) -> None:
        """Log a warning, unless the run already has one of this kind.

        Args:
            kind: Identifies the ignored feature, such as `tool web_search`.
            text: The ignored feature, and a remedy.
        """
        if kind in self._kinds or len(self._kinds) >= MOST_NOTES:
            return
        self._kinds.add(kind)
        logger.warning("%s", printable(text).replace("\n", " "))
        if len(self._kinds) == MOST_NOTES:
            logger.warning(
                "agents send more that is not served than %d notes can say: the rest is not noted", MOST_NOTES
            )
