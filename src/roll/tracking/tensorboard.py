"""TensorBoard event files, through TensorBoard's own records; neither TensorFlow nor torch is imported.

Each process that works on a run writes a file of its own; a resumed run first cuts the events after its checkpoint
out of the earlier ones.
"""

from __future__ import annotations

import io
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.tracking import atomic

__all__ = ["TensorBoardSink", "truncate_events"]


class TensorBoardSink:
    """Writes scalars below `directory`.

    Args:
        first_step: of this process; a running TensorBoard forgets what it has seen from there on.
    """

    def __init__(self, directory: Path, *, first_step: int = 0) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((directory / name).open("ab"))
        self._protos = _protos()
        self._write(file_version="brain.Event:2")
        if first_step > 0:
            log = self._protos.SessionLog
            self._write(step=first_step, session_log=log(status=log.START))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with every finite value."""
        from tensorboard.compat.proto import summary_pb2

        summary = vars(summary_pb2)["Summary"]
        values = [summary.Value(tag=name, simple_value=v) for name, v in metrics.items() if math.isfinite(v)]
        self._write(step=step, summary=summary(value=values))

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        event = self._protos.Event(wall_time=time.time(), **fields)
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def _protos() -> Any:
    """The module of event messages; its classes are made at run time, which type checkers cannot see."""
    from tensorboard.compat.proto import event_pb2

    return event_pb2


def truncate_events(directory: Path, step: int) -> int:
    """Drop events after `step`, and torn records, from every event file; returns how many events went."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.summary.writer.record_writer import RecordWriter

    read_event = _protos().Event.FromString
    dropped = 0
    for path in sorted(directory.glob("events.out.tfevents.*")):
        kept = io.BytesIO()
        writer = RecordWriter(kept)
        for data in RawEventFileLoader(str(path)).Load():
            event = read_event(data)
            if event.HasField("summary") and event.step > step:
                dropped += 1
            else:
                writer.write(data)
        if kept.tell() < path.stat().st_size:
            atomic.write_bytes(path, kept.getvalue())
    return dropped
