"""Preparation of a run before any role starts: the model's files, the prompts, and specs of engines."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll.agents.programs import check_agent
from roll.cluster.decoding import decode_in_worker
from roll.config.engines import EngineRequirement, check_engine
from roll.config.rollout_run import RolloutRunConfig
from roll.config.run import RunConfig
from roll.data import PromptData, build_data, render_held_out
from roll.errors import ConfigError
from roll.inference import EngineSpec, get_engine_capabilities, prestart_engine, resolve_engine_kind
from roll.models import (
    check_experts,
    check_rope_scaling,
    describe_model,
    find_stop_token_ids,
    load_tokenizer,
    read_context_length,
    resolve_model,
)
from roll.models.multimodal import has_media_config, open_media
from roll.pipelines.environments import collect_first_observations
from roll.pipelines.quantization import check_quantization
from roll.rewards.python import check_reward_functions
from roll.rewards.reward_model import check_reward_models
from roll.rollout import SamplingPlan
from roll.rollout.loops import load_user_loop
from roll.running import run_to_end
from roll.tracking import RunDirectory
from roll.types import PromptDraw, SamplingParams

__all__ = [
    "PreparedRun",
    "build_engine_specs",
    "build_sampling_plans",
    "list_engine_ids_by_width",
    "open_media_dir",
    "prepare",
    "prestart_first_engine",
    "select_probe_draws",
]

NUM_PROBES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """The parts of a run that need no device: model files, tokenizer, and prompts."""

    model_path: Path
    tokenizer: Any
    """The model's `transformers` tokenizer."""
    stop_token_ids: tuple[int, ...]
    data: PromptData
    max_context: int
    """Longest context plus answer, in tokens: the context length of engines and the limit of episodes."""


@contextmanager
def open_media_dir(config: RunConfig) -> Iterator[Path]:
    """Yield a temporary media directory for an evaluation without a run directory; delete it at the end.

    The media directory is created next to the run directories, which all nodes of a Ray cluster share.
    """
    place = None
    if config.cluster.type != "local":
        place = Path(config.output_dir)
        place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".media-", dir=place) as directory:
        yield Path(directory).absolute()


@decode_in_worker()
def prepare(config: RolloutRunConfig, media_dir: Path | None = None, *, scores: bool = True) -> PreparedRun:
    """Resolve the model and read the data.

    Args:
        config: Configuration of the run.
        media_dir: The run's media store; `None` keeps images in memory, for a check.
        scores: Whether answers will be scored; if so, rewards are checked.

    Raises:
        UserError: The model, a source or an environment cannot be used, or a prompt is longer than the context.
    """
    if scores:
        check_reward_functions(config.data)
        check_reward_models(config.data)
    check_agent(config.rollout.agent)
    load_user_loop(config.rollout.loop)
    model_path = resolve_model(config.model.path)
    media = open_media(model_path, media_dir, trust_remote_code=config.model.trust_remote_code)
    run_to_end(collect_first_observations(config.data, config.sandbox, media))
    check_experts(model_path, config.training.parallel.ep)
    check_quantization(config, model_path)
    check_adapter_sync(config, model_path)
    tokenizer = load_tokenizer(model_path, trust_remote_code=config.model.trust_remote_code)
    max_context = config.inference.max_context or read_context_length(model_path)
    if max_context <= config.rollout.max_new_tokens:
        longest, generated = map(config.name_key, ("inference.max_context", "rollout.max_new_tokens"))
        raise ConfigError(
            f"{generated} {config.rollout.max_new_tokens} leaves no space for prompts in the context length of "
            f"{max_context} tokens: lower {generated}, or raise {longest} (if the model allows it)."
        )
    data = build_data(
        config.data,
        tokenizer,
        config.seed,
        max_context - config.rollout.max_new_tokens,
        pipeline=config.pipeline,
        media=media,
    )
    clear = config.rollout.agent is None  # the context length of an agent does not follow from the prompts
    if clear and config.inference.max_context is None and data.longest_prompt is not None:
        max_context = min(max_context, data.longest_prompt + config.max_rollout_tokens)
    check_rope_scaling(model_path, max_context, config.name_key("inference.max_context"))
    return PreparedRun(
        model_path=model_path,
        tokenizer=tokenizer,
        stop_token_ids=find_stop_token_ids(model_path),
        data=data,
        max_context=max_context,
    )


def check_adapter_sync(config: RolloutRunConfig, model_path: Path) -> None:
    """Check that engines can apply the adapters of the run to its model, if a weight sync sends only the adapter.

    Raises:
        ConfigError: The engine does not support adapters of a model that reads media or has experts, or other parts of
            a model than its language model have adapters.
    """
    if config.synced_adapter is None:
        return
    kinds = {
        "multimodal_lora": ("reads media", has_media_config(model_path)),
        "moe_lora": ("has experts", describe_model(model_path).num_experts > 1),
    }
    name, alternative = config.model.path, "set weight_sync.lora to merged"
    for capability, (kind, applies) in kinds.items():
        if applies:
            reason = f"weight_sync.lora adapter with '{name}', which {kind},"
            needed = EngineRequirement(capability=capability, reason=reason, alternative=alternative)
            check_engine(config.inference.engine, [needed])
    if has_media_config(model_path) and set(config.model.vision.freeze) != {"tower", "projector"}:
        raise ConfigError(
            f"weight_sync.lora adapter with '{name}', which reads media, supports only adapters of the language model: "
            f"set model.vision.freeze to [tower, projector], or {alternative}."
        )


def prestart_first_engine(config: RunConfig) -> AbstractContextManager[None]:
    """Return a context manager that starts the model-independent part of the first engine in the background."""
    if not isinstance(config, RolloutRunConfig) or not config.starts_engines or config.cluster.type != "local":
        return nullcontext()
    return prestart_engine(config.inference.engine, config.training.num_threads)


def build_sampling_plans(config: RolloutRunConfig, stop_ids: tuple[int, ...]) -> tuple[SamplingPlan, SamplingPlan]:
    """Return the sampling plans of training and evaluation."""
    rollout, evaluation = config.rollout, config.evaluation
    sampling = SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=stop_ids,
    )
    return (
        SamplingPlan(purpose="train", group_size=rollout.group_size, sampling=sampling),
        SamplingPlan(
            purpose="eval",
            group_size=evaluation.samples_per_prompt,
            sampling=replace(sampling, temperature=evaluation.temperature),
        ),
    )


def build_engine_specs(
    config: RolloutRunConfig,
    prepared: PreparedRun,
    run: RunDirectory | None,
    *,
    released: Collection[int] = (),
    is_trained: bool = False,
) -> list[EngineSpec]:
    """Return one spec per engine of the device mapping, for every width of `inference.tensor_parallel`.

    Args:
        config: Configuration of the run.
        prepared: The model's files and the prompts.
        run: Run directory for the engines' logs.
        released: Indices of the engines that free their memory while trainers compute, if they support it.
        is_trained: Whether a trainer syncs its weights to the engines.
    """
    can_sleep, devices = get_engine_capabilities(config.inference.engine).can_sleep, config.roles["actor_infer"]
    return [
        EngineSpec(
            engine_id=f"engine-{index}",
            kind=resolve_engine_kind(config.inference.engine),
            model_path=str(prepared.model_path),
            dtype=config.model.dtype,
            max_context=prepared.max_context,
            max_num_seqs=config.inference.max_num_seqs,
            kv_cache_bytes=config.inference.kv_cache_bytes,
            quantization=config.inference.quantization,
            tensor_parallel=len(part),
            seed=config.seed,
            num_threads=config.training.num_threads,
            sleeps=can_sleep and (index in released or len(devices.widths) > 1),
            lora=config.synced_adapter if is_trained else None,
            records_experts=config.training.router_replay == "engine",
            trust_remote_code=config.model.trust_remote_code,
            options=config.inference.options,
            log_path=run.get_log_path("engine", index) if run else None,
        )
        for index, part in enumerate(devices.list_parts())
    ]


def list_engine_ids_by_width(specs: Sequence[EngineSpec]) -> dict[int, list[str]]:
    """List the ids of the engines with each number of devices, in the order of the specs."""
    found: dict[int, list[str]] = {}
    for spec in specs:
        found.setdefault(spec.tensor_parallel, []).append(spec.engine_id)
    return found


def select_probe_draws(data: PromptData) -> list[PromptDraw]:
    """Return the probe prompts, which trainer and engines score after each weight sync."""
    return data.get_evaluation_draws(NUM_PROBES) or render_held_out(data.train.peek(NUM_PROBES), data.renderer)
