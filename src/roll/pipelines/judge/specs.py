"""Specs of the run's judge. Imports neither torch nor an engine, so that `roll check` can use it."""

from __future__ import annotations

from pathlib import Path

from roll.config.rollout_run import RolloutRunConfig
from roll.errors import ConfigError
from roll.inference import EngineSpec, get_engine_capabilities, resolve_engine_kind
from roll.models import describe_model, read_context_length
from roll.tracking import RunDirectory

__all__ = ["build_judge_specs", "compute_judge_context", "resolve_judge_kind"]

MAX_CONTEXT = 8192
"""Default context length, in tokens; longer contexts would reserve memory that verdicts do not need."""
CPU_CACHE_BYTES = 256 * 2**20
"""Default KV cache of an engine on a CPU."""
MIN_CACHED_REQUESTS = 4
"""Number of full-length requests for which the KV cache is sized if the engine's default does not fit one request."""


def resolve_judge_kind(config: RolloutRunConfig) -> str:
    """Return the name of the judge's engine, with `auto` resolved.

    Raises:
        ConfigError: The configured engine is not installed.
    """
    assert config.judge is not None
    return resolve_engine_kind(config.judge.engine, "judge.engine")


def compute_judge_context(config: RolloutRunConfig, path: Path | str) -> int:
    """Return the judge's context length in tokens, which limits a request plus its reply.

    Raises:
        ConfigError: `judge.max_context` exceeds the model's context length, or leaves no room for a question.
    """
    assert config.judge is not None
    max_context, most = config.judge.max_context, read_context_length(Path(path))
    if max_context is not None and max_context > most:
        raise ConfigError(
            f"judge.max_context must be <= {most}, the context length of the judge, got {max_context}: lower "
            "judge.max_context."
        )
    found = max_context or min(most, MAX_CONTEXT)
    replies = [r.max_reply_tokens for e in config.data for r in e.reward if r.type == "judge" and r.uses_own_judge]
    if max(replies) >= found:
        raise ConfigError(
            f"max_reply_tokens ({max(replies)}) of the reward 'judge' leaves no space for a question in the judge's "
            f"context length of {found} tokens: lower max_reply_tokens, or choose another judge.model."
        )
    return found


def build_judge_specs(config: RolloutRunConfig, path: Path, run: RunDirectory | None) -> list[EngineSpec]:
    """Return one spec per engine of the judge."""
    judge = config.judge
    assert judge is not None
    kind = resolve_judge_kind(config)
    capabilities = get_engine_capabilities(kind)
    context, cache = compute_judge_context(config, path), judge.kv_cache_bytes
    if cache is None and not capabilities.reserves_kv_cache:
        one_request = context * describe_model(path).compute_kv_bytes_per_token(2 if judge.dtype == "bfloat16" else 4)
        cache = None if one_request <= CPU_CACHE_BYTES else MIN_CACHED_REQUESTS * one_request
    # Verdict requests arrive one by one, so batching them would only add latency.
    options = {**capabilities.sequential_options, **judge.options}
    return [
        EngineSpec(
            engine_id=f"judge-{index}",
            kind=kind,
            model_path=str(path),
            dtype=judge.dtype,
            max_context=context,
            max_num_seqs=judge.max_num_seqs,
            kv_cache_bytes=cache,
            quantization=judge.quantization,
            tensor_parallel=judge.tensor_parallel,
            seed=config.seed,
            num_threads=config.training.num_threads,
            trust_remote_code=judge.trust_remote_code,
            options=options,
            log_path=run.get_log_path("judge", index) if run else None,
        )
        for index in range(config.num_judges)
    ]
