"""Weights & Biases: https://docs.wandb.ai. `WANDB_MODE=offline` keeps everything below the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from roll.errors import ConfigError
from roll.tracking.sinks.base import Opening, PathWatch, RolloutTable, load_client, run_id

__all__ = ["WandbSink"]


class WandbSink:
    """One run of a project; a resumed run continues it.

    The step counter of W&B only increases, but a resumed run goes back to its checkpoint; so `step` is a separate
    metric, against which all others are plotted. Of two values for a step, the later one counts.
    """

    def __init__(self, opening: Opening) -> None:
        self._client = load_client("wandb")
        if self._client.setup().settings.mode == "online" and not self._client.login(prompt=False):
            raise ConfigError(  # otherwise W&B would prompt for a key, over the display
                "tracking.wandb: there is no key. Log in with `wandb login`, set WANDB_API_KEY, keep everything here "
                "with WANDB_MODE=offline, or go without: `tracking.wandb=null`."
            )
        self._run = self._client.init(
            project=opening.project,
            name=opening.run.name,
            dir=str(opening.run.path),
            id=run_id(opening.run),
            resume="allow",
            config=dict(opening.settings),
            settings=self._client.Settings(console="off"),  # ROLL's logs hold the output
        )
        self._kept = PathWatch(Path(self._run.settings.sync_dir))
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._kept.check()
        self._run.log({**metrics, "step": step})

    def table(self, step: int, table: RolloutTable) -> None:
        self._kept.check()
        shown = self._client.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._run.log({table.name: shown, "step": step})

    def close(self) -> None:
        self._run.finish()
