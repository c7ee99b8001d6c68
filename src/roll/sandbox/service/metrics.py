"""What Prometheus reads."""

from __future__ import annotations

from roll.sandbox.service.switchboard import Switchboard

__all__ = ["exposition"]

_TOTALS = {
    "sandboxes": "Sandboxes that started.",
    "programs": "Programs that were asked for.",
    "ended": "Programs that ended, whatever their outcome.",
    "failed": "Programs that failed for no reason of theirs.",
    "refused": "Requests that were refused.",
    "orphans": "Sandboxes that were stopped because nobody claimed them.",
    "sandboxes_lost": "Sandboxes that were lost.",
    "sandboxes_expired": "Sandboxes whose lifetime ended.",
}


def exposition(board: Switchboard) -> str:
    """In Prometheus' text format."""
    lines = []
    for name, meaning in _TOTALS.items():
        metric = f"roll_sandbox_{name}_total"
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} counter", f"{metric} {board.counts[name]}"]
    gauges = {
        "roll_sandbox_alive": ("Sandboxes that have not ended.", len(board.entries)),
        "roll_sandbox_running_programs": ("Programs that run.", sum(e.running for e in board.entries.values())),
        "roll_sandbox_workers": ("Workers that are connected.", sum(w.here for w in board.workers.values())),
        "roll_sandbox_database_up": ("Whether the database is written to.", int(not board.records.away)),
        "roll_sandbox_database_waiting": ("Records that wait for the database.", board.records.waiting),
        "roll_sandbox_audit_up": ("Whether the audit file is written to.", int(not board.audit.failing)),
        "roll_sandbox_audit_dropped": ("Lines of the audit that were given up.", board.audit.dropped),
    }
    for metric, (meaning, value) in gauges.items():
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} gauge", f"{metric} {value}"]
    for worker in board.workers.values():
        lines.append(f'roll_sandbox_worker_held{{worker="{worker.name}"}} {worker.held}')
    return "\n".join(lines) + "\n"
