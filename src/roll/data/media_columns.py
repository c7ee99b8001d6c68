"""Checks that the configured media columns of a source exist, so that a wrong name does not drop all media silently."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

from roll.config.sources import ConversationColumns
from roll.data.cells import Row
from roll.errors import DataError, shorten
from roll.registry import did_you_mean
from roll.types import MediaKind, Message

__all__ = ["MediaColumns"]

logger = logging.getLogger(__name__)

_KEYS = ("images_key", "audios_key", "videos_key")


class MediaColumns:
    """Records which media columns the rows of one source have.

    Args:
        config: The source's entry in the configuration.
    """

    def __init__(self, config: ConversationColumns) -> None:
        self._config = config
        # The default columns are optional, but a name that the user chose must occur.
        self._missing = {
            key: name
            for key in _KEYS
            if (name := getattr(config, key)) not in (None, type(config).model_fields[key].default)
            and name not in config.ignored_fields
        }
        self._columns: tuple[Any, ...] = ()
        self.has_media = False
        """Whether a row had media."""

    def record_row(self, row: Row) -> None:
        """Record the columns of a row."""
        if not self._columns:
            self._columns = tuple(row)
        if self._missing:
            self._missing = {key: name for key, name in self._missing.items() if name not in row}

    def record_messages(self, messages: Iterable[Message]) -> None:
        """Record whether the messages of a row have media."""
        self.has_media = self.has_media or any(message.media for message in messages)

    def check(self, domain: str) -> None:
        """Check that every media column in the configuration occurs in at least one row.

        Raises:
            DataError: A configured column does not occur in any row.
        """
        for key, name in self._missing.items():
            hint = did_you_mean(name, [column for column in self._columns if isinstance(column, str)])
            raise DataError(
                f"data source '{domain}' has no column '{name}' (`{key}`).{hint} {self._list_columns()} Set `{key}` "
                "to the correct column, or remove it."
            )

    def warn_without_media(self, domain: str, kinds: Collection[MediaKind]) -> None:
        """Log a warning if no row had media, although the model reads media of some kinds."""
        if self.has_media or all(getattr(self._config, key) is None for key in _KEYS):
            return
        logger.warning(
            "the model supports %s, but no row of data source '%s' contains any: to train on images, set `images_key` "
            "to their column. %s Set it to null if the source has none.",
            " and ".join({"image": "images", "audio": "audio", "video": "videos"}[kind] for kind in kinds),
            domain,
            self._list_columns(),
        )

    def _list_columns(self) -> str:
        columns = ", ".join(shorten(column) for column in self._columns[:20])
        return f"Columns of the first row: {columns}."
