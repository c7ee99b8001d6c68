"""Rollouts as a Parquet table: one row per attempt, with everything needed to train on it again."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from roll.tracking import atomic

if TYPE_CHECKING:
    import pyarrow as pa

    from roll.types import FloatArray, Group, Rollout

__all__ = ["TOKEN_COLUMNS", "TokenColumns", "rollout_rows", "rollout_schema", "utf8", "write_rollouts"]

TokenColumns: TypeAlias = "Mapping[str, Mapping[str, FloatArray]]"
"""Columns by rollout id and name: shape [T] each, NaN for tokens that the loss ignores."""

TOKEN_COLUMNS = ("trainer_logprobs", "update_logprobs", "ref_logprobs", "token_advantages")
"""The trainer's log-probs before the step's first update, and in the last of several; the reference's; the loss
weight.
"""
_TOKENS_PER_GROUP = 2**17
"""Approximate tokens of a row group, which is decompressed to read one rollout."""


def utf8(text: str) -> str:
    """Return the text with `?` for lone surrogates, which UTF-8 cannot encode (user code may produce them)."""
    return text.encode("utf-8", "replace").decode("utf-8")


def rollout_schema() -> pa.Schema:
    """Return the columns of the table; all lists of numbers except the prompt's align with the row's `token_ids`."""
    import pyarrow as pa

    branch = pa.struct([("start", pa.int32()), ("context", pa.list_(pa.int32()))])
    turn = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("reward", pa.float64())])
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    return pa.schema(
        [
            ("step", pa.int32()),
            ("rollout_id", pa.string()),
            ("draw_id", pa.int64()),
            ("index", pa.int32()),
            ("uid", pa.string()),
            ("domain", pa.string()),
            ("prompt", pa.string()),
            ("messages", pa.list_(message)),
            ("answer", pa.string()),
            ("text", pa.string()),
            ("prompt_token_ids", pa.list_(pa.int32())),
            ("token_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            ("policy_versions", pa.list_(pa.int32())),
            *((name, pa.list_(pa.float32())) for name in TOKEN_COLUMNS),
            ("turns", pa.list_(turn)),
            ("branches", pa.list_(branch)),
            ("finish_reason", pa.dictionary(pa.int8(), pa.string())),
            ("status", pa.dictionary(pa.int8(), pa.string())),
            ("cause", pa.string()),
            ("reward", pa.float64()),
            ("components", pa.map_(pa.string(), pa.float64())),
            ("verdict", pa.string()),
            ("correct", pa.bool_()),
            ("reward_duration_s", pa.float64()),
            ("advantage", pa.float64()),
            ("engine_id", pa.string()),
            ("num_tokens", pa.int32()),
            ("num_turns", pa.int32()),
            ("oldest_version", pa.int32()),
        ]
    )


def rollout_rows(
    step: int,
    groups: Sequence[Group],
    advantages: Mapping[str, float] | None = None,
    tokens: TokenColumns | None = None,
) -> list[dict[str, Any]]:
    """Return one row per rollout, in group order; columns of a missing reward, advantage or token entry are null."""
    advantages, tokens = advantages or {}, tokens or {}
    rollouts = (rollout for group in groups for rollout in group.rollouts)
    return [_row(step, r, advantages.get(r.sample_id), tokens.get(r.sample_id, {})) for r in rollouts]


def _row(step: int, rollout: Rollout, advantage: float | None, tokens: Mapping[str, FloatArray]) -> dict[str, Any]:
    prompt, reward = rollout.prompt, rollout.reward
    written = rollout.policy_versions[rollout.policy_versions >= 0]
    return {
        "step": step,
        "rollout_id": rollout.sample_id,
        "draw_id": rollout.draw_id,
        "index": rollout.index,
        "uid": utf8(prompt.uid),
        "domain": prompt.domain,
        "prompt": utf8(prompt.asked[-1].text) if prompt.messages else "",
        "messages": [{"role": m.role, "content": utf8(m.text)} for m in prompt.messages],
        "answer": utf8(prompt.answer),
        "text": utf8(rollout.text),
        "prompt_token_ids": rollout.prompt_token_ids,
        "token_ids": rollout.token_ids,
        "logprobs": rollout.logprobs,
        "policy_versions": rollout.policy_versions,
        **{name: tokens.get(name) for name in TOKEN_COLUMNS},
        "turns": [{"start": turn.start, "end": turn.end, "reward": turn.reward} for turn in rollout.spans],
        "branches": [{"start": branch.start, "context": branch.context} for branch in rollout.branches],
        "finish_reason": rollout.finish_reason,
        "status": str(rollout.status),
        "cause": utf8(rollout.cause),
        "reward": reward.value if reward else None,
        "components": sorted((utf8(name), value) for name, value in reward.components.items()) if reward else None,
        "verdict": utf8(reward.verdict) if reward else None,
        "correct": reward.correct if reward else None,
        "reward_duration_s": reward.duration_s if reward else None,
        "advantage": advantage,
        "engine_id": rollout.engine_id,
        "num_tokens": len(rollout.token_ids),
        "num_turns": len(rollout.spans),
        "oldest_version": int(written.min()) if len(written) else None,
    }


def write_rollouts(
    path: Path,
    step: int,
    groups: Sequence[Group],
    advantages: Mapping[str, float] | None = None,
    tokens: TokenColumns | None = None,
) -> None:
    """Write the table (zstd) to `path`, atomically.

    Raises:
        OSError: the file cannot be written; `path` is unchanged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = rollout_rows(step, groups, advantages, tokens)
    mean_tokens = float(np.mean([row["num_tokens"] for row in rows])) if rows else 0.0
    table = pa.Table.from_pylist(rows, schema=rollout_schema())
    buffer = io.BytesIO()
    pq.write_table(
        table, buffer, compression="zstd", row_group_size=max(16, int(_TOKENS_PER_GROUP / max(mean_tokens, 1)))
    )
    atomic.write_bytes(path, buffer.getvalue())
