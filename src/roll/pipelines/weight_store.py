"""The file store of a run whose weight syncs use the transport `store`."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from roll.config.rollout_run import RolloutRunConfig
from roll.errors import ConfigError
from roll.tracking import atomic
from roll.types import WeightStore

__all__ = ["check_weight_store", "open_weight_store"]

logger = logging.getLogger(__name__)

SESSION_FILE = "weight_store.json"
"""File in the run directory with the directory in the store to which this run writes."""


def check_weight_store(config: RolloutRunConfig) -> None:
    """Check that the run's weight store can be used; do nothing for other transports.

    Raises:
        ConfigError: The store cannot be opened or written, or a package is missing.
    """
    if config.weight_sync.store is not None:
        from roll.weights.store.files import check_store

        check_store(config.weight_sync.store)
    local = config.weight_sync.local_copy_dir
    if local is not None and not Path(local).is_dir():
        raise ConfigError(
            f"weight_sync.local_copy_dir '{local}' is not a directory: create it on the hosts of all engines, or "
            "remove the key."
        )


def open_weight_store(config: RolloutRunConfig, run_dir: Path) -> WeightStore | None:
    """Return the store for a new session of the run; `None` for other transports.

    The directory of the session has a random name, so several runs can share a store. The name is recorded in the run
    directory: if this session is killed, the next session deletes the directory.

    Args:
        config: Configuration of the run.
        run_dir: Directory of the run.
    """
    settings, record = config.weight_sync, run_dir / SESSION_FILE
    if settings.store is None:
        return None
    url = settings.store if "://" in settings.store else str(Path(settings.store).absolute())
    # A copy of a run directory also copies this file, but must not delete the files of the original run.
    origin = {"url": url, "run_dir": str(run_dir.absolute())}
    previous = _read_session(record, origin)
    session = f"{config.name}-{secrets.token_hex(4)}"
    atomic.write_json(record, {**origin, "session": session})
    return WeightStore(
        url=url,
        session=session,
        previous_session=previous,
        full_copy_every=settings.full_copy_every_num_syncs,
        local_dir=settings.local_copy_dir,
    )


def _read_session(record: Path, origin: Mapping[str, str]) -> str:
    """Return the name of the previous session; empty if there was none, or if it belongs to another run or store."""
    try:
        previous = json.loads(record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s): weights of earlier sessions may remain in the store", record, error)
        return ""
    if not isinstance(previous, dict) or not previous.items() >= origin.items():
        return ""
    # The directory with this name is deleted, so it must be the name of a session, not a path such as `..`.
    session = previous.get("session")
    return session if isinstance(session, str) and re.fullmatch(r"[^/\\]+-[0-9a-f]{8}", session) else ""
