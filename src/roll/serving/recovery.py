"""Continues the work of an earlier server from its journal.

    journal ─► requests in their order ─┬─► with an outcome: it stays; run again only if it changes a model
                                        └─► without: run, as if the client sent it now
    models  ─► last stored state ─► later requests of the journal

Models compute the same numbers again, so each request that was accepted is applied once, and no outcome that a client
has seen is lost. What failed because of the server is not computed again: it stays as it was for the client.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from roll.serving.failures import ApiError, RequestFailure
from roll.serving.journal import FINISH, Record
from roll.serving.promises import Promise
from roll.serving.routes import answer
from roll.serving.service import Service
from roll.serving.submissions import Submission

__all__ = ["restore"]

logger = logging.getLogger(__name__)


async def restore(service: Service, records: Sequence[Record]) -> None:
    """Restore sessions, models and requests. `service.start` runs the requests."""
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
        except (ApiError, RequestFailure) as error:  # its session has ended, or the settings of the server are others
            logger.info("a request to '%s' is not restored: %s", record.path, error)
            continue
        if isinstance(found, Promise) and record.path in ("create_model", "load_weights"):
            await service.promises.join(found)  # later requests need the model
