"""MLflow: https://mlflow.org/docs. `MLFLOW_TRACKING_URI` sets the destination: a server, or `sqlite:///mlflow.db`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from roll.tracking.sinks.base import RolloutTable, SinkArguments, flatten, get_run_id, load_client
from roll.version import __version__

__all__ = ["MlflowSink"]

_BATCH_SIZE = 100
"""Maximum number of parameters that MLflow accepts in one call; for metrics, the maximum is 1,000."""
_MAX_PARAMETER_LENGTH = 6000


class MlflowSink:
    """Logs to one run of an MLflow experiment; the tag `roll.run` identifies the run.

    MLflow's parameters cannot change, so a resumed run keeps its initial parameters; the artifact `config.yaml` always
    has the latest configuration. If a step has two values, the later value is shown.
    """

    def __init__(self, arguments: SinkArguments) -> None:
        load_client("mlflow")
        from mlflow import MlflowClient, entities

        self._entities: Any = entities
        self._client: Any = MlflowClient()
        experiment = self._client.get_experiment_by_name(arguments.project)
        place = experiment.experiment_id if experiment else self._client.create_experiment(arguments.project)
        name = get_run_id(arguments.run)
        found = self._client.search_runs([place], f"tags.`roll.run` = '{name}'", max_results=1)
        if found:
            self._id: str = found[0].info.run_id
            self._client.set_terminated(self._id, "RUNNING")
        else:
            tags = {"roll.run": name, "roll.version": __version__}
            self._id = self._client.create_run(place, run_name=arguments.run.name, tags=tags).info.run_id
            self._log_parameters(flatten(arguments.settings))
        self._client.log_dict(self._id, dict(arguments.settings), "config.yaml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        values = [self._entities.Metric(_sanitize_name(name), value, now_ms, step) for name, value in metrics.items()]
        for start in range(0, len(values), 10 * _BATCH_SIZE):
            self._client.log_batch(self._id, metrics=values[start : start + 10 * _BATCH_SIZE])

    def log_table(self, step: int, table: RolloutTable) -> None:
        """Write the table as an artifact in MLflow's table format."""
        content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        self._client.log_dict(self._id, content, f"{table.name}/step-{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _log_parameters(self, leaves: Mapping[str, Any]) -> None:
        parameters = [
            self._entities.Param(_sanitize_name(key), str(value)[:_MAX_PARAMETER_LENGTH])
            for key, value in leaves.items()
        ]
        for start in range(0, len(parameters), _BATCH_SIZE):
            self._client.log_batch(self._id, params=parameters[start : start + _BATCH_SIZE])


def _sanitize_name(name: str) -> str:
    """Return a name that MLflow accepts: only letters, digits and `_-./: `."""
    return re.sub(r"[^\w\-./: ]", "_", name)
