"""One whole rollout: the conversation, turn by turn, and the data of every token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from roll.dashboard.metrics import nulls
from roll.dashboard.settings import usual_number
from roll.dashboard.vocabulary import Vocabulary
from roll.records import read_record

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


class _Turn(NamedTuple):
    start: Any = None
    end: Any = None
    reward: float | None = None


class _Branch(NamedTuple):
    start: int
    context: Sequence[int] = ()


class _Row(NamedTuple):
    """A rollout as stored by any version; missing fields are empty."""

    uid: str | None = None
    answer: Any = None
    prompt: str = ""
    text: str | None = None
    messages: Sequence[Any] = ()
    cause: str = ""
    components: Sequence[tuple[str, Any]] = ()
    reward_duration_s: Any = None
    token_ids: Sequence[int] = ()
    policy_versions: Sequence[int] = ()
    prompt_token_ids: Sequence[int] = ()
    branches: Sequence[Mapping[str, Any]] = ()
    turns: Sequence[Mapping[str, Any]] = ()
    logprobs: Any = None
    trainer_logprobs: Any = None
    update_logprobs: Any = None
    ref_logprobs: Any = None
    token_advantages: Any = None
    advantage: Any = None


def details(found: Mapping[str, Any], vocabulary: Vocabulary | None) -> dict[str, Any]:
    """Return the response of `/rollouts/{row}`: the table's data of the rollout that is not in the index."""
    row = read_record(_Row, found)
    ids, rewards = row.token_ids, [read_record(_Turn, turn).reward for turn in row.turns]
    turns: list[dict[str, Any]] = [{"kind": "prompt", "text": row.prompt, "start": None, "end": None}]
    for kind, start, end in _pieces(_spans(row), len(ids)):
        text = _text(vocabulary, ids[start:end], row, whole=len(ids) == end - start)
        if kind != "model" and text is not None and text.lstrip().startswith(_TOOL):
            kind = "tool"
        turn = {"kind": kind, "text": text, "start": start, "end": end}
        turns.append(turn | {"reward": rewards.pop(0)} if kind == "model" and rewards else turn)
    branches = [read_record(_Branch, branch) for branch in row.branches]
    return {
        "uid": row.uid,
        "answer": row.answer,
        "prompt": row.prompt,
        "text": row.text or "",
        "messages": row.messages or [],
        "turns": turns,
        "components": {name: _finite(value) for name, value in row.components},
        "cause": row.cause,
        "reward_duration_s": _finite(row.reward_duration_s),
        "policy_versions": sorted({version for version in row.policy_versions if version >= 0}),
        "num_prompt_tokens": len(row.prompt_token_ids),
        "branches": [{"start": b.start, "context_tokens": len(b.context)} for b in branches],
    }


def tokens(found: Mapping[str, Any], settings: Mapping[str, Any], vocabulary: Vocabulary | None) -> dict[str, Any]:
    """Return the response of `/rollouts/{row}/tokens`: columns aligned with the answer's tokens, and why some are
    missing.

    Args:
        found: the rollout's `TOKEN_COLUMNS`.
        settings: flat settings of the run; its `kind` tells whether the rollout was one of an evaluation.
        vocabulary: vocabulary of the run, if it exists.
    """
    row = read_record(_Row, found)
    ids = row.token_ids
    engine, trainer, update, reference, advantages = (
        _column(column, len(ids))
        for column in (row.logprobs, row.trainer_logprobs, row.update_logprobs, row.ref_logprobs, row.token_advantages)
    )
    written = np.zeros(len(ids), bool)
    for start, end in _spans(row):
        written[start:end] = True
    columns: dict[str, Any] = {"mask": (written if trainer is None else ~np.isnan(trainer)).astype(int).tolist()}
    if len(row.policy_versions) == len(ids):
        columns |= {"policy_version": [version if version >= 0 else None for version in row.policy_versions]}
    if advantages is None and _finite(row.advantage) is not None:
        advantages = np.where(written, row.advantage, np.nan)
    current = trainer if update is None else update
    ratio = _of_two(current, engine if _against_engine(settings) else trainer, lambda own, other: np.exp(own - other))
    clip = push = None
    if ratio is not None and advantages is not None:
        clip = _is_clipped(ratio, advantages, settings)
        push = ratio * advantages * (1 - (0 if clip is None else clip))
    computed = {
        "logprob": None if engine is None else np.where(written, engine, np.nan),
        "trainer_logprob": trainer,
        "advantage": advantages,
        "difference": _of_two(trainer, engine, lambda own, other: own - other),
        "kl": _of_two(trainer, reference, lambda own, other: np.expm1(other - own) - (other - own)),
        "ratio": ratio,
        "clip": clip,
        "push": push,
    }
    columns |= {name: nulls(column) for name, column in computed.items() if column is not None}
    missing = {name: _why(name, settings, trainer is not None) for name in _NAMES if name not in columns}
    missing |= {
        "entropy": "no run records the entropy of single tokens: the trainer keeps its mean over a step "
        "(training/policy/entropy, or training/policy/entropy_estimate)"
    }
    texts, problem = _token_texts(vocabulary, ids)
    return {"tokens": texts, "token_ids": ids, "columns": columns, "missing": missing, "problem": problem}


def _against_engine(settings: Mapping[str, Any]) -> bool:
    return settings.get("algorithm.ratio.against") == "rollout"


def _why(name: str, settings: Mapping[str, Any], seen: bool) -> str:
    """Return why a column is missing."""
    if name == "kl" and seen:
        return "the run has no reference model: algorithm.kl.coefficient is 0"
    if name == "clip" and seen:
        return f"the gate {settings.get('algorithm.gate.type', 'of this run')} clips no single token's ratio"
    if name in ("logprob", "policy_version"):
        return "the file of rollouts does not hold it"
    if settings.get("kind") == "eval":
        return "rollouts of evaluations are not trained on: the trainer never received this one"
    recorded = settings.get("tracking.token_columns")
    if recorded is None:
        return "the run was made before tracking.token_columns"
    if not recorded:
        return "the run has tracking.token_columns=false"
    return "the trainer never saw this rollout (its group was filtered, it failed, or it was given up)"


def _of_two(
    own: np.ndarray | None, other: np.ndarray | None, formula: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray | None:
    if own is None or other is None:
        return None
    with np.errstate(all="ignore"):
        return formula(own, other)


def _is_clipped(ratio: np.ndarray, advantages: np.ndarray, settings: Mapping[str, Any]) -> np.ndarray | None:
    """Return 1 for tokens whose ratio is clipped, so that they have no gradient; NaN for tokens that the loss ignores.

    Only ratios of single tokens are considered; `None` for other losses.
    """
    low, high = (usual_number(settings.get(f"algorithm.gate.{side}")) for side in ("low", "high"))
    by_token = settings.get("algorithm.ratio.level", "token") == "token"
    if (
        low is None
        or high is None
        or not by_token
        or settings.get("algorithm.gate.type") not in ("min_clip", "dual_clip")
    ):
        return None
    outside = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    return np.where(np.isnan(ratio), np.nan, outside)


def _spans(row: _Row) -> list[tuple[int, int]]:
    """Return the spans of generated tokens, from the recorded turns or from the policy versions.

    Tokens of the environment have no policy version.
    """
    num_tokens, versions = len(row.token_ids), row.policy_versions
    if row.turns:
        turns = [read_record(_Turn, turn) for turn in row.turns]
        bounds = [(t.start, t.end) for t in turns if isinstance(t.start, int) and isinstance(t.end, int)]
        return [(start, end) for start, end in bounds if 0 <= start <= end <= num_tokens]
    if not versions or len(versions) != num_tokens:
        return [(0, num_tokens)] if num_tokens else []
    made = np.concatenate([[0], np.asarray(versions) >= 0, [0]]).astype(int)
    edges = np.flatnonzero(np.diff(made))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _pieces(spans: Sequence[tuple[int, int]], num_tokens: int) -> list[tuple[str, int, int]]:
    """Split a whole rollout into pieces, in order: author, start and end."""
    found, at = [], 0
    for start, end in spans:
        if start > at:
            found.append(("environment", at, start))
        if end > start >= at:
            found.append(("model", start, end))
            at = end
    return [*found, ("environment", at, num_tokens)] if at < num_tokens else found


def _text(vocabulary: Vocabulary | None, ids: Sequence[int], row: _Row, *, whole: bool) -> str | None:
    if whole:
        return row.text
    if vocabulary is None:
        return None
    return vocabulary.text(ids)


def _token_texts(vocabulary: Vocabulary | None, ids: Sequence[int]) -> tuple[list[str], str | None]:
    if vocabulary is None:
        return [f"⟨{token_id}⟩" for token_id in ids], "the run's tokenizer is not there yet, so tokens are numbers"
    return vocabulary.texts(ids), None


def _column(values: Any, length: int) -> np.ndarray | None:
    """Return the values as an array if there is one for every token."""
    if not isinstance(values, list) or len(values) != length or not length:
        return None
    column = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    return None if np.isnan(column).all() else column


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
