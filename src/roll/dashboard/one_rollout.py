"""One rollout in full: what was said, turn by turn, and what is known of every token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from roll.dashboard.metrics import nulls
from roll.dashboard.settings import usual_number
from roll.dashboard.vocabulary import Vocabulary

__all__ = ["DETAIL_COLUMNS", "TOKEN_COLUMNS", "details", "tokens"]

DETAIL_COLUMNS = (
    "uid", "answer", "prompt", "text", "messages", "cause", "components", "reward_duration_s", "token_ids",
    "policy_versions", "prompt_token_ids", "branches", "turns",
)  # fmt: skip
TOKEN_COLUMNS = (
    "token_ids", "logprobs", "policy_versions", "trainer_logprobs", "update_logprobs", "ref_logprobs",
    "token_advantages", "turns", "advantage",
)  # fmt: skip
_NAMES = ("logprob", "policy_version", "trainer_logprob", "difference", "advantage", "push", "ratio", "clip", "kl")
"""Columns that a rollout may have."""
_TOOL = ("<tool_response>", "<|tool", "tool\n", "<|start_header_id|>tool", "<|start_header_id|>ipython")


def details(row: Mapping[str, Any], vocabulary: Vocabulary | None) -> dict[str, Any]:
    """For `/rollouts/{row}`: what the table holds of it beside the index."""
    spans = _spans(row)
    ids = row.get("token_ids") or []
    turns: list[dict[str, Any]] = [{"kind": "prompt", "text": row.get("prompt") or "", "start": None, "end": None}]
    for kind, start, end in _pieces(spans, len(ids)):
        text = _text(vocabulary, ids[start:end], row, whole=len(ids) == end - start)
        if kind != "model" and text is not None and text.lstrip().startswith(_TOOL):
            kind = "tool"
        turns.append({"kind": kind, "text": text, "start": start, "end": end})
    rewards = [turn.get("reward") for turn in row.get("turns") or []]
    for turn, reward in zip((turn for turn in turns if turn["kind"] == "model"), rewards, strict=False):
        turn["reward"] = reward
    components = row.get("components")
    return {
        "uid": row.get("uid"),
        "answer": row.get("answer"),
        "prompt": row.get("prompt") or "",
        "text": row.get("text") or "",
        "messages": row.get("messages") or [],
        "turns": turns,
        "components": {name: _finite(value) for name, value in components or []},
        "cause": row.get("cause") or "",
        "reward_duration_s": _finite(row.get("reward_duration_s")),
        "policy_versions": sorted({version for version in row.get("policy_versions") or [] if version >= 0}),
        "num_prompt_tokens": len(row.get("prompt_token_ids") or []),
        "branches": [
            {"start": branch["start"], "context_tokens": len(branch["context"] or [])}
            for branch in row.get("branches") or []
        ],
    }


def tokens(row: Mapping[str, Any], settings: Mapping[str, Any], vocabulary: Vocabulary | None) -> dict[str, Any]:
    """For `/rollouts/{row}/tokens`: columns that align with the answer's tokens, and why others are missing.

    Args:
        row: its `TOKEN_COLUMNS`.
        settings: of the run, flat; with `kind`, whether the rollout was one of an evaluation.
        vocabulary: the run's, if it is there.
    """
    ids = row.get("token_ids") or []
    engine, trainer, update, reference, advantages = (
        _column(row.get(name), len(ids))
        for name in ("logprobs", "trainer_logprobs", "update_logprobs", "ref_logprobs", "token_advantages")
    )
    written = np.zeros(len(ids), bool)
    for start, end in _spans(row):
        written[start:end] = True
    missing: dict[str, str] = {}
    columns: dict[str, Any] = {"mask": (written if trainer is None else ~np.isnan(trainer)).astype(int).tolist()}
    versions = row.get("policy_versions") or []
    if len(versions) == len(ids):
        columns["policy_version"] = [version if version >= 0 else None for version in versions]
    if engine is not None:
        columns["logprob"] = nulls(np.where(written, engine, np.nan))
    if advantages is None and _finite(row.get("advantage")) is not None:
        advantages = np.where(written, row["advantage"], np.nan)
    found = {
        "trainer_logprob": trainer,
        "advantage": advantages,
        **_of_two(trainer, engine, "difference", lambda own, other: own - other),
        **_of_two(trainer, reference, "kl", lambda own, other: np.expm1(other - own) - (other - own)),
    }
    current = trainer if update is None else update
    against = engine if settings.get("algorithm.ratio.against") == "rollout" else trainer
    found |= _of_two(current, against, "ratio", lambda own, other: np.exp(own - other))
    ratio = found.get("ratio")
    if ratio is not None and advantages is not None:
        clipped = _clipped(ratio, advantages, settings)
        found |= clipped
        found["push"] = ratio * advantages * (1 - clipped.get("clip", np.zeros(len(ids))))
    columns |= {name: nulls(column) for name, column in found.items() if column is not None}
    for name in _NAMES:
        if name not in columns:
            missing[name] = _why(name, settings, trainer is not None)
    missing["entropy"] = (
        "no run records the entropy of single tokens: the trainer keeps its mean over a step "
        "(training/policy/entropy, or training/policy/entropy_estimate)"
    )
    texts, problem = _token_texts(vocabulary, ids)
    return {"tokens": texts, "token_ids": ids, "columns": columns, "missing": missing, "problem": problem}


def _why(name: str, settings: Mapping[str, Any], seen: bool) -> str:
    """Why a column is missing."""
    if name == "kl" and seen:
        return "the run has no reference model: algorithm.kl.coefficient is 0"
    if name == "clip" and seen:
        return f"the gate {settings.get('algorithm.gate.type', 'of this run')} clips no single token's ratio"
    if name in ("logprob", "policy_version"):
        return "the file of rollouts does not hold it"
    if settings.get("kind") == "eval":
        return "nothing is learnt from rollouts of evaluations: the trainer never saw it"
    recorded = settings.get("tracking.token_columns")
    if recorded is None:
        return "the run was made before tracking.token_columns"
    if not recorded:
        return "the run has tracking.token_columns=false"
    return "the trainer never saw this rollout (its group was filtered, it failed, or it was given up)"


def _of_two(
    own: np.ndarray | None, other: np.ndarray | None, name: str, formula: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> dict[str, np.ndarray]:
    if own is None or other is None:
        return {}
    with np.errstate(all="ignore"):
        return {name: formula(own, other)}


def _clipped(ratio: np.ndarray, advantages: np.ndarray, settings: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """1 where the gate lets no gradient through, by the ratio of the token alone; NaN where the loss counts none."""
    low, high = (usual_number(settings.get(f"algorithm.gate.{side}")) for side in ("low", "high"))
    by_token = settings.get("algorithm.ratio.level", "token") == "token"
    if (
        low is None
        or high is None
        or not by_token
        or settings.get("algorithm.gate.type") not in ("min_clip", "dual_clip")
    ):
        return {}
    outside = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    return {"clip": np.where(np.isnan(ratio), np.nan, outside)}


def _spans(row: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Where the model wrote: as recorded, or by the versions, which the environment's tokens have none of."""
    num_tokens = len(row.get("token_ids") or [])
    if row.get("turns"):
        bounds = [(turn.get("start"), turn.get("end")) for turn in row["turns"]]
        return [(s, e) for s, e in bounds if isinstance(s, int) and isinstance(e, int) and 0 <= s <= e <= num_tokens]
    versions = row.get("policy_versions")
    if not versions or len(versions) != num_tokens:
        return [(0, num_tokens)] if num_tokens else []
    made = np.concatenate([[0], np.asarray(versions) >= 0, [0]]).astype(int)
    edges = np.flatnonzero(np.diff(made))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _pieces(spans: Sequence[tuple[int, int]], num_tokens: int) -> list[tuple[str, int, int]]:
    """The whole of a rollout, in order: who wrote which tokens."""
    found, at = [], 0
    for start, end in spans:
        if start > at:
            found.append(("environment", at, start))
        if end > start >= at:
            found.append(("model", start, end))
            at = end
    return [*found, ("environment", at, num_tokens)] if at < num_tokens else found


def _text(vocabulary: Vocabulary | None, ids: Sequence[int], row: Mapping[str, Any], *, whole: bool) -> str | None:
    if whole:
        return row.get("text")
    if vocabulary is None:
        return None
    return vocabulary.text(ids)


def _token_texts(vocabulary: Vocabulary | None, ids: Sequence[int]) -> tuple[list[str], str | None]:
    if vocabulary is None:
        return [f"⟨{token_id}⟩" for token_id in ids], "the run's tokenizer is not there yet, so tokens are numbers"
    return vocabulary.texts(ids), None


def _column(values: Any, length: int) -> np.ndarray | None:
    """As an array, where there is one number for every token."""
    if not isinstance(values, list) or len(values) != length or not length:
        return None
    column = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    return None if np.isnan(column).all() else column


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
