"""The database of a service: tokens, quotas, sandboxes, programs and workers."""

from __future__ import annotations

from roll_sandbox.service.store.store import Store

__all__ = ["Store"]
