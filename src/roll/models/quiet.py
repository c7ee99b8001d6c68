"""Suppresses progress bars and messages of `transformers`, which would disturb a live display."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["silence_transformers"]


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppress progress bars and warnings of `transformers` within this context; errors are still shown."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
