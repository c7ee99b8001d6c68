"""What depends on the machine: metrics of two equal runs that may differ, and CPU time as counted loops."""

from __future__ import annotations

__all__ = ["LOOPS", "is_timing"]

LOOPS = """
def loops(seconds):
    import time
    began = time.process_time()
    for _ in range(1_000_000): pass
    return seconds / (time.process_time() - began)
"""
"""Source of `loops`: CPU time of a Python process as so many counts to a million (20 ms on a fast core). A slow
or shared core makes both longer."""


def is_timing(name: str) -> bool:
    """Whether a metric depends on the machine's speed or memory, so that two equal runs may differ in it."""
    return name.startswith(("time/", "memory/")) or name.endswith(("_s", "_per_s", "_rss_bytes")) or "/time/" in name
