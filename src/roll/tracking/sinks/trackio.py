"""Trackio: https://huggingface.co/docs/trackio. Local (in `TRACKIO_DIR`), or a Space (`TRACKIO_SPACE_ID`)."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from roll.tracking.sinks.base import Opening, PathWatch, RolloutTable, load_client, run_id

__all__ = ["TrackioSink"]


class TrackioSink:
    """One run of a project. Trackio identifies a run by its name only, so the name ends with a part of the run's id."""

    def __init__(self, opening: Opening) -> None:
        self._client = load_client("trackio")
        self._run = self._client.init(
            project=opening.project,
            name=f"{opening.run.name}-{run_id(opening.run)[:6]}",
            config=dict(opening.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # GPU metrics would have steps of their own
            auto_log_cpu=False,
        )
        self._kept = PathWatch(self._client.sqlite_storage.SQLiteStorage.get_project_db_path(opening.project))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._kept.check()
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, table: RolloutTable) -> None:
        """Write the table; Trackio renders cells as Markdown, so markup is escaped."""
        self._kept.check()
        rows = [[_plain(cell) if isinstance(cell, str) else cell for cell in row] for row in table.rows]
        shown = self._client.Table(columns=list(table.columns), data=rows)
        self._run.log({table.name: shown}, step=step)

    def close(self) -> None:
        self._run.finish()


def _plain(text: str) -> str:
    escaped = escape(text, quote=False)
    return "".join(f"\\{c}" if c in "\\`*_{}[]()#+!|~" else c for c in escaped)
