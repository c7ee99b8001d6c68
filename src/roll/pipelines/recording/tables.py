"""Lossless conversion of a recorded step to Arrow tables and plain data, and back; arrays keep every bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from roll.pipelines.recording.records import FORMAT, RecordedDraw, RecordedRequest, RecordedStep, RecordedTransition
from roll.pipelines.recording.table_schemas import build_schemas
from roll.tracking.rollout_table import replace_surrogates
from roll.types import (
    EXPERT,
    TRAIN,
    Branch,
    FinishReason,
    FloatArray,
    Group,
    IntArray,
    MediaSpan,
    Prompt,
    PromptDraw,
    RewardResult,
    Rollout,
    RolloutId,
    RolloutStatus,
    Turn,
)

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["StepMetadata", "build_step", "build_tables", "extract_metadata"]


class _GroupRow(NamedTuple):
    """A row of the table of groups. Older recordings lack the columns that have a default."""

    purpose: str
    draw_id: int
    uid: str
    domain: str
    position: int
    prompt_token_ids: IntArray
    media: Sequence[Mapping[str, Any]] = ()


class _RolloutRow(NamedTuple):
    """A row of the table of rollouts. Older recordings lack the columns that have a default."""

    purpose: str
    draw_id: int
    index: int
    prompt_token_ids: IntArray | None
    """`None` if they equal the prompt tokens of the group."""
    token_ids: IntArray
    logprobs: FloatArray
    policy_versions: IntArray
    finish_reason: FinishReason
    text: str
    status: str
    cause: str
    reward: float | None
    components: Sequence[tuple[str, float]] | None
    verdict: str | None
    correct: bool | None
    decisions: Sequence[tuple[str, bool]] | None
    reward_duration_s: float | None
    engine_id: str
    turns: Sequence[Mapping[str, Any]]
    timed_out: Sequence[str] | None = ()
    branches: Sequence[Mapping[str, Any]] = ()
    counts: Sequence[tuple[str, int]] = ()
    experts: Sequence[Mapping[str, Any]] | None = ()
    prompt_media: Sequence[Mapping[str, Any]] = ()
    media: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetadata:
    """The fields of a `RecordedStep` that are not stored in tables. Older recordings lack the fields with a default."""

    step: int
    session: int
    policy_version: int
    next_policy_version: int
    num_refills: int
    kind: str
    num_draws: int
    stream: Mapping[str, Any]
    counters: Mapping[str, int]
    timings_s: Mapping[str, float]
    left_out: tuple[tuple[int, str], ...]
    expired: tuple[tuple[int, str], ...]
    expired_lengths: tuple[int, ...]
    staleness: tuple[int, ...]
    draws: tuple[RecordedDraw, ...]
    pending: tuple[tuple[int, str, int], ...]
    census: Mapping[str, Any] = field(default_factory=dict)
    """The `selection_bias` of the step, under its name in files."""


_SCALAR_FIELDS = ("step", "session", "policy_version", "next_policy_version", "num_refills", "kind", "num_draws")
_MAPPING_FIELDS = ("stream", "counters", "timings_s")
_PAIR_FIELDS = ("left_out", "expired")
_LIST_FIELDS = ("expired_lengths", "staleness")


# ---- writing


def extract_metadata(step: RecordedStep) -> dict[str, Any]:
    """Return the fields of a step that are not stored in tables, as JSON data."""
    return {
        "format": FORMAT,
        **{name: getattr(step, name) for name in _SCALAR_FIELDS},
        **{name: dict(getattr(step, name)) for name in _MAPPING_FIELDS},
        "census": dict(step.selection_bias),
        **{name: [[draw_id, why] for draw_id, why in getattr(step, name).items()] for name in _PAIR_FIELDS},
        **{name: list(getattr(step, name)) for name in (*_LIST_FIELDS, "draws", "pending")},
    }


def build_tables(step: RecordedStep) -> dict[str, pa.Table]:
    """Return the tables of a step by name; they contain everything that is not in `extract_metadata(step)`."""
    import pyarrow as pa

    groups = [(TRAIN, group) for group in step.groups]
    groups += [(purpose, group) for purpose, found in step.companions.items() for group in found]
    rows: dict[str, Iterable[NamedTuple]] = {
        "groups": [
            _GroupRow(
                purpose, d.draw_id, d.prompt.uid, d.prompt.domain, d.position, d.token_ids, _encode_media(d.media)
            )
            for purpose, d in ((purpose, group.draw) for purpose, group in groups)
        ],
        "rollouts": [
            *(
                _build_rollout_row(purpose, rollout, group.draw)
                for purpose, group in groups
                for rollout in group.rollouts
            ),
            *(_build_rollout_row(EXPERT, rollout, None) for rollout in step.demonstrations),
        ],
        "moves": (cast(Any, move)._replace(rollout_id=str(move.rollout_id)) for move in step.transitions),
        "requests": step.requests,
    }
    return {
        name: pa.table(_build_columns(rows[name], schema), schema=schema) for name, schema in build_schemas().items()
    }


def _build_columns(rows: Iterable[NamedTuple], schema: pa.Schema) -> list[pa.Array]:
    import pyarrow as pa

    kept = list(rows)
    return [pa.array([getattr(row, field.name) for row in kept], type=field.type) for field in schema]


def _build_rollout_row(purpose: str, rollout: Rollout, draw: PromptDraw | None) -> _RolloutRow:
    same = draw is not None and np.array_equal(rollout.prompt_token_ids, draw.token_ids)
    reward = rollout.reward
    return _RolloutRow(
        purpose=purpose,
        draw_id=rollout.draw_id,
        index=rollout.index,
        # Usually those of its group; a loop of the user's own may have changed them.
        prompt_token_ids=None if same else rollout.prompt_token_ids,
        token_ids=rollout.token_ids,
        logprobs=rollout.logprobs,
        policy_versions=rollout.policy_versions,
        finish_reason=rollout.finish_reason,
        text=replace_surrogates(rollout.text),
        status=str(rollout.status),
        cause=replace_surrogates(rollout.cause),
        reward=None if reward is None else reward.value,
        components=None
        if reward is None
        else [(replace_surrogates(name), value) for name, value in reward.components.items()],
        verdict=None if reward is None else replace_surrogates(reward.verdict),
        correct=None if reward is None else reward.correct,
        decisions=None
        if reward is None
        else [(replace_surrogates(name), says) for name, says in reward.decisions.items()],
        timed_out=None if reward is None else [*map(replace_surrogates, reward.timed_out)],
        reward_duration_s=None if reward is None else reward.duration_s,
        engine_id=rollout.engine_id,
        turns=[
            {"start": t.start, "end": t.end, "reward": t.reward, "state": replace_surrogates(t.state)}
            for t in rollout.turns
        ],
        branches=[
            {"start": branch.start, "context": branch.context, "media": _encode_media(branch.media)}
            for branch in rollout.branches
        ],
        counts=[(replace_surrogates(name), count) for name, count in rollout.counts.items()],
        experts=[{"dtype": x.dtype.name, "shape": x.shape, "values": x.tobytes()} for x in rollout.experts],
        prompt_media=_encode_media(rollout.prompt_media),
        media=_encode_media(rollout.media),
    )


def _encode_media(media: Iterable[MediaSpan]) -> list[dict[str, Any]]:
    return [span.to_dict() for span in media]


def _decode_media(media: Iterable[Mapping[str, Any]] | None) -> tuple[MediaSpan, ...]:
    return tuple(map(MediaSpan.from_dict, media or ()))


# ---- reading


def build_step(metadata: StepMetadata, tables: dict[str, pa.Table]) -> RecordedStep:
    """Build a step from its metadata and tables, as the inverse of `extract_metadata` and `build_tables`.

    Raises:
        ValueError: A table has unexpected columns, or arrays that do not align. Data that `build_tables` did not write
            may raise other errors.
    """
    for name, schema in build_schemas().items():
        _check_columns(tables[name], name, schema)
    draws: dict[str, dict[int, PromptDraw]] = {}
    columns = tables["groups"].column_names
    for values in _iterate_rows(tables["groups"]):
        row = _GroupRow(**dict(zip(columns, values, strict=True)))
        prompt = Prompt(uid=row.uid, domain=row.domain, messages=())
        draws.setdefault(row.purpose, {})[row.draw_id] = PromptDraw(
            draw_id=row.draw_id,
            prompt=prompt,
            token_ids=row.prompt_token_ids,
            position=row.position,
            media=_decode_media(row.media),
        )
    attempts: dict[tuple[str, int], list[Rollout]] = {}
    shown: list[Rollout] = []
    names = tables["rollouts"].column_names
    for values in _iterate_rows(tables["rollouts"]):
        rollout = _build_rollout(_RolloutRow(**dict(zip(names, values, strict=True))), draws)
        place = shown if rollout.expert else attempts.setdefault((rollout.purpose, rollout.draw_id), [])
        place.append(rollout)
    groups = {
        purpose: tuple(Group(draw=d, rollouts=tuple(attempts.get((purpose, d.draw_id), ()))) for d in found.values())
        for purpose, found in draws.items()
    }
    plain: dict[str, Any] = {each.name: getattr(metadata, each.name) for each in fields(metadata)}
    plain |= {name: dict(plain[name]) for name in _PAIR_FIELDS}
    plain["selection_bias"] = plain.pop("census")
    return RecordedStep(
        **plain,
        groups=groups.pop(TRAIN, ()),
        companions=groups,
        demonstrations=tuple(shown),
        transitions=tuple(starmap(_build_transition, _iterate_rows(tables["moves"]))),
        requests=tuple(starmap(RecordedRequest, _iterate_rows(tables["requests"]))),
    )


def _check_columns(table: pa.Table, name: str, schema: pa.Schema) -> None:
    optional, nullable = {
        "groups": (_GroupRow._field_defaults, ()),
        "rollouts": (_RolloutRow._field_defaults, _NULLABLE_COLUMNS),
    }.get(name, ((), ()))
    unknown = {*table.column_names} - {*schema.names}
    lacking = {*schema.names} - {*table.column_names} - {*optional}
    if unknown or lacking:
        raise ValueError(
            f"table {name} is missing the columns {sorted(lacking)} and has unknown columns {sorted(unknown)}"
        )
    for column in table.schema:
        expected, found = schema.field(column.name).type, column.type
        alike = expected.id == found.id and getattr(expected, "value_type", None) == getattr(found, "value_type", None)
        if not alike and not _is_list_of_records(expected, found):
            raise ValueError(f"column {column.name} of table {name} must be of type {expected}, got {found}")
        if column.name not in nullable and table.column(column.name).null_count:
            raise ValueError(f"column {column.name} of table {name} has missing values")


_NULLABLE_COLUMNS = tuple(name for name, kind in _RolloutRow.__annotations__.items() if "None" in str(kind))


def _is_list_of_records(expected: pa.DataType, actual: pa.DataType) -> bool:
    """Return whether both types are lists of structs; structs of older recordings have fewer fields."""
    import pyarrow as pa

    return all(pa.types.is_list(each) and pa.types.is_struct(each.value_type) for each in (expected, actual))


def _build_transition(time_s: float, rollout: str, before: str, after: str, detail: str) -> RecordedTransition:
    """Build a transition from the columns of its row; `rollout` is the rollout id as text.

    Rollout IDs are stored as text only in files, so they are parsed only here.
    """
    purpose, _, place = rollout.rpartition("-")
    draw_id, _, index = place.partition(".")
    rollout_id = RolloutId(purpose=purpose, draw_id=int(draw_id), index=int(index))
    return RecordedTransition(time_s=time_s, rollout_id=rollout_id, before=before, after=after, detail=detail)


def _build_rollout(row: _RolloutRow, draws: Mapping[str, Mapping[int, PromptDraw]]) -> Rollout:
    if not len(row.token_ids) == len(row.logprobs) == len(row.policy_versions):
        raise ValueError(
            f"rollout {row.draw_id}.{row.index} has tokens, log-probs and policy versions of different lengths"
        )
    expert = row.purpose == EXPERT
    draw = draws[TRAIN if expert else row.purpose][row.draw_id]
    reward = None
    if row.reward is not None:
        reward = RewardResult(
            value=row.reward,
            components=dict(row.components or ()),
            verdict=row.verdict or "",
            correct=row.correct,
            decisions=dict(row.decisions or ()),
            timed_out=tuple(row.timed_out or ()),
            duration_s=row.reward_duration_s or 0.0,
        )
    return Rollout(
        draw_id=row.draw_id,
        index=row.index,
        purpose=row.purpose,
        prompt=draw.prompt,
        prompt_token_ids=draw.token_ids if row.prompt_token_ids is None else row.prompt_token_ids,
        token_ids=row.token_ids,
        logprobs=row.logprobs,
        policy_versions=row.policy_versions,
        finish_reason=row.finish_reason,
        text=row.text,
        status=RolloutStatus(row.status),
        cause=row.cause,
        reward=reward,
        engine_id=row.engine_id,
        turns=tuple(Turn(**turn) for turn in row.turns),
        branches=tuple(_build_branch(**branch) for branch in row.branches),
        prompt_media=_decode_media(row.prompt_media),
        media=_decode_media(row.media),
        counts=dict(row.counts),
        expert=expert,
        experts=tuple(starmap(_decode_experts, (array.values() for array in row.experts or ()))),
    )


def _build_branch(start: int, context: Sequence[int], media: Iterable[Mapping[str, Any]] | None = None) -> Branch:
    return Branch(start=start, context=np.array(context, dtype=np.int32), media=_decode_media(media))


def _decode_experts(dtype: str, shape: Sequence[int], values: bytes) -> IntArray:
    return np.frombuffer(values, dtype=dtype).reshape(shape)


def _iterate_rows(table: pa.Table) -> Iterator[Sequence[Any]]:
    """Return an iterator over the rows of a table as plain data, with lists of numbers as NumPy arrays."""
    return zip(*(_read_values(table.column(name).combine_chunks()) for name in table.column_names), strict=True)


def _read_values(column: pa.Array) -> Sequence[Any]:
    import pyarrow as pa

    if not (pa.types.is_list(column.type) and pa.types.is_primitive(column.type.value_type)):
        return cast(Sequence[Any], column.to_pylist())
    numbers, ends = column.values.to_numpy(), column.offsets.to_numpy()
    return [
        numbers[ends[i] : ends[i + 1]] if there else None
        for i, there in enumerate(column.is_valid().to_numpy(zero_copy_only=False))
    ]
