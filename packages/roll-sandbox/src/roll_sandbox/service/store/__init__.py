"""What a service remembers: tokens, owners' quotas, sandboxes, programs."""

from __future__ import annotations

from roll_sandbox.service.store.store import Store

__all__ = ["Store"]
