"""Formats the metrics of a service for Prometheus."""

from __future__ import annotations

from roll_sandbox.service.dispatcher import Dispatcher
from roll_sandbox.service.placement import compute_load

__all__ = ["format_metrics"]

_COUNTERS = {
    "sandboxes": "Sandboxes that started.",
    "programs": "Programs that were requested.",
    "ended": "Programs that ended, with any outcome.",
    "failed": "Programs that failed because of an infrastructure error.",
    "refused": "Requests that were refused.",
    "orphans": "Sandboxes that were stopped because no client was connected to them.",
    "sandboxes_lost": "Sandboxes that were lost.",
    "sandboxes_expired": "Sandboxes whose lifetime ended.",
}


def format_metrics(dispatcher: Dispatcher) -> str:
    """Format the metrics in Prometheus' text format."""
    lines = []
    for name, meaning in _COUNTERS.items():
        metric = f"roll_sandbox_{name}_total"
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} counter", f"{metric} {dispatcher.counts[name]}"]
    gauges = {
        "roll_sandbox_alive": ("Sandboxes that have not ended.", len(dispatcher.entries)),
        "roll_sandbox_running_programs": (
            "Programs that are running.",
            sum(e.num_running for e in dispatcher.entries.values()),
        ),
        "roll_sandbox_workers": (
            "Workers that are connected.",
            sum(w.is_connected for w in dispatcher.workers.values()),
        ),
        "roll_sandbox_database_up": (
            "Whether the database can be written.",
            int(not dispatcher.records.unavailable_reason),
        ),
        "roll_sandbox_database_waiting": (
            "Records that are not yet written to the database.",
            dispatcher.records.num_waiting,
        ),
        "roll_sandbox_audit_up": ("Whether the audit file can be written.", int(not dispatcher.audit.is_failing)),
        "roll_sandbox_audit_dropped": ("Lines of the audit log that were dropped.", dispatcher.audit.num_dropped),
    }
    for metric, (meaning, value) in gauges.items():
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} gauge", f"{metric} {value}"]
    lines += _format_worker_metrics(dispatcher)
    return "\n".join(lines) + "\n"


def _format_worker_metrics(dispatcher: Dispatcher) -> list[str]:
    """Return the lines of the metrics with one sample per worker, or per pool of a worker."""
    workers = list(dispatcher.workers.values())
    pools = [(worker, pool) for worker in workers for pool in worker.report.pools]
    of_worker = {
        "held": ("gauge", "Sandboxes of a worker.", [worker.num_sandboxes for worker in workers]),
        "draining": (
            "gauge",
            "Whether a worker gets no new sandboxes.",
            [int(worker.is_draining) for worker in workers],
        ),
        "load": (
            "gauge",
            "Utilization of the worker's most used resource, from 0 to 1.",
            [round(compute_load(w), 4) for w in workers],
        ),
    }
    of_pool = {
        "idle": ("gauge", "Idle sandboxes of a pool.", [pool.idle for _, pool in pools]),
        "target": ("gauge", "Target number of idle sandboxes of a pool.", [pool.target for _, pool in pools]),
        "hits_total": ("counter", "Requests that an idle sandbox served.", [p.hits for _, p in pools]),
        "misses_total": ("counter", "Requests for which a sandbox had to be started.", [p.misses for _, p in pools]),
    }
    labels = {
        "worker": [f'worker="{worker.name}"' for worker in workers],
        "pool": [f'worker="{worker.name}",pool="{_escape_label(pool.pool)}"' for worker, pool in pools],
    }
    lines = []
    for kind, metrics in (("worker", of_worker), ("pool", of_pool)):
        for name, (type_, meaning, values) in metrics.items():
            metric = f"roll_sandbox_{kind}_{name}"
            lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} {type_}"]
            lines += [f"{metric}{{{label}}} {value}" for label, value in zip(labels[kind], values, strict=True)]
    return lines


def _escape_label(label: str) -> str:
    """Escape the value of a label, which may contain an image name from a client."""
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
