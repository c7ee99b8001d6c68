"""SwanLab: https://docs.swanlab.cn. `SWANLAB_MODE=offline` stores all data in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from roll.tracking.sinks.base import PathWatcher, RolloutTable, SinkArguments, get_run_id, load_client

__all__ = ["SwanLabSink"]


class SwanLabSink:
    """Logs to one experiment of a SwanLab project; a resumed run continues the experiment."""

    def __init__(self, arguments: SinkArguments) -> None:
        self._client = load_client("swanlab")
        quiet = self._client.Settings(interactive=False, terminal={"proxy_type": "none"})  # never prompt for an API key
        self._run = self._client.init(
            project=arguments.project,
            name=arguments.run.name,
            log_dir=str(arguments.run.path / "swanlog"),
            id=get_run_id(arguments.run),
            resume="allow",
            config=dict(arguments.settings),
            settings=quiet,
        )
        self._kept = PathWatcher(Path(self._run.dir))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._kept.check()
        self._run.log(dict(metrics), step=step)

    def log_table(self, step: int, table: RolloutTable) -> None:
        self._kept.check()
        client_table = self._client.echarts.Table()
        client_table.add(list(table.columns), [list(row) for row in table.rows])
        self._run.log({table.name: client_table}, step=step)

    def close(self) -> None:
        self._run.finish()
