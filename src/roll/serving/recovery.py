"""Continues the work of an earlier server from its journal.

    journal ─► requests in their order ─┬─► with an outcome: it stays; run again only if it changes a model
                                        └─► without: run, as if the client sent it now
    models  ─► last stored state ─► later requests of the journal

Models compute the same numbers again, so each request that was accepted is applied once, and no outcome that a client
has seen is lost. What failed because of the server is not computed again: it stays as it was for the client.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from roll.errors import ConfigError
from roll.serving.failures import ApiError, RequestFailure
from roll.serving.journal import FINISH, Record
from roll.serving.promises import Promise
from roll.serving.routes import answer
from roll.serving.service import Service
from roll.serving.settings import ServeSettings
from roll.serving.submissions import Submission
from roll.tracking import atomic

__all__ = ["check_options", "restore"]

logger = logging.getLogger(__name__)

_OPTIONS = "options.json"
_ADVICE = (
    "start the server with the options of the earlier one, choose another --dir, or delete '{}/journal' to end all "
    "sessions. Checkpoints with a name stay."
)


def check_options(settings: ServeSettings, records: Sequence[Record]) -> None:
    """Check that a server with models to restore has the options with which they were trained, and store the options.

    Models are computed again from the journal, so they would otherwise change without an error.

    Raises:
        ConfigError: An option is another one.
    """
    file = settings.directory / _OPTIONS
    options = {"name": settings.model_name, "alpha": settings.alpha, "dtype": settings.dtype}
    ended = {record.request_id for record in records if record.path == FINISH}
    if any(record.path == "create_session" and record.request_id not in ended for record in records):
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            known = options
        for key, value in options.items():
            if known[key] != value:
                raise ConfigError(
                    f"--{key} is {value}, but the models in '{settings.directory}' were trained with {known[key]}: "
                    f"{_ADVICE.format(settings.directory)}"
                )
    atomic.write_json(file, options)


async def restore(service: Service, records: Sequence[Record]) -> None:
    """Restore sessions, models and requests. `service.start` runs the requests.

    Raises:
        ConfigError: The settings do not allow a model of an earlier server.
    """
    outcomes = {record.request_id: record.outcome for record in records if record.kind == "outcome"}
    ended = {record.request_id for record in records if record.path == FINISH}
    for record in records:
        if record.kind != "request" or record.request_id in ended:
            continue
        submission = Submission(
            path=record.path,
            body=record.content,
            request_id=record.request_id,
            is_restored=True,
            outcome=outcomes.get(record.request_id),
        )
        try:
            found = answer(service, record.owner, submission)
        except (ApiError, RequestFailure) as error:  # its session has ended, or it was rejected
            if isinstance(error, ApiError) and error.status == 400 and record.path == "create_model":
                problem = f"{error.field}: {error.message.rstrip('.')}"
                advice = _ADVICE.format(service.settings.directory)
                raise ConfigError(f"a model of an earlier server cannot be restored, {problem}: {advice}") from error
            logger.info("a request to '%s' is not restored: %s", record.path, error)
            continue
        if isinstance(found, Promise) and record.path in ("create_model", "load_weights"):
            await service.promises.join(found)  # later requests need the model
