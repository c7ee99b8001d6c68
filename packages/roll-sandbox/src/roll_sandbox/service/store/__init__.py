"""A service's database: tokens, quotas of owners, sandboxes, programs."""

from __future__ import annotations

from roll_sandbox.service.store.store import Store

__all__ = ["Store"]
