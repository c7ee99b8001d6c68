"""Specs of the run's own judge. Imports neither torch nor an engine, so that `roll check` may ask."""

from __future__ import annotations

from pathlib import Path

from roll.config.generating import GeneratingConfig
from roll.errors import ConfigError
from roll.inference import EngineSpec, engine_capabilities, resolve_engine_kind
from roll.models import context_length, describe_model
from roll.tracking import RunDirectory

__all__ = ["judge_context", "judge_kind", "judge_specs"]

LONGEST_CONTEXT = 8192
"""Default context length in tokens: longer contexts would reserve memory that no verdict needs."""
CPU_CACHE_BYTES = 256 * 2**20
"""Default KV cache of an engine on a CPU."""
REQUESTS_AT_LEAST = 4
"""Number of full-length requests that fit in the KV cache if the engine's default does not fit a single one."""


def judge_kind(config: GeneratingConfig) -> str:
    """Return the kind of the judge's engines.

    Raises:
        ConfigError: The configured engine is not installed.
    """
    assert config.judge is not None
    return resolve_engine_kind(config.judge.engine, "judge.engine")


def judge_context(config: GeneratingConfig, path: Path | str) -> int:
    """Return the judge's context length, the longest request plus reply, in tokens.

    Raises:
        ConfigError: `judge.max_context` exceeds the model's context length, or leaves no room for a question.
    """
    assert config.judge is not None
    asked, most = config.judge.max_context, context_length(Path(path))
    if asked is not None and asked > most:
        raise ConfigError(f"judge.max_context {asked} exceeds the {most} tokens that the judge was made for: lower it.")
    found = asked or min(most, LONGEST_CONTEXT)
    replies = [r.max_reply_tokens for e in config.data for r in e.reward if r.type == "judge" and r.asks_own_judge]
    if max(replies) >= found:
        raise ConfigError(
            f"the reward 'judge' may reply with max_reply_tokens {max(replies)}, which leaves no room for a question "
            f"in the judge's context of {found} tokens: lower it, or choose another judge.model."
        )
    return found


def judge_specs(config: GeneratingConfig, path: Path, run: RunDirectory | None) -> list[EngineSpec]:
    """Return one spec per engine of the judge."""
    judge = config.judge
    assert judge is not None
    kind = judge_kind(config)
    able = engine_capabilities(kind)
    context, cache = judge_context(config, path), judge.kv_cache_bytes
    if cache is None and not able.reserves_kv_cache:
        one_request = context * describe_model(path).kv_bytes_per_token(2 if judge.dtype == "bfloat16" else 4)
        cache = None if one_request <= CPU_CACHE_BYTES else REQUESTS_AT_LEAST * one_request
    # Verdict requests arrive one by one, so batching them would only add latency.
    options = {**able.trickling_options, **judge.options}
    return [
        EngineSpec(
            engine_id=f"judge-{index}",
            kind=kind,
            model_path=str(path),
            dtype=judge.dtype,
            max_context=context,
            max_num_seqs=judge.max_num_seqs,
            kv_cache_bytes=cache,
            tensor_parallel=judge.tensor_parallel,
            seed=config.seed,
            num_threads=config.training.num_threads,
            trust_remote_code=judge.trust_remote_code,
            options=options,
            log_path=run.log_path("judge", index) if run else None,
        )
        for index in range(config.num_judges)
    ]
