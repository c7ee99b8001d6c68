"""Lossless conversion of a recorded step to Arrow tables and plain data, and back; arrays keep every bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from roll.errors import UnsupportedError
from roll.pipelines.recording.records import FORMAT, Move, RecordedDraw, RecordedStep, Request
from roll.tracking.rollout_table import utf8
from roll.types import (
    EXPERT,
    TRAIN,
    Branch,
    FinishReason,
    FloatArray,
    Group,
    IntArray,
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

__all__ = ["Facts", "facts_of", "schemas", "step_of", "tables_of"]


class _GroupRow(NamedTuple):
    """A group, as the columns of its table have it."""

    purpose: str
    draw_id: int
    uid: str
    domain: str
    position: int
    prompt_token_ids: IntArray


class _RolloutRow(NamedTuple):
    """A rollout, as the columns of its table have it. Older recordings lack the columns that have a default."""

    purpose: str
    draw_id: int
    index: int
    prompt_token_ids: IntArray | None
    """`None` where they are those of the group."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What no table holds of a step, as JSON has it; see `RecordedStep`. Older recordings lack what has a default."""

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


_PLAIN = ("step", "session", "policy_version", "next_policy_version", "num_refills", "kind", "num_draws")
_MAPPINGS = ("stream", "counters", "timings_s")
_PAIRS = ("left_out", "expired")
_LISTS = ("expired_lengths", "staleness")


def schemas() -> dict[str, pa.Schema]:
    """Return the schema of each table. Lists in a rollout's row align with its `token_ids`."""
    import pyarrow as pa

    name, tokens = pa.dictionary(pa.int32(), pa.string()), pa.list_(pa.int32())
    branch = pa.struct([("start", pa.int32()), ("context", tokens)])
    turn = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("reward", pa.float64()), ("state", pa.string())])
    columns: dict[str, list[tuple[str, Any]]] = {
        "groups": [
            ("purpose", name),
            ("draw_id", pa.int64()),
            ("uid", pa.string()),
            ("domain", name),
            ("position", pa.int64()),
            ("prompt_token_ids", tokens),
        ],
        "rollouts": [
            ("purpose", name),
            ("draw_id", pa.int64()),
            ("index", pa.int32()),
            ("prompt_token_ids", tokens),
            ("token_ids", tokens),
            ("logprobs", pa.list_(pa.float32())),
            ("policy_versions", tokens),
            ("finish_reason", name),
            ("text", pa.string()),
            ("status", name),
            ("cause", pa.string()),
            ("reward", pa.float64()),
            ("components", pa.map_(pa.string(), pa.float64())),
            ("verdict", pa.string()),
            ("correct", pa.bool_()),
            ("decisions", pa.map_(pa.string(), pa.bool_())),
            ("timed_out", pa.list_(pa.string())),
            ("reward_duration_s", pa.float64()),
            ("engine_id", name),
            ("turns", pa.list_(turn)),
            ("branches", pa.list_(branch)),
            ("counts", pa.map_(pa.string(), pa.int64())),
            ("experts", pa.list_(pa.struct([("dtype", pa.string()), ("shape", tokens), ("values", pa.binary())]))),
        ],
        "moves": [
            ("time_s", pa.float64()),
            ("rollout_id", pa.string()),
            ("before", name),
            ("after", name),
            ("detail", name),
        ],
        "requests": [
            ("request_id", pa.string()),
            ("engine_id", name),
            ("queued_s", pa.float64()),
            ("started_s", pa.float64()),
            ("ended_s", pa.float64()),
            ("num_prompt", pa.int32()),
            ("num_tokens", pa.int32()),
            ("finish_reason", name),
        ],
    }
    return {table: pa.schema(fields) for table, fields in columns.items()}


# ---- writing


def facts_of(step: RecordedStep) -> dict[str, Any]:
    """Return the JSON data of a step that is not in a table."""
    return {
        "format": FORMAT,
        **{name: getattr(step, name) for name in _PLAIN},
        **{name: dict(getattr(step, name)) for name in _MAPPINGS},
        "census": dict(step.census),
        **{name: [[draw_id, why] for draw_id, why in getattr(step, name).items()] for name in _PAIRS},
        **{name: list(getattr(step, name)) for name in (*_LISTS, "draws", "pending")},
    }


def tables_of(step: RecordedStep) -> dict[str, pa.Table]:
    """Return the tables of a step by name, with everything that `facts_of` leaves out."""
    import pyarrow as pa

    groups = [(TRAIN, group) for group in step.groups]
    groups += [(purpose, group) for purpose, found in step.companions.items() for group in found]
    rows: dict[str, Iterable[NamedTuple]] = {
        "groups": [
            _GroupRow(purpose, d.draw_id, d.prompt.uid, d.prompt.domain, d.position, d.token_ids)
            for purpose, d in ((purpose, group.draw) for purpose, group in groups)
        ],
        "rollouts": [
            *(_rollout_row(purpose, rollout, group.draw) for purpose, group in groups for rollout in group.rollouts),
            *(_rollout_row(EXPERT, rollout, None) for rollout in step.demonstrations),
        ],
        "moves": (cast(Any, move)._replace(rollout_id=str(move.rollout_id)) for move in step.moves),
        "requests": step.requests,
    }
    return {name: pa.table(_columns(rows[name], schema), schema=schema) for name, schema in schemas().items()}


def _columns(rows: Iterable[NamedTuple], schema: pa.Schema) -> list[pa.Array]:
    import pyarrow as pa

    kept = list(rows)
    return [pa.array([getattr(row, field.name) for row in kept], type=field.type) for field in schema]


def _rollout_row(purpose: str, rollout: Rollout, draw: PromptDraw | None) -> _RolloutRow:
    same = draw is not None and np.array_equal(rollout.prompt_token_ids, draw.token_ids)
    if rollout.media or any(rollout.context_media):
        raise UnsupportedError(f"rollout {rollout.rollout_id} has pictures, sounds or films: recordings hold none yet.")
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
        text=utf8(rollout.text),
        status=str(rollout.status),
        cause=utf8(rollout.cause),
        reward=None if reward is None else reward.value,
        components=None if reward is None else [(utf8(name), value) for name, value in reward.components.items()],
        verdict=None if reward is None else utf8(reward.verdict),
        correct=None if reward is None else reward.correct,
        decisions=None if reward is None else [(utf8(name), says) for name, says in reward.decisions.items()],
        timed_out=None if reward is None else [*map(utf8, reward.timed_out)],
        reward_duration_s=None if reward is None else reward.duration_s,
        engine_id=rollout.engine_id,
        turns=[{"start": t.start, "end": t.end, "reward": t.reward, "state": utf8(t.state)} for t in rollout.turns],
        branches=[{"start": branch.start, "context": branch.context} for branch in rollout.branches],
        counts=[(utf8(name), count) for name, count in rollout.counts.items()],
        experts=[{"dtype": x.dtype.name, "shape": x.shape, "values": x.tobytes()} for x in rollout.experts],
    )


# ---- reading


def step_of(facts: Facts, tables: dict[str, pa.Table]) -> RecordedStep:
    """Build a step from its facts and tables, the inverse of `facts_of` and `tables_of`.

    Raises:
        ValueError: A table has unexpected columns, or arrays that do not align. Data that `tables_of` did not write may
            raise other errors.
    """
    for name, schema in schemas().items():
        _check_columns(tables[name], name, schema)
    draws: dict[str, dict[int, PromptDraw]] = {}
    for row in starmap(_GroupRow, _rows(tables["groups"])):
        prompt = Prompt(uid=row.uid, domain=row.domain, messages=())
        draws.setdefault(row.purpose, {})[row.draw_id] = PromptDraw(
            draw_id=row.draw_id, prompt=prompt, token_ids=row.prompt_token_ids, position=row.position
        )
    attempts: dict[tuple[str, int], list[Rollout]] = {}
    shown: list[Rollout] = []
    names = tables["rollouts"].column_names
    for values in _rows(tables["rollouts"]):
        rollout = _rollout(_RolloutRow(**dict(zip(names, values, strict=True))), draws)
        place = shown if rollout.expert else attempts.setdefault((rollout.purpose, rollout.draw_id), [])
        place.append(rollout)
    groups = {
        purpose: tuple(Group(draw=d, rollouts=tuple(attempts.get((purpose, d.draw_id), ()))) for d in found.values())
        for purpose, found in draws.items()
    }
    plain: dict[str, Any] = {each.name: getattr(facts, each.name) for each in fields(facts)}
    plain |= {name: dict(plain[name]) for name in _PAIRS}
    return RecordedStep(
        **plain,
        groups=groups.pop(TRAIN, ()),
        companions=groups,
        demonstrations=tuple(shown),
        moves=tuple(starmap(_move, _rows(tables["moves"]))),
        requests=tuple(starmap(Request, _rows(tables["requests"]))),
    )


def _check_columns(table: pa.Table, name: str, schema: pa.Schema) -> None:
    optional, nullable = (_RolloutRow._field_defaults, _NULLABLE) if name == "rollouts" else ((), ())
    unknown = {*table.column_names} - {*schema.names}
    lacking = {*schema.names} - {*table.column_names} - {*optional}
    if unknown or lacking:
        raise ValueError(f"table {name} lacks the columns {sorted(lacking)} and has others, {sorted(unknown)}")
    for column in table.schema:
        expected, found = schema.field(column.name).type, column.type
        alike = expected.id == found.id and getattr(expected, "value_type", None) == getattr(found, "value_type", None)
        if not alike and not _is_list_of_records(expected, found):
            raise ValueError(f"column {column.name} of table {name} is of type {found}, not {expected}")
        if column.name not in nullable and table.column(column.name).null_count:
            raise ValueError(f"column {column.name} of table {name} has nulls")


_NULLABLE = tuple(name for name, kind in _RolloutRow.__annotations__.items() if "None" in str(kind))


def _is_list_of_records(expected: pa.DataType, found: pa.DataType) -> bool:
    """Return whether two types are lists of records: those of older recordings have fewer fields."""
    import pyarrow as pa

    return all(pa.types.is_list(each) and pa.types.is_struct(each.value_type) for each in (expected, found))


def _move(time_s: float, rollout: str, before: str, after: str, detail: str) -> Move:
    """Build a move from its columns.

    It is the only function that parses the text of a rollout id, since a file stores only the text.
    """
    purpose, _, place = rollout.rpartition("-")
    draw_id, _, index = place.partition(".")
    rollout_id = RolloutId(purpose=purpose, draw_id=int(draw_id), index=int(index))
    return Move(time_s=time_s, rollout_id=rollout_id, before=before, after=after, detail=detail)


def _rollout(row: _RolloutRow, draws: Mapping[str, Mapping[int, PromptDraw]]) -> Rollout:
    if not len(row.token_ids) == len(row.logprobs) == len(row.policy_versions):
        raise ValueError(f"rollout {row.draw_id}.{row.index} has tokens, log-probs and versions that do not align")
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
        branches=tuple(starmap(_branch, (branch.values() for branch in row.branches))),
        counts=dict(row.counts),
        expert=expert,
        experts=tuple(starmap(_experts, (array.values() for array in row.experts or ()))),
    )


def _branch(start: int, context: Sequence[int]) -> Branch:
    return Branch(start=start, context=np.array(context, dtype=np.int32))


def _experts(dtype: str, shape: Sequence[int], values: bytes) -> IntArray:
    return np.frombuffer(values, dtype=dtype).reshape(shape)


def _rows(table: pa.Table) -> Iterator[Sequence[Any]]:
    """Return the rows of a table as plain data, with lists of numbers as NumPy arrays."""
    return zip(*(_values(table.column(name).combine_chunks()) for name in table.column_names), strict=True)


def _values(column: pa.Array) -> Sequence[Any]:
    import pyarrow as pa

    if not (pa.types.is_list(column.type) and pa.types.is_primitive(column.type.value_type)):
        return cast(Sequence[Any], column.to_pylist())
    numbers, ends = column.values.to_numpy(), column.offsets.to_numpy()
    return [
        numbers[ends[i] : ends[i + 1]] if there else None
        for i, there in enumerate(column.is_valid().to_numpy(zero_copy_only=False))
    ]
