"""Weights & Biases: https://docs.wandb.ai. `WANDB_MODE=offline` stores all data in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from roll.errors import ConfigError
from roll.tracking.sinks.base import PathWatcher, RolloutTable, SinkArguments, get_run_id, load_client

__all__ = ["WandbSink"]


class WandbSink:
    """Logs to one run of a W&B project; a resumed run of ROLL continues the same W&B run.

    The step counter of W&B only increases, but a resumed run goes back to its checkpoint; so `step` is a separate
    metric, against which all others are plotted. If a step has two values, the later value is shown.
    """

    def __init__(self, arguments: SinkArguments) -> None:
        self._client = load_client("wandb")
        if self._client.setup().settings.mode == "online" and not self._client.login(prompt=False):
            raise ConfigError(  # otherwise W&B would prompt for a key in the middle of the display
                "tracking.wandb: there is no API key. Log in with `wandb login`, set WANDB_API_KEY, write only local "
                "files with WANDB_MODE=offline, or disable the tracker: `tracking.wandb=null`."
            )
        self._run = self._client.init(
            project=arguments.project,
            name=arguments.run.name,
            dir=str(arguments.run.path),
            id=get_run_id(arguments.run),
            resume="allow",
            config=dict(arguments.settings),
            settings=self._client.Settings(console="off"),  # ROLL's logs hold the output
        )
        self._kept = PathWatcher(Path(self._run.settings.sync_dir))
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._kept.check()
        self._run.log({**metrics, "step": step})

    def log_table(self, step: int, table: RolloutTable) -> None:
        self._kept.check()
        client_table = self._client.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._run.log({table.name: client_table, "step": step})

    def close(self) -> None:
        self._run.finish()
