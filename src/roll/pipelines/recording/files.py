"""Recordings on disk: written step by step, truncated when a run is resumed, checked when they are read.

    tables, facts ──► .step-000007.….tmp/ ──► fsync ──► rename to step-000007/ ──► a line in index.jsonl, fsync

Invariants:
    - a step is recorded if and only if the index has a line for it, and its directory is then complete. A crash leaves
      at most one incomplete last line, and directories without a line;
    - `truncate_recording` keeps exactly the steps up to a checkpoint, before the run resumes from it;
    - files are parsed only after verification: the index contains each file's size and a checksum of each block,
      because Parquet readers may crash on corrupted bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from roll.config.former_names import rename_config
from roll.errors import DataError, one_line_error
from roll.pipelines.recording.records import FORMAT, RecordedSession, RecordedStep
from roll.pipelines.recording.table_schemas import build_schemas
from roll.pipelines.recording.tables import StepMetadata, build_step, build_tables, extract_metadata
from roll.records import validate_record
from roll.tracking import atomic

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Recording", "RecordingWriter", "truncate_recording"]

INDEX_FILE, STEP_FILE = "index.jsonl", "step.json"
_MIN_BLOCK, _MAX_BLOCKS = 4096, 256
_FLOAT_COLUMN = "logprobs.list.element"
_DICTIONARY_COLUMNS = [
    "purpose",
    "domain",
    "finish_reason",
    "status",
    "engine_id",
    "before",
    "after",
    "detail",
    "verdict",
]


def truncate_recording(directory: Path, step: int) -> None:
    """Remove the steps after `step`, and incomplete files that a crash left behind; -1 removes everything.

    Raises:
        DataError: The index is corrupted, so the recorded steps are unknown.
    """
    if not directory.is_dir():
        return
    if step < 0:
        shutil.rmtree(directory)
        return
    atomic.remove_leftovers(directory)
    kept = [line for line in _read_lines(directory / INDEX_FILE) if line.record.step <= step]
    content = b"".join(line.text for line in kept)
    if not (directory / INDEX_FILE).exists() or (directory / INDEX_FILE).stat().st_size != len(content):
        atomic.write_bytes(directory / INDEX_FILE, content)
    named = {_format_name(line.record.step) for line in kept if isinstance(line.record, _StepEntry)}
    for path in directory.glob("step-*"):
        if path.name not in named:
            shutil.rmtree(path)


class RecordingWriter:
    """Appends sessions and steps to the recording in `directory`.

    The recording must already be truncated to the step from which the run resumes.

    Raises:
        DataError: The index is corrupted.
        OSError: The recording cannot be written; methods raise this error as well.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        records = (line.record for line in _read_lines(directory / INDEX_FILE))
        self.next_session = max((each.number for each in records if isinstance(each, RecordedSession)), default=0) + 1

    def begin(self, session: RecordedSession) -> None:
        """Add an entry to the index for a session that is about to start recording."""
        self._append({"kind": "session", "format": FORMAT, **asdict(session)})

    def write(self, step: RecordedStep) -> None:
        """Record a step durably; a recorded step with the same number is replaced."""
        contents = {f"{name}.parquet": _encode_parquet(table) for name, table in build_tables(step).items()}
        contents[STEP_FILE] = json.dumps(extract_metadata(step), allow_nan=False).encode()
        final = self._directory / _format_name(step.step)
        temporary = atomic.make_temporary_path(final)
        temporary.mkdir()
        try:
            for name, content in contents.items():
                (temporary / name).write_bytes(content)
            atomic.replace_directory(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        files = {name: [len(content), _compute_digests(content)] for name, content in contents.items()}
        self._append({"kind": "step", "step": step.step, "files": files})

    def _append(self, line: dict[str, Any]) -> None:
        atomic.append(self._directory / INDEX_FILE, _encode(line))


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded run, opened for reading by `Recording.open`."""

    directory: Path
    """`RUN/recording`."""
    sessions: tuple[RecordedSession, ...]
    """Sessions, in order."""
    files: Mapping[int, Mapping[str, tuple[int, list[str]]]]
    """Sizes and checksums of each step's files, by file name."""

    @classmethod
    def open(cls, run: Path) -> Recording:
        """Open the recording of a run directory.

        Raises:
            DataError: The recording does not exist or has no step, its index is corrupted, or intermediate steps are
                missing.
        """
        directory = run / "recording"
        index = directory / INDEX_FILE
        if not index.is_file():
            raise DataError(
                f"'{run}' has no recording ('{index}' does not exist): train with tracking.record_rollouts=true."
            )
        sessions: list[RecordedSession] = []
        files: dict[int, Mapping[str, tuple[int, list[str]]]] = {}
        for line in _read_lines(index):
            if isinstance(line.record, RecordedSession):
                sessions.append(replace(line.record, config=rename_config(dict(line.record.config))))
            else:
                files[line.record.step] = line.record.files
        if not sessions or not files:
            raise DataError(f"recording '{index}' has no step yet: the run has not completed its first step.")
        steps = sorted(files)
        for before, after in pairwise(steps):
            if after != before + 1:
                raise DataError(
                    f"recording '{directory}' does not contain steps {before + 1} to {after - 1}: the run was resumed "
                    "without tracking.record_rollouts, so it cannot be replayed: record a new run."
                )
        if all(session.step >= steps[0] for session in sessions):
            raise DataError(f"recording '{index}' has no session that began before its first step, {steps[0]}.")
        return cls(directory, tuple(sessions), files)

    @property
    def first_step(self) -> int:
        """Number of the first recorded step."""
        return min(self.files)

    @property
    def last_step(self) -> int:
        """Number of the last recorded step."""
        return max(self.files)

    @property
    def first_session(self) -> RecordedSession:
        """The session that recorded the first step."""
        return max((s for s in self.sessions if s.step < self.first_step), key=lambda s: s.number)

    def list_used_sessions(self) -> list[RecordedSession]:
        """Return the sessions that recorded at least one step, in order."""
        after = [*(session.step for session in self.sessions[1:]), self.last_step]
        return [session for session, end in zip(self.sessions, after, strict=True) if end > session.step]

    def read(self, step: int) -> RecordedStep:
        """Read a step.

        Raises:
            DataError: The step is not recorded, or one of its files is missing, truncated, or corrupted.
        """
        if step not in self.files:
            raise DataError(
                f"recording '{self.directory}' has only steps {self.first_step} to {self.last_step}, got step {step}: "
                f"set training.num_steps to at most {self.last_step}."
            )
        place = self.directory / _format_name(step)
        facts, what = self._read_content(step, STEP_FILE), f"recording '{place / STEP_FILE}'"
        contents = {name: self._read_content(step, f"{name}.parquet") for name in build_schemas()}
        try:
            plain = json.loads(facts)
            _require_format(plain.get("format") if isinstance(plain, dict) else None, place / STEP_FILE)
            found = validate_record(StepMetadata, plain, what)
            if found.step != step:
                raise DataError(f"{what} belongs to step {found.step}: copy it again.")
            return build_step(found, {name: _decode_table(content) for name, content in contents.items()})
        except DataError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(f"recording '{place}' is corrupted ({one_line_error(error)}): copy it again.") from error

    def check(self, steps: range) -> None:
        """Check that the files of the steps exist and have the recorded sizes.

        Raises:
            DataError: A file is missing, or its size differs from the recorded size.
        """
        for step in steps:
            for name in self.files.get(step, {}):
                self._check_size(step, name)

    def _check_size(self, step: int, name: str) -> Path:
        path = self.directory / _format_name(step) / name
        size, _ = self.files[step][name]
        if not path.is_file():
            raise DataError(f"recording '{path}' is missing: copy the whole run directory, including 'recording'.")
        found = path.stat().st_size
        if found != size:
            how = f"ends at byte {found:,}" if found < size else f"has {found:,} bytes"
            raise DataError(f"recording '{path}' {how}, but {size:,} bytes were written: copy the file again.")
        return path

    def _read_content(self, step: int, name: str) -> bytes:
        if name not in self.files[step]:
            raise DataError(f"recording '{self.directory / INDEX_FILE}': step {step} has no '{name}'.")
        path = self._check_size(step, name)
        content = path.read_bytes()
        for number, (found, written) in enumerate(zip_longest(_compute_digests(content), self.files[step][name][1])):
            if found != written:
                block = _compute_block_size(len(content))
                end = min((number + 1) * block, len(content))
                raise DataError(
                    f"recording '{path}' is corrupted between bytes {number * block:,} and {end:,}: they differ from "
                    "the bytes that were written. Copy the file again."
                )
        return content


def _format_name(step: int) -> str:
    return f"step-{step:06d}"


def _require_format(recorded_format: Any, path: Path) -> None:
    if recorded_format != FORMAT:
        raise DataError(
            f"recording '{path}' has format {recorded_format!r}, but this version of ROLL supports format {FORMAT}."
        )


def _encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class _StepEntry:
    """The entry of a step in the index."""

    step: int
    files: Mapping[str, tuple[int, list[str]]]
    """Sizes and checksums by file name."""


class _IndexLine(NamedTuple):
    """A complete line of an index."""

    text: bytes
    record: RecordedSession | _StepEntry


def _read_lines(path: Path) -> Iterator[_IndexLine]:
    """Yield the lines of an index; skip an incomplete last line, which a crash may have left.

    Raises:
        DataError: A line other than the last is malformed, or the recording's format version is not supported.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    offset = 0
    for number, text in enumerate(lines, 1):
        if number == len(lines) and not text.endswith(b"\n"):
            return
        what = f"recording '{path}', line {number} (byte {offset:,})"
        offset += len(text)
        line = None
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
        match line:
            case {"kind": "session", **fields}:
                _require_format(fields.get("format"), path)
                yield _IndexLine(text, validate_record(RecordedSession, fields, what))
            case {"kind": "step", **fields}:
                yield _IndexLine(text, validate_record(_StepEntry, fields, what))
            case _:
                raise DataError(f"{what} is malformed. Copy the file again.")


def _compute_block_size(size: int) -> int:
    """Return the block size for the checksums of a file of `size` bytes: a power of two that limits their number."""
    block = _MIN_BLOCK
    while block * _MAX_BLOCKS < size:
        block *= 2
    return block


def _compute_digests(content: bytes) -> list[str]:
    """Return the xxh3 checksum (64 bits, hexadecimal) of each block of `content`."""
    block, view = _compute_block_size(len(content)), memoryview(content)
    return [xxhash.xxh3_64_hexdigest(view[start : start + block]) for start in range(0, len(content), block)]


# ---- Parquet


def _encode_parquet(table: pa.Table) -> bytes:
    """Encode a table as Parquet with zstd and a checksum in every page."""
    import pyarrow.parquet as pq

    names = set(table.column_names)
    floats = {_FLOAT_COLUMN: "BYTE_STREAM_SPLIT"} if "logprobs" in names else None
    lists = [f"{name}.list.element" for name in ("token_ids", "prompt_token_ids", "policy_versions") if name in names]
    buffer = io.BytesIO()
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        use_dictionary=[*(name for name in _DICTIONARY_COLUMNS if name in names), *lists],
        column_encoding=floats,
        write_page_checksum=True,
    )
    return buffer.getvalue()


def _decode_table(content: bytes) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pq.read_table(pa.BufferReader(content))
