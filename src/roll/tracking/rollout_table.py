"""Write rollouts as a Parquet table: one row per attempt, with all data that is needed for training."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from roll.tracking import atomic
from roll.types import describe_content

if TYPE_CHECKING:
    import pyarrow as pa

    from roll.types import FloatArray, Group, Rollout

__all__ = [
    "TOKEN_COLUMNS",
    "TokenColumns",
    "build_rollout_rows",
    "build_rollout_schema",
    "replace_surrogates",
    "write_rollouts",
]

TokenColumns: TypeAlias = "Mapping[str, Mapping[str, FloatArray]]"
"""Columns by rollout id and name: shape [T] each, NaN for tokens that the loss ignores."""

TOKEN_COLUMNS = ("trainer_logprobs", "update_logprobs", "ref_logprobs", "token_advantages")
"""Per-token columns: the trainer's log-probs before the step's first update and in the last of several updates, the
reference model's log-probs, and the loss weight.
"""
_TOKENS_PER_GROUP = 2**17
"""Approximate number of tokens of a row group, which is decompressed to read one rollout."""


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates with `?`, since UTF-8 cannot encode them and user code may produce them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def build_rollout_schema() -> pa.Schema:
    """Return the names and types of a rollout file's columns.

    Lists of numbers are aligned with `token_ids`, except `prompt_token_ids`. There are columns for the media spans of
    `prompt_token_ids`, of `token_ids`, and of the context of each branch; these columns are null without media.
    """
    import pyarrow as pa

    branch = pa.struct([("start", pa.int32()), ("context", pa.list_(pa.int32()))])
    turn = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("reward", pa.float64())])
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    place = [("start", pa.int32()), ("end", pa.int32()), ("grid", pa.list_(pa.int32()))]
    spans = pa.list_(pa.struct([("kind", pa.string()), ("digest", pa.string()), *place]))
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
            ("prompt_media", spans),
            ("media", spans),
            ("branch_media", pa.list_(spans)),
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


def build_rollout_rows(
    step: int,
    groups: Sequence[Group],
    advantages: Mapping[str, float] | None = None,
    tokens: TokenColumns | None = None,
) -> list[dict[str, Any]]:
    """Return one row per rollout, in the order of the groups; a missing reward, advantage or token column is null."""
    advantages, tokens = advantages or {}, tokens or {}
    rollouts = (rollout for group in groups for rollout in group.rollouts)
    return [_build_row(step, r, advantages.get(r.sample_id), tokens.get(r.sample_id, {})) for r in rollouts]


def _build_row(
    step: int, rollout: Rollout, advantage: float | None, tokens: Mapping[str, FloatArray]
) -> dict[str, Any]:
    prompt, reward = rollout.prompt, rollout.reward
    written = rollout.policy_versions[rollout.policy_versions >= 0]
    return {
        "step": step,
        "rollout_id": rollout.sample_id,
        "draw_id": rollout.draw_id,
        "index": rollout.index,
        "uid": replace_surrogates(prompt.uid),
        "domain": prompt.domain,
        "prompt": replace_surrogates(describe_content(prompt.input_messages[-1].content)) if prompt.messages else "",
        "messages": [
            {"role": m.role, "content": replace_surrogates(describe_content(m.content))} for m in prompt.messages
        ],
        "answer": replace_surrogates(prompt.answer),
        "text": replace_surrogates(rollout.text),
        "prompt_token_ids": rollout.prompt_token_ids,
        "token_ids": rollout.token_ids,
        "logprobs": rollout.logprobs,
        "policy_versions": rollout.policy_versions,
        **{name: tokens.get(name) for name in TOKEN_COLUMNS},
        "turns": [{"start": turn.start, "end": turn.end, "reward": turn.reward} for turn in rollout.spans],
        "branches": [{"start": branch.start, "context": branch.context} for branch in rollout.branches],
        "prompt_media": [span.to_dict() for span in rollout.prompt_media] or None,
        "media": [span.to_dict() for span in rollout.media] or None,
        "branch_media": _list_branch_media(rollout),
        "finish_reason": rollout.finish_reason,
        "status": str(rollout.status),
        "cause": replace_surrogates(rollout.cause),
        "reward": reward.value if reward else None,
        "components": sorted((replace_surrogates(name), value) for name, value in reward.components.items())
        if reward
        else None,
        "verdict": replace_surrogates(reward.verdict) if reward else None,
        "correct": reward.correct if reward else None,
        "reward_duration_s": reward.duration_s if reward else None,
        "advantage": advantage,
        "engine_id": rollout.engine_id,
        "num_tokens": len(rollout.token_ids),
        "num_turns": len(rollout.spans),
        "oldest_version": int(written.min()) if len(written) else None,
    }


def _list_branch_media(rollout: Rollout) -> list[list[dict[str, Any]]] | None:
    if not any(branch.media for branch in rollout.branches):
        return None
    return [[span.to_dict() for span in branch.media] for branch in rollout.branches]


def write_rollouts(
    path: Path,
    step: int,
    groups: Sequence[Group],
    advantages: Mapping[str, float] | None = None,
    tokens: TokenColumns | None = None,
) -> None:
    """Write the rollouts of a step to a Parquet file, compressed with zstd, atomically.

    Raises:
        OSError: The file cannot be written; `path` is unchanged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = build_rollout_rows(step, groups, advantages, tokens)
    # A reader decompresses a whole row group to get one rollout, so long rollouts get small groups.
    mean_tokens = float(np.mean([row["num_tokens"] for row in rows])) if rows else 0.0
    table = pa.Table.from_pylist(rows, schema=build_rollout_schema())
    buffer = io.BytesIO()
    pq.write_table(
        table, buffer, compression="zstd", row_group_size=max(16, int(_TOKENS_PER_GROUP / max(mean_tokens, 1)))
    )
    atomic.write_bytes(path, buffer.getvalue())
