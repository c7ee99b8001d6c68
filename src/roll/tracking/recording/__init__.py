"""What a run leaves behind so that it can be replayed: its batches and its schedule, step by step.

    recording/  index.jsonl    a line for each session of the run and for each step, with sizes and checksums
                step-000001/   step.json          what became of draws, timings, policy versions
                               groups.parquet     a row for each group: its draw and its prompt's tokens
                               rollouts.parquet   a row for each attempt: everything that training sees of it
                               moves.parquet      every change of state of every rollout, with its time
                               requests.parquet   every call of the model: queued, started, ended, tokens

docs/replay.md describes every column. Importing this imports no pyarrow.
"""

from roll.tracking.recording.files import Recording, RecordingWriter, truncate_recording
from roll.tracking.recording.recorded_work import RecordedWork
from roll.tracking.recording.records import FORMAT, Move, RecordedDraw, RecordedStep, Request, Session

__all__ = [
    "FORMAT",
    "Move",
    "RecordedDraw",
    "RecordedStep",
    "RecordedWork",
    "Recording",
    "RecordingWriter",
    "Request",
    "Session",
    "truncate_recording",
]
