"""The settings of a service, from the options of `roll-sandbox serve`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from roll_sandbox.service.quotas import Quota
from roll_sandbox.types import SandboxSpec
from roll_sandbox.wire import MAX_MESSAGE_BYTES

__all__ = ["Settings", "get_default_database"]


def get_default_database() -> str:
    """Return the URL of the default database, a SQLite file of this user."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return f"sqlite:///{base}/roll/sandboxes.db"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one service."""

    database: str = field(default_factory=get_default_database)
    runtime: str | None = "bubblewrap"
    """Runtime of the worker in the server's process. If `None`, sandboxes run only on workers that join."""
    spec: SandboxSpec = field(default_factory=SandboxSpec)
    """The spec of sandboxes that are started in advance."""
    warm: int | None = None
    max_sandboxes: int = 2048
    mounts: tuple[str, ...] = ()
    """Directories of this machine that specs may mount."""
    lifetime_s: float = 3600.0
    """Default lifetime of sandboxes."""
    quota: Quota = field(default_factory=Quota)
    audit: Path | None = None
    max_message_bytes: int = MAX_MESSAGE_BYTES
    away_s: float = 60.0
    """Seconds that a worker may be disconnected before its sandboxes are lost."""
    max_connections: int = 64
    """Maximum number of open connections of one owner."""
