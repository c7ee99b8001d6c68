"""A recorded step as Arrow tables and plain data, and back: nothing is lost, arrays keep every bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from roll.errors import UnsupportedError
from roll.pipelines.recording.records import FORMAT, Move, RecordedDraw, RecordedStep, Request
from roll.tracking.rollout_table import utf8
from roll.types import (
    EXPERT,
    TRAIN,
    Branch,
    FinishReason,
    Group,
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

__all__ = ["facts_of", "schemas", "step_of", "tables_of"]

_PLAIN = ("step", "session", "policy_version", "next_policy_version", "num_refills", "kind", "num_draws")
_MAPPINGS = ("stream", "counters", "timings_s")


def schemas() -> dict[str, pa.Schema]:
    """Columns of each table. Lists of a rollout's row align with its `token_ids`."""
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
    """What no table holds of a step, as JSON takes it."""
    return {
        "format": FORMAT,
        **{name: getattr(step, name) for name in _PLAIN},
        **{name: dict(getattr(step, name)) for name in _MAPPINGS},
        "census": dict(step.census),
        "left_out": [[draw_id, why] for draw_id, why in step.left_out.items()],
        "expired": [[draw_id, why] for draw_id, why in step.expired.items()],
        **{name: list(getattr(step, name)) for name in ("expired_lengths", "staleness", "draws", "pending")},
    }


def tables_of(step: RecordedStep) -> dict[str, pa.Table]:
    """Everything that `facts_of` leaves out, by name of the table."""
    import pyarrow as pa

    groups = [(TRAIN, group) for group in step.groups]
    groups += [(purpose, group) for purpose, found in step.companions.items() for group in found]
    rows: dict[str, Iterable[Sequence[Any]]] = {
        "groups": [_group_row(purpose, group.draw) for purpose, group in groups],
        "rollouts": [
            *(_rollout_row(purpose, rollout, group.draw) for purpose, group in groups for rollout in group.rollouts),
            *(_rollout_row(EXPERT, rollout, None) for rollout in step.demonstrations),
        ],
        "moves": ((time_s, str(rollout_id), *rest) for time_s, rollout_id, *rest in step.moves),
        "requests": step.requests,
    }
    return {name: pa.table(_columns(rows[name], schema), schema=schema) for name, schema in schemas().items()}


def _columns(rows: Iterable[Sequence[Any]], schema: pa.Schema) -> list[pa.Array]:
    import pyarrow as pa

    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return [pa.array(list(values), type=field.type) for values, field in zip(columns, schema, strict=True)]


def _group_row(purpose: str, draw: PromptDraw) -> Sequence[Any]:
    return purpose, draw.draw_id, draw.prompt.uid, draw.prompt.domain, draw.position, draw.token_ids


def _rollout_row(purpose: str, rollout: Rollout, draw: PromptDraw | None) -> Sequence[Any]:
    """A prompt's tokens only where they are not its group's: a loop of the user's own may have changed them."""
    same = draw is not None and np.array_equal(rollout.prompt_token_ids, draw.token_ids)
    if rollout.media or any(rollout.context_media):
        raise UnsupportedError(f"rollout {rollout.rollout_id} has pictures, sounds or films: recordings hold none yet.")
    reward = rollout.reward
    return (
        purpose,
        rollout.draw_id,
        rollout.index,
        None if same else rollout.prompt_token_ids,
        rollout.token_ids,
        rollout.logprobs,
        rollout.policy_versions,
        rollout.finish_reason,
        utf8(rollout.text),
        str(rollout.status),
        utf8(rollout.cause),
        None if reward is None else reward.value,
        None if reward is None else [(utf8(name), value) for name, value in reward.components.items()],
        None if reward is None else utf8(reward.verdict),
        None if reward is None else reward.correct,
        None if reward is None else [(utf8(name), says) for name, says in reward.decisions.items()],
        None if reward is None else [*map(utf8, reward.timed_out)],
        None if reward is None else reward.duration_s,
        rollout.engine_id,
        [{"start": t.start, "end": t.end, "reward": t.reward, "state": utf8(t.state)} for t in rollout.turns],
        [{"start": branch.start, "context": branch.context} for branch in rollout.branches],
        [(utf8(name), count) for name, count in rollout.counts.items()],
        [{"dtype": x.dtype.name, "shape": x.shape, "values": x.tobytes()} for x in rollout.experts],
    )


# ---- reading


def step_of(facts: dict[str, Any], tables: dict[str, pa.Table]) -> RecordedStep:
    """The inverse of `facts_of` and `tables_of`."""
    draws: dict[str, dict[int, PromptDraw]] = {}
    for row in _rows(tables["groups"]):
        prompt = Prompt(uid=row["uid"], domain=row["domain"], messages=())
        draws.setdefault(row["purpose"], {})[row["draw_id"]] = PromptDraw(
            draw_id=row["draw_id"], prompt=prompt, token_ids=row["prompt_token_ids"], position=row["position"]
        )
    attempts: dict[tuple[str, int], list[Rollout]] = {}
    shown: list[Rollout] = []
    for row in _rows(tables["rollouts"]):
        purpose, draw_id = row["purpose"], row["draw_id"]
        if purpose == EXPERT:
            shown.append(_rollout(row, draws[TRAIN][draw_id]))
        else:
            attempts.setdefault((purpose, draw_id), []).append(_rollout(row, draws[purpose][draw_id]))
    groups = {
        purpose: tuple(Group(draw=d, rollouts=tuple(attempts.get((purpose, d.draw_id), ()))) for d in found.values())
        for purpose, found in draws.items()
    }
    return RecordedStep(
        **{name: facts[name] for name in (*_PLAIN, *_MAPPINGS)},
        census=facts.get("census", {}),  # older recordings have none
        groups=groups.pop(TRAIN, ()),
        companions=groups,
        demonstrations=tuple(shown),
        left_out=dict(facts["left_out"]),
        expired=dict(facts["expired"]),
        expired_lengths=tuple(facts["expired_lengths"]),
        staleness=tuple(facts["staleness"]),
        draws=tuple(RecordedDraw(*draw) for draw in facts["draws"]),
        pending=tuple((draw_id, domain, position) for draw_id, domain, position in facts["pending"]),
        moves=tuple(_move(row) for row in _rows(tables["moves"])),
        requests=tuple(Request(*row.values()) for row in _rows(tables["requests"])),
    )


def _move(row: dict[str, Any]) -> Move:
    """The one place where the text of a rollout's id is read: a file has nothing else of it."""
    purpose, _, place = row["rollout_id"].rpartition("-")
    draw_id, _, index = place.partition(".")
    rollout_id = RolloutId(purpose=purpose, draw_id=int(draw_id), index=int(index))
    return Move(**(row | {"rollout_id": rollout_id}))


def _rollout(row: dict[str, Any], draw: PromptDraw) -> Rollout:
    reward = None
    if row["reward"] is not None:
        reward = RewardResult(
            value=row["reward"],
            components=dict(row["components"]),
            verdict=row["verdict"],
            correct=row["correct"],
            decisions=dict(row["decisions"]),
            timed_out=tuple(row.get("timed_out") or ()),  # older recordings have none
            duration_s=row["reward_duration_s"],
        )
    own = row["prompt_token_ids"]
    return Rollout(
        draw_id=row["draw_id"],
        index=row["index"],
        purpose=row["purpose"],
        prompt=draw.prompt,
        prompt_token_ids=draw.token_ids if own is None else own,
        token_ids=row["token_ids"],
        logprobs=row["logprobs"],
        policy_versions=row["policy_versions"],
        finish_reason=cast(FinishReason, row["finish_reason"]),
        text=row["text"],
        status=RolloutStatus(row["status"]),
        cause=row["cause"],
        reward=reward,
        engine_id=row["engine_id"],
        turns=tuple(Turn(**turn) for turn in row["turns"]),
        branches=tuple(
            Branch(start=branch["start"], context=np.array(branch["context"], dtype=np.int32))
            for branch in row.get("branches", ())  # older recordings have neither
        ),
        counts=dict(row.get("counts", ())),
        expert=row["purpose"] == EXPERT,
        experts=tuple(
            np.frombuffer(x["values"], dtype=x["dtype"]).reshape(x["shape"])
            for x in row.get("experts") or ()  # older recordings have none
        ),
    )


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Rows as plain data; lists of numbers as NumPy arrays."""
    columns = [_values(table.column(name).combine_chunks()) for name in table.column_names]
    for values in zip(*columns, strict=True):
        yield dict(zip(table.column_names, values, strict=True))


def _values(column: pa.Array) -> Sequence[Any]:
    import pyarrow as pa

    if not (pa.types.is_list(column.type) and pa.types.is_primitive(column.type.value_type)):
        return cast(Sequence[Any], column.to_pylist())
    numbers, ends = column.values.to_numpy(), column.offsets.to_numpy()
    return [
        numbers[ends[i] : ends[i + 1]] if there else None
        for i, there in enumerate(column.is_valid().to_numpy(zero_copy_only=False))
    ]
