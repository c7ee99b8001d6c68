"""The format of recordings: nothing is lost, nothing corrupted is read, a resumed run goes on where it stood."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from roll.errors import DataError
from roll.pipelines.recording import files
from roll.pipelines.recording.files import Recording, RecordingWriter, truncate_recording
from roll.pipelines.recording.recorded_work import RecordedWork
from roll.pipelines.recording.records import (
    RecordedDraw,
    RecordedRequest,
    RecordedSession,
    RecordedStep,
    RecordedTransition,
)
from roll.pipelines.recording.table_schemas import build_schemas
from roll.types import (
    Branch,
    Group,
    MediaSpan,
    Prompt,
    PromptDraw,
    RewardResult,
    Rollout,
    RolloutId,
    RolloutStatus,
    Turn,
)

TEXT = st.text(max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
IDS = st.builds(RolloutId, purpose=TEXT, draw_id=st.integers(0, 99), index=st.integers(0, 99))
TIMES = st.floats(min_value=0, max_value=1e6)
TOKENS = arrays(np.int32, st.integers(0, 6), elements=st.integers(0, 2**31 - 1))


SPANS = st.builds(
    MediaSpan,
    kind=st.sampled_from(["image", "audio", "video"]),
    digest=st.text("0123456789abcdef", min_size=1, max_size=8),
    start=st.integers(0, 9),
    end=st.integers(0, 9),
    grid=st.one_of(st.none(), st.tuples(*[st.integers(1, 9)] * 3)),
)
MEDIA = st.lists(SPANS, max_size=2).map(tuple)


@st.composite
def rollouts(draw: st.DrawFn, of: PromptDraw, index: int, purpose: str) -> Rollout:
    token_ids = draw(TOKENS)
    length = len(token_ids)
    scored = draw(st.booleans())
    reward = RewardResult(
        value=draw(FLOATS),
        components=draw(st.dictionaries(TEXT, FLOATS, max_size=3)),
        verdict=draw(TEXT),
        correct=draw(st.sampled_from([None, True, False])),
        decisions=draw(st.dictionaries(TEXT, st.booleans(), max_size=2)),
        duration_s=draw(TIMES),
    )
    turn = st.builds(Turn, start=st.integers(0, 9), end=st.integers(0, 9), reward=FLOATS, state=TEXT)
    return Rollout(
        draw_id=of.draw_id,
        index=index,
        prompt=of.prompt,
        prompt_token_ids=draw(st.one_of(st.just(of.token_ids), TOKENS)),
        token_ids=token_ids,
        logprobs=draw(arrays(np.float32, length, elements=st.floats(width=32))),
        policy_versions=draw(arrays(np.int32, length, elements=st.integers(-1, 9))),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        text=draw(TEXT),
        status=draw(st.sampled_from(list(RolloutStatus))),
        cause=draw(TEXT),
        reward=reward if scored else None,
        engine_id=draw(TEXT),
        turns=tuple(draw(st.lists(turn, max_size=2))),
        branches=tuple(
            draw(st.lists(st.builds(Branch, start=st.integers(0, 9), context=TOKENS, media=MEDIA), max_size=2))
        ),
        counts=draw(st.dictionaries(TEXT, st.integers(0, 9), max_size=2)),
        prompt_media=draw(MEDIA),
        media=draw(MEDIA),
        purpose=purpose,
        expert=purpose == "expert",
        experts=tuple(draw(st.lists(arrays(np.int8, (length, 2, 1), elements=st.integers(-1, 9)), max_size=1))),
    )


@st.composite
def groups(draw: st.DrawFn, draw_id: int, purpose: str = "train") -> Group:
    prompt = Prompt(uid=draw(TEXT), domain=draw(TEXT), messages=())
    of = PromptDraw(
        draw_id=draw_id, prompt=prompt, token_ids=draw(TOKENS), position=draw(st.integers(-1, 9)), media=draw(MEDIA)
    )
    return Group(
        draw=of, rollouts=tuple(draw(rollouts(of, index, purpose)) for index in range(draw(st.integers(0, 2))))
    )


@st.composite
def recorded_steps(draw: st.DrawFn, number: int = 1) -> RecordedStep:
    found = tuple(draw(groups(draw_id)) for draw_id in range(draw(st.integers(0, 3))))
    shown = tuple(draw(rollouts(group.draw, 7, "expert")) for group in found[:1])
    whys = st.dictionaries(st.integers(0, 9), TEXT, max_size=2)
    return RecordedStep(
        step=number,
        session=1,
        policy_version=draw(st.integers(0, 9)),
        next_policy_version=draw(st.integers(0, 9)),
        groups=found,
        companions={"greedy": tuple(draw(groups(group.draw.draw_id, "greedy")) for group in found)} if found else {},
        demonstrations=shown,
        left_out=draw(whys),
        expired=draw(whys),
        expired_lengths=tuple(draw(st.lists(st.integers(0, 99), max_size=3))),
        num_refills=draw(st.integers(0, 9)),
        kind=draw(st.sampled_from(["", "short", "long"])),
        staleness=tuple(draw(st.lists(st.integers(0, 3), max_size=3))),
        draws=tuple(draw(st.lists(st.builds(RecordedDraw, st.integers(0, 9), TEXT, st.integers(0, 9)), max_size=3))),
        stream=draw(st.dictionaries(TEXT, st.dictionaries(TEXT, st.one_of(FLOATS, TEXT), max_size=2), max_size=2)),
        num_draws=draw(st.integers(0, 9)),
        pending=tuple(draw(st.lists(st.tuples(st.integers(0, 9), TEXT, st.integers(0, 9)), max_size=2))),
        counters=draw(st.dictionaries(TEXT, st.integers(0, 9), max_size=2)),
        timings_s=draw(st.dictionaries(TEXT, TIMES, max_size=2)),
        transitions=tuple(draw(st.lists(st.builds(RecordedTransition, TIMES, IDS, TEXT, TEXT, TEXT), max_size=3))),
        requests=tuple(
            draw(
                st.lists(
                    st.builds(
                        RecordedRequest, TEXT, TEXT, TIMES, FLOATS, TIMES, st.integers(0, 9), st.integers(-1, 9), TEXT
                    ),
                    max_size=3,
                )
            )
        ),
    )


def session(number: int = 1, step: int = 0) -> RecordedSession:
    return RecordedSession(
        number=number,
        step=step,
        started=1.5,
        version="1",
        config={"name": "x"},
        model="m",
        tokenizer="t",
        stream={"a": {"num_drawn": 0}},
        num_draws=0,
        pending=((3, "a", 4),),
    )


def plain(value: object) -> object:
    """With arrays as their type and their bytes, so that `==` compares every bit."""
    match value:
        case np.ndarray():
            return value.dtype.name, value.tobytes()
        case tuple() | list():
            return [plain(entry) for entry in value]
        case dict():
            return {key: plain(entry) for key, entry in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step=recorded_steps())
def test_recording_a_step_is_read_as_it_was_written_to_the_last_bit(tmp_path: Path, step: RecordedStep) -> None:
    truncate_recording(tmp_path / "recording", -1)
    writer = RecordingWriter(tmp_path / "recording")
    writer.begin(session())
    writer.write(step)
    recording = Recording.open(tmp_path)
    assert recording.sessions == (session(),)
    assert plain(recording.read(1)) == plain(step)


def test_recording_a_rollout_has_no_field_that_is_not_recorded() -> None:
    columns = set(build_schemas()["rollouts"].names)
    kept = {"prompt": "groups", "reward": "columns of its own", "expert": "purpose"}
    kept["replayed"] = "nowhere: rollouts of agentic runs alone have it, and those are refused"
    kept["final_text"] = "nowhere: rewards read it, and what they said is recorded"
    assert {field.name for field in dataclasses.fields(Rollout)} - set(kept) <= columns
    renamed = {"value": "reward", "duration_s": "reward_duration_s"}
    assert {renamed.get(field.name, field.name) for field in dataclasses.fields(RewardResult)} <= columns
    turns = build_schemas()["rollouts"].field("turns").type.value_type
    assert {field.name for field in dataclasses.fields(Turn)} == {turns.field(i).name for i in range(4)}


def small(number: int) -> RecordedStep:
    prompt = Prompt(uid="a/0", domain="a", messages=())
    draw = PromptDraw(draw_id=number, prompt=prompt, token_ids=np.arange(3, dtype=np.int32), position=0)
    rollout = Rollout(
        draw_id=number,
        index=0,
        prompt=prompt,
        prompt_token_ids=draw.token_ids,
        token_ids=np.arange(5, dtype=np.int32),
        logprobs=np.zeros(5, np.float32),
        policy_versions=np.zeros(5, np.int32),
        finish_reason="stop",
        text="five",
        reward=RewardResult(value=1.0, duration_s=0.25),
    )
    return RecordedStep(
        step=number,
        session=1,
        policy_version=0,
        next_policy_version=1,
        groups=(Group(draw=draw, rollouts=(rollout,)),),
        timings_s={"generate": 2.0, "train": 0.5, "advantages": 0.125, "sync": 0.25, "step": 3.0},
    )


def recorded(directory: Path, num_steps: int) -> Path:
    writer = RecordingWriter(directory / "recording")
    writer.begin(session())
    for number in range(1, num_steps + 1):
        writer.write(small(number))
    return directory / "recording"


def test_recording_a_recording_is_cut_back_to_the_checkpoint_and_goes_on(tmp_path: Path) -> None:
    directory = recorded(tmp_path, 5)
    with (directory / "index.jsonl").open("ab") as index:
        index.write(b'{"kind":"step","step":6,"fi')  # killed in the middle
    (directory / "step-000006").mkdir()
    (directory / ".step-000007.aa.tmp").mkdir()
    truncate_recording(directory, 3)
    assert sorted(path.name for path in directory.iterdir()) == [
        "index.jsonl", "step-000001", "step-000002", "step-000003",
    ]  # fmt: skip
    writer = RecordingWriter(directory)
    assert writer.next_session == 2
    writer.begin(session(2, step=3))
    writer.write(small(4))
    recording = Recording.open(tmp_path)
    assert (recording.first_step, recording.last_step) == (1, 4)
    assert [s.number for s in recording.list_used_sessions()] == [1, 2]


def test_recording_a_session_that_recorded_nothing_is_not_used(tmp_path: Path) -> None:
    directory = recorded(tmp_path, 2)
    writer = RecordingWriter(directory)
    writer.begin(session(2, step=2))
    writer.begin(session(3, step=2))
    writer.write(small(3))
    assert [s.number for s in Recording.open(tmp_path).list_used_sessions()] == [1, 3]


def test_recording_a_torn_line_at_the_end_was_never_recorded(tmp_path: Path) -> None:
    directory = recorded(tmp_path, 2)
    index = directory / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-5])
    assert Recording.open(tmp_path).last_step == 1


@pytest.mark.parametrize("at", [10, 3000, -12, -2])
def test_recording_a_corrupted_byte_is_named_with_its_file_and_place(tmp_path: Path, at: int) -> None:
    path = recorded(tmp_path, 2) / "step-000002" / "rollouts.parquet"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    place = at % len(content) // 4096 * 4096
    recording = Recording.open(tmp_path)
    recording.read(1)
    with pytest.raises(DataError, match=rf"step-000002/rollouts\.parquet' is corrupted between bytes {place:,} and"):
        recording.read(2)


def test_recording_a_file_that_is_cut_off_or_missing_is_named_before_it_is_read(tmp_path: Path) -> None:
    directory = recorded(tmp_path, 3)
    path = directory / "step-000003" / "moves.parquet"
    path.write_bytes(path.read_bytes()[:100])
    recording = Recording.open(tmp_path)
    with pytest.raises(DataError, match=r"step-000003/moves\.parquet' ends at byte 100, but [\d,]+ bytes were"):
        recording.check(range(1, 4))
    path.unlink()
    with pytest.raises(DataError, match=r"step-000003/moves\.parquet' is missing"):
        recording.read(3)


def test_recording_a_malformed_line_is_named_with_its_place(tmp_path: Path) -> None:
    index = recorded(tmp_path, 2) / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(lines[0] + b"{nonsense}\n" + lines[2])
    with pytest.raises(DataError, match=rf"index\.jsonl', line 2 \(byte {len(lines[0]):,}\) is malformed"):
        Recording.open(tmp_path)
    fields = json.loads(lines[1])
    del fields["files"]
    index.write_bytes(lines[0] + json.dumps(fields).encode() + b"\n")
    with pytest.raises(DataError, match=r"line 2 .*, files: Field required"):
        Recording.open(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"kind": "step", "step": "3", "files": 3}',
        '{"kind": "session", "format": 1}',
        '{"kind": "step"}',
    ],
)
def test_recording_a_hostile_line_stops_reading_and_cutting_back_with_its_place(tmp_path: Path, line: str) -> None:
    """Cut back in spite of it, the recording would lose steps that the line may have named."""
    index = recorded(tmp_path, 2) / "index.jsonl"
    before = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(before[0] + line.encode() + b"\n" + b"".join(before[1:]))
    for use in (lambda: Recording.open(tmp_path), lambda: truncate_recording(index.parent, 2)):
        with pytest.raises(DataError, match=rf"index\.jsonl', line 2 \(byte {len(before[0]):,}\)"):
            use()
    assert (index.parent / "step-000002").is_dir()


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("step.json", lambda facts: {**facts, "counters": ["x"]}, r"step\.json', counters: Input should be a valid"),
        ("step.json", lambda facts: {**facts, "step": 7}, r"step\.json' belongs to step 7"),
        ("rollouts", lambda table: table.drop(["status"]), r"is missing the columns \['status'\]"),
        (
            "rollouts",
            lambda table: table.set_column(5, "logprobs", pa.array([["x"]])),
            "column logprobs .* must be of type",
        ),
        ("rollouts", lambda table: table.set_column(1, "draw_id", pa.array([99])), "KeyError: 99"),
        (
            "rollouts",
            lambda table: table.set_column(4, "token_ids", pa.array([[1]], pa.list_(pa.int32()))),
            "of different lengths",
        ),
        (
            "rollouts",
            lambda table: table.set_column(8, "text", pa.array([None], pa.string())),
            "text .* has missing values",
        ),
    ],
)
def test_recording_a_step_that_roll_never_writes_is_refused(
    tmp_path: Path, name: str, change: Callable[[Any], Any], words: str
) -> None:
    """Its checksums are right: whoever changed it wrote them anew."""
    index = recorded(tmp_path, 1) / "index.jsonl"
    path = index.parent / "step-000001" / (name if name == "step.json" else f"{name}.parquet")
    if name == "step.json":
        path.write_text(json.dumps(change(json.loads(path.read_bytes()))))
    else:
        pq.write_table(change(pq.read_table(path)), path)
    first, last = map(json.loads, index.read_bytes().splitlines())
    last["files"][path.name] = [path.stat().st_size, files._compute_digests(path.read_bytes())]
    index.write_text("".join(f"{json.dumps(line)}\n" for line in (first, last)))
    with pytest.raises(DataError, match=words):
        Recording.open(tmp_path).read(1)


def test_recording_another_format_a_gap_and_nothing_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no recording .* tracking\.record_rollouts=true"):
        Recording.open(tmp_path)
    directory = recorded(tmp_path, 1)
    RecordingWriter(directory).write(small(4))
    with pytest.raises(DataError, match="does not contain steps 2 to 3"):
        Recording.open(tmp_path)
    index = directory / "index.jsonl"
    index.write_bytes(index.read_bytes().replace(b'"format":1', b'"format":99'))
    with pytest.raises(DataError, match="has format 99, but this version of ROLL supports format 1"):
        Recording.open(tmp_path)


def test_recording_the_work_of_answers_is_found_by_their_names() -> None:
    requests = (
        RecordedRequest("train-2.0", "e", 1.0, 1.5, 3.0, 3, 5, "stop"),
        RecordedRequest("train-2.0.t1", "e", 3.75, 4.0, 5.0, 9, 2, "length"),
        RecordedRequest("train-9.0", "e", 0.0, 0.0, 5.0, 3, -1, "cancelled"),
    )
    work = RecordedWork.from_steps([dataclasses.replace(small(2), requests=requests)])
    assert work.tokens == {"train-2.0": 5, "train-2.0.t1": 2}
    assert work.stopped == {"train-2.0": True, "train-2.0.t1": False}
    assert work.environment_s == {"train-2.0.t1": 0.75}
    assert work.prompt_tokens == {2: 3}
    assert (work.train_s, work.sync_s, work.wait_s) == ({2: 0.625}, {2: 0.25}, {2: 2.0})
