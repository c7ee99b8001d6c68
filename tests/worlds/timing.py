"""Which metrics of two equal runs may differ."""

from __future__ import annotations

__all__ = ["is_timing"]


def is_timing(name: str) -> bool:
    """Whether a metric depends on the machine's speed or memory, so that two equal runs may differ in it."""
    return name.startswith(("time/", "memory/")) or name.endswith(("_s", "_per_s", "_rss_bytes")) or "/time/" in name
