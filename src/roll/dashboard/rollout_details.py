"""The details of one rollout: the conversation turn by turn, and the data of every token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from roll.dashboard.metrics import nan_to_none
from roll.dashboard.settings import to_finite_number
from roll.dashboard.vocabulary import Vocabulary
from roll.media.stored_images import list_images
from roll.records import read_record
from roll.tracking.reading.files import SafeDirectory

__all__ = ["DETAIL_COLUMNS", "TOKEN_COLUMNS", "build_details", "build_token_columns"]

DETAIL_COLUMNS = (
    "uid", "answer", "prompt", "text", "messages", "cause", "components", "reward_duration_s", "token_ids",
    "policy_versions", "prompt_token_ids", "branches", "turns", "prompt_media", "media", "branch_media",
)  # fmt: skip
TOKEN_COLUMNS = (
    "token_ids", "logprobs", "policy_versions", "trainer_logprobs", "update_logprobs", "ref_logprobs",
    "token_advantages", "turns", "advantage",
)  # fmt: skip
_RESPONSE_COLUMNS = (
    "logprob",
    "policy_version",
    "trainer_logprob",
    "difference",
    "advantage",
    "push",
    "ratio",
    "clip",
    "kl",
)
"""Columns of the `/tokens` response, if the rollout has the data for them."""
_TOOL_MARKERS = ("<tool_response>", "<|tool", "tool\n", "<|start_header_id|>tool", "<|start_header_id|>ipython")


class _Turn(NamedTuple):
    start: Any = None
    end: Any = None
    reward: float | None = None


class _Branch(NamedTuple):
    start: int
    context: Sequence[int] = ()


class _Message(NamedTuple):
    content: str = ""


class _Span(NamedTuple):
    digest: str = ""
    start: int = 0
    end: int = 0
    kind: str = ""


class _Row(NamedTuple):
    """A rollout as stored by any version of ROLL; missing fields have their defaults."""

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
    prompt_media: Sequence[Mapping[str, Any]] = ()
    media: Sequence[Mapping[str, Any]] = ()
    branch_media: Sequence[Sequence[Mapping[str, Any]]] = ()
    logprobs: Any = None
    trainer_logprobs: Any = None
    update_logprobs: Any = None
    ref_logprobs: Any = None
    token_advantages: Any = None
    advantage: Any = None


def build_details(
    values: Mapping[str, Any], vocabulary: Vocabulary | None, run_dir: SafeDirectory | None = None
) -> dict[str, Any]:
    """Build the response of `/rollouts/{row}`: the details of a rollout that are not in the index.

    Args:
        values: The rollout's `DETAIL_COLUMNS`.
        vocabulary: Vocabulary of the run, if it exists.
        run_dir: The run directory, in which the rollout's images are looked up.
    """
    row = read_record(_Row, values)
    ids, rewards = row.token_ids, [read_record(_Turn, turn).reward for turn in row.turns]
    turns: list[dict[str, Any]] = [{"kind": "prompt", "text": row.prompt, "start": None, "end": None}]
    for kind, start, end in _split_authors(_find_spans(row), len(ids)):
        text = _decode_text(vocabulary, row, start, end)
        if kind != "model" and text is not None and text.lstrip().startswith(_TOOL_MARKERS):
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
        "components": {name: _to_finite(value) for name, value in row.components},
        "cause": row.cause,
        "reward_duration_s": _to_finite(row.reward_duration_s),
        "policy_versions": sorted({version for version in row.policy_versions if version >= 0}),
        "num_prompt_tokens": len(row.prompt_token_ids),
        "branches": [{"start": b.start, "context_tokens": len(b.context)} for b in branches],
        "images": {} if run_dir is None else _list_images(run_dir, row, turns),
    }


def _list_images(run_dir: SafeDirectory, row: _Row, turns: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    messages = [read_record(_Message, message).content for message in row.messages if message]
    spans = [*row.prompt_media, *row.media, *(span for spans in row.branch_media for span in spans or () if span)]
    digests = [read_record(_Span, span).digest for span in spans]
    return list_images(run_dir, [*messages, *(turn["text"] or "" for turn in turns)], digests)


def build_token_columns(
    values: Mapping[str, Any], settings: Mapping[str, Any], vocabulary: Vocabulary | None
) -> dict[str, Any]:
    """Build the response of `/rollouts/{row}/tokens`: columns with one entry per token of the answer.

    The response also has the reason for each missing column.

    Args:
        values: the rollout's `TOKEN_COLUMNS`.
        settings: settings of the run by dotted key; the additional key `kind` is `train` or `eval`.
        vocabulary: vocabulary of the run, if it exists.
    """
    row = read_record(_Row, values)
    ids = row.token_ids
    engine, trainer, update, reference, advantages = (
        _read_column(column, len(ids))
        for column in (row.logprobs, row.trainer_logprobs, row.update_logprobs, row.ref_logprobs, row.token_advantages)
    )
    written = np.zeros(len(ids), bool)
    for start, end in _find_spans(row):
        written[start:end] = True
    columns: dict[str, Any] = {"mask": (written if trainer is None else ~np.isnan(trainer)).astype(int).tolist()}
    if len(row.policy_versions) == len(ids):
        columns |= {"policy_version": [version if version >= 0 else None for version in row.policy_versions]}
    if advantages is None and _to_finite(row.advantage) is not None:
        advantages = np.where(written, row.advantage, np.nan)
    current = trainer if update is None else update
    ratio = _combine(
        current, engine if _is_ratio_against_engine(settings) else trainer, lambda own, other: np.exp(own - other)
    )
    clip = push = None
    if ratio is not None and advantages is not None:
        clip = _is_clipped(ratio, advantages, settings)
        push = ratio * advantages * (1 - (0 if clip is None else clip))
    computed = {
        "logprob": None if engine is None else np.where(written, engine, np.nan),
        "trainer_logprob": trainer,
        "advantage": advantages,
        "difference": _combine(trainer, engine, lambda own, other: own - other),
        "kl": _combine(trainer, reference, lambda own, other: np.expm1(other - own) - (other - own)),
        "ratio": ratio,
        "clip": clip,
        "push": push,
    }
    columns |= {name: nan_to_none(column) for name, column in computed.items() if column is not None}
    missing = {
        name: _explain_missing(name, settings, trainer is not None) for name in _RESPONSE_COLUMNS if name not in columns
    }
    missing |= {
        "entropy": "runs do not record the entropy of single tokens, only the mean over a step "
        "(training/policy/entropy, or training/policy/entropy_estimate)"
    }
    texts, problem = _decode_tokens(vocabulary, ids)
    return {"tokens": texts, "token_ids": ids, "columns": columns, "missing": missing, "problem": problem}


def _is_ratio_against_engine(settings: Mapping[str, Any]) -> bool:
    return settings.get("algorithm.ratio.against") == "rollout"


def _explain_missing(name: str, settings: Mapping[str, Any], was_trained: bool) -> str:
    """Return the reason why a column is missing.

    Args:
        name: Name of the column.
        settings: Settings of the run by dotted key.
        was_trained: Whether the trainer processed the rollout.
    """
    if name == "kl" and was_trained:
        return "the run has no reference model, because algorithm.kl.coefficient is 0"
    if name == "clip" and was_trained:
        return (
            f"the gate {settings.get('algorithm.gate.type', 'of this run')} does not clip the ratios of single tokens"
        )
    if name in ("logprob", "policy_version"):
        return "the rollout file does not have this column"
    if settings.get("kind") == "eval":
        return "the trainer does not process rollouts of evaluations"
    recorded = settings.get("tracking.token_columns")
    if recorded is None:
        return "the run is older than tracking.token_columns"
    if not recorded:
        return "the run has tracking.token_columns=false"
    return "the trainer did not process this rollout (its group was filtered, failed or expired)"


def _combine(
    values: np.ndarray | None, other_values: np.ndarray | None, formula: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray | None:
    if values is None or other_values is None:
        return None
    with np.errstate(all="ignore"):
        return formula(values, other_values)


def _is_clipped(ratio: np.ndarray, advantages: np.ndarray, settings: Mapping[str, Any]) -> np.ndarray | None:
    """Return 1 for each token whose ratio is clipped, 0 for other tokens, and NaN outside the loss mask.

    The result is `None` if the loss does not clip the ratios of single tokens.
    """
    low, high = (to_finite_number(settings.get(f"algorithm.gate.{side}")) for side in ("low", "high"))
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


def _find_spans(row: _Row) -> list[tuple[int, int]]:
    """Return the start and the end of each span of generated tokens.

    The spans are the recorded turns. If no turns are recorded, a span is a contiguous range of tokens with a policy
    version; environment tokens have no policy version.
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


def _split_authors(spans: Sequence[tuple[int, int]], num_tokens: int) -> list[tuple[str, int, int]]:
    """Split a rollout into spans by author; return (`model` or `environment`, start, end) of each span, in order."""
    found, at = [], 0
    for start, end in spans:
        if start > at:
            found.append(("environment", at, start))
        if end > start >= at:
            found.append(("model", start, end))
            at = end
    return [*found, ("environment", at, num_tokens)] if at < num_tokens else found


def _decode_text(vocabulary: Vocabulary | None, row: _Row, start: int, end: int) -> str | None:
    """Decode `token_ids[start:end]`, with `[image …]` instead of the tokens of each image."""
    if end - start == len(row.token_ids):
        return row.text
    if vocabulary is None:
        return None
    pieces, at = [], start
    for span in sorted((read_record(_Span, span) for span in row.media), key=lambda span: span.start):
        if at <= span.start < span.end <= end:
            pieces += [vocabulary.decode(row.token_ids[at : span.start]), f"[{span.kind} {span.digest[:12]}]"]
            at = span.end
    return "".join([*pieces, vocabulary.decode(row.token_ids[at:end])])


def _decode_tokens(vocabulary: Vocabulary | None, ids: Sequence[int]) -> tuple[list[str], str | None]:
    if vocabulary is None:
        return [f"⟨{token_id}⟩" for token_id in ids], "the run has no tokenizer.json yet, so only token ids are shown"
    return vocabulary.decode_tokens(ids), None


def _read_column(values: Any, length: int) -> np.ndarray | None:
    """Convert values to an array; return `None` if there are not exactly `length` values or all are missing."""
    if not isinstance(values, list) or len(values) != length or not length:
        return None
    column = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    return None if np.isnan(column).all() else column


def _to_finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
