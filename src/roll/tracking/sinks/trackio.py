"""Trackio: https://huggingface.co/docs/trackio. Data goes to `TRACKIO_DIR` or to a Space (`TRACKIO_SPACE_ID`)."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from roll.tracking.sinks.base import PathWatcher, RolloutTable, SinkArguments, get_run_id, load_client

__all__ = ["TrackioSink"]


class TrackioSink:
    """Logs to one run of a Trackio project. Trackio identifies runs only by name, so part of the run's id is appended
    to the name.
    """

    def __init__(self, arguments: SinkArguments) -> None:
        self._client = load_client("trackio")
        self._run = self._client.init(
            project=arguments.project,
            name=f"{arguments.run.name}-{get_run_id(arguments.run)[:6]}",
            config=dict(arguments.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # GPU metrics would be logged at separate steps
            auto_log_cpu=False,
        )
        self._kept = PathWatcher(self._client.sqlite_storage.SQLiteStorage.get_project_db_path(arguments.project))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._kept.check()
        self._run.log(dict(metrics), step=step)

    def log_table(self, step: int, table: RolloutTable) -> None:
        """Write the table with markup escaped, since Trackio renders cells as Markdown."""
        self._kept.check()
        rows = [[_escape_markup(cell) if isinstance(cell, str) else cell for cell in row] for row in table.rows]
        client_table = self._client.Table(columns=list(table.columns), data=rows)
        self._run.log({table.name: client_table}, step=step)

    def close(self) -> None:
        self._run.finish()


def _escape_markup(text: str) -> str:
    escaped = escape(text, quote=False)
    return "".join(f"\\{c}" if c in "\\`*_{}[]()#+!|~" else c for c in escaped)
