"""Warnings about features that agents use and the endpoint ignores: each is logged once per run."""

from __future__ import annotations

import logging

from roll.tracking.escape import escape_controls

__all__ = ["WarningLog"]

logger = logging.getLogger(__name__)

MAX_WARNINGS = 64
"""Maximum number of different warnings: a malicious agent could cause any number of them."""


class WarningLog:
    """Logs each type of warning once.

    Args:
        reads_images: Whether the policy reads images; if it does, images cause no warning.
    """

    def __init__(self, *, reads_images: bool = False) -> None:
        self.reads_images = reads_images
        self._kinds: set[str] = set()

    def warn_once(self, kind: str, text: str) -> None:
        """Log a warning, unless the run has already logged a warning of this type.

        Args:
            kind: Identifies the ignored feature, such as `tool web_search`.
            text: The message: the ignored feature, and a remedy.
        """
        if kind in self._kinds or len(self._kinds) >= MAX_WARNINGS:
            return
        self._kinds.add(kind)
        logger.warning("%s", escape_controls(text).replace("\n", " "))
        if len(self._kinds) == MAX_WARNINGS:
            logger.warning("agents use more than %d unsupported features: no further warnings are logged", MAX_WARNINGS)
