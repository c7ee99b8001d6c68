"""Write TensorBoard event files without importing TensorFlow or torch.

Each process of a run writes its own file. A resumed run first removes the events after its checkpoint from earlier
files.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.tracking import atomic
from roll.tracking.sinks.base import PathWatcher, RolloutTable, SinkArguments

__all__ = ["TensorBoardSink", "truncate_events"]


class TensorBoardSink:
    """Writes scalars (as float32) and text to the run's `tensorboard/`."""

    def __init__(self, arguments: SinkArguments) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        from roll.config.document import dump

        first_step = arguments.resumed_at + 1
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        path = arguments.run.tensorboard_dir / name
        self._writer = RecordWriter(path.open("ab"))
        self._kept = PathWatcher(path)
        self._protos = _load_protos()
        self._write(file_version="brain.Event:2")
        if first_step > 0:  # tells a running TensorBoard to drop the events from that step on
            log = self._protos.SessionLog
            self._write(step=first_step, session_log=log(status=log.START))
        self._add_text(max(0, arguments.resumed_at), "configuration", _indent(dump(arguments.settings)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all values."""
        from tensorboard.compat.proto import summary_pb2

        summary = vars(summary_pb2)["Summary"]
        values = [summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=summary(value=values))

    def log_table(self, step: int, table: RolloutTable) -> None:
        """Write the table as text, since TensorBoard has no tables with text."""
        cells = [zip(table.columns, row, strict=True) for row in table.rows]
        rows = ["\n".join(f"{name}: {cell}" for name, cell in row) for row in cells]
        self._add_text(step, table.name, _indent("\n\n".join(rows)))

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _add_text(self, step: int, tag: str, markdown: str) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

        summaries, tensors = vars(summary_pb2), vars(tensor_pb2)
        tensor = tensors["TensorProto"](
            dtype=vars(types_pb2)["DT_STRING"],
            tensor_shape=vars(tensor_shape_pb2)["TensorShapeProto"](),
            string_val=[markdown.encode()],
        )
        plugin = summaries["SummaryMetadata"].PluginData(plugin_name="text")
        value = summaries["Summary"].Value(
            tag=tag, tensor=tensor, metadata=summaries["SummaryMetadata"](plugin_data=plugin)
        )
        self._write(step=step, summary=summaries["Summary"](value=[value]))

    def _write(self, **fields: Any) -> None:
        self._kept.check()
        event = self._protos.Event(wall_time=time.time(), **fields)
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def _indent(text: str) -> str:
    """Format text as a code block, in which Markdown and HTML have no effect."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _load_protos() -> Any:
    """Return the module of event messages as `Any`, since its classes are created at run time."""
    from tensorboard.compat.proto import event_pb2

    return event_pb2


def truncate_events(directory: Path, step: int) -> int:
    """Drop events after `step` and incomplete records from every event file, and return the number of dropped
    events.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.summary.writer.record_writer import RecordWriter

    read_event = _load_protos().Event.FromString
    dropped = 0
    for path in sorted(directory.glob("events.out.tfevents.*")):
        kept = io.BytesIO()
        writer = RecordWriter(kept)
        for data in RawEventFileLoader(str(path)).Load():
            event = read_event(data)
            # Events without a summary, such as the file's version, belong to no step.
            if event.HasField("summary") and event.step > step:
                dropped += 1
            else:
                writer.write(data)
        if kept.tell() < path.stat().st_size:
            atomic.write_bytes(path, kept.getvalue())
    return dropped
