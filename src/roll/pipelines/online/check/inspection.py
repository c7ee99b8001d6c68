"""Checks of an online run before it starts; they take seconds.

configuration ──► machine, model's sizes, prompts ──► arithmetic, memory, disk, one prompt, one reward ──► report
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from roll.config.estimate import JudgeEngines, estimate_disk_use
from roll.config.rollout_run import RolloutRunConfig
from roll.errors import ConfigError
from roll.media import MediaStore
from roll.pipelines.colocation import explain_sharing_rule, resolve_sharing_rule
from roll.pipelines.engine_checks import check_engines, check_heads
from roll.pipelines.online.check.estimate import (
    NO_EXTRA_MEMORY,
    ExtraMemory,
    RunSizes,
    compute_run_sizes,
    estimate_memory_by_role,
    estimate_rollout_bytes,
)
from roll.pipelines.weight_store import check_weight_store
from roll.preflight.inspection import (
    check_backend_and_placement,
    check_disk,
    check_memory,
    inspect_model,
    inspect_policy,
    run_checks,
)
from roll.preflight.layout import check_layout
from roll.preflight.machine import inspect_machine
from roll.preflight.report import Report
from roll.running import run_to_end
from roll.types import IntArray, MediaSpan, Prompt

if TYPE_CHECKING:
    from roll.data.chat import ChatRenderer

__all__ = ["inspect_run"]

C = TypeVar("C", bound=RolloutRunConfig)

MAX_REFERENCES = 20_000
"""Maximum number of prompts per source whose references are scored as answers."""
MAX_DRAWS = 256
"""Maximum number of draws to find an example of every domain."""


def inspect_run(
    config: C,
    method: str,
    *checks: Callable[[Report, C], None],
    extra_memory: Callable[[Report, C, RunSizes], ExtraMemory] = lambda report, config, batch: NO_EXTRA_MEMORY,
    trained_per_group: tuple[int, int] | None = None,
) -> Report:
    """Check a run that generates rollouts before it starts, and return the report.

    Args:
        config: Configuration of the run.
        method: Name of the method.
        checks: Checks of the pipeline, which run after the check of the model.
        extra_memory: Returns the memory that the pipeline needs in addition to policy, engines and judge.
        trained_per_group: Argument of `compute_run_sizes`.
    """
    return run_checks(
        Report(config=config, method=f"{method}, {config.training.num_steps} steps", machine=inspect_machine()),
        config,
        _check_roles,
        lambda _, config: check_weight_store(config),
        _check_model,
        *checks,
        check_layout,
        _check_judge,
        _check_configured_reward_models,
        _check_prompts,
        _check_tests,
        _check_references,
        partial(_estimate, extra_memory=extra_memory, trained_per_group=trained_per_group),
        check_disk,
        _try_rewards_on_examples,
    )


def _check_roles(report: Report, config: RolloutRunConfig) -> None:
    from roll.agents.programs import check_agent
    from roll.rollout.loops import load_user_loop

    check_agent(config.rollout.agent)
    load_user_loop(config.rollout.loop)
    check_backend_and_placement(report, config)
    from roll.inference import get_engine_capabilities, resolve_engine_kind
    from roll.pipelines.quantization import describe_quantization

    report.engine_kind = resolve_engine_kind(config.inference.engine)
    check_engines(config)
    _check_continuations(report, config)
    report.notes += describe_quantization(config)
    rule = resolve_sharing_rule(config, accelerated=report.machine.has_accelerators)
    if explanation := explain_sharing_rule(config, accelerated=report.machine.has_accelerators):
        report.notes.append(f"{explanation}.")
    if len(widths := config.inference.widths) > 1:
        report.notes.append(
            f"engines of {' and '.join(map(str, widths))} devices use the same devices: those of one width generate, "
            "and the others sleep."
        )
    capabilities = get_engine_capabilities(config.inference.engine)
    report.notes += [capabilities.test_note] if capabilities.test_note else []
    report.is_colocated = rule != "disaggregated" and capabilities.can_sleep


def _check_continuations(report: Report, config: RolloutRunConfig) -> None:
    """Add a note if the engine continues an interrupted answer with different random numbers."""
    from roll.inference import get_engine_capabilities

    kind = report.engine_kind or config.inference.engine
    if "speculative_config" in config.inference.options:
        cause = "speculative decoding draws a varying number of random numbers per token"
    elif not get_engine_capabilities(kind).continues_sampling:
        cause = f"engine '{kind}' does not declare the capability `continues_sampling`"
    else:
        return
    report.notes.append(
        "An answer that continues on another engine, or after a weight sync with `pause_mode: abort`, depends on where "
        f"it was interrupted: {cause}. Each token still comes from the policy's distribution."
    )


def _check_model(report: Report, config: RolloutRunConfig) -> None:
    report.model = inspect_policy(report, config.model)
    if report.model is not None:
        _check_quantization(config)
    if report.model is not None:
        _check_adapters(config)
    if report.model is not None:
        _check_context(config, report.model.context_length)
        check_heads(config, report.model.num_heads)


def _check_adapters(config: RolloutRunConfig) -> None:
    from roll.models import find_model
    from roll.pipelines.preparation import check_adapter_sync

    if directory := find_model(config.model.path):
        check_adapter_sync(config, directory)


def _check_quantization(config: RolloutRunConfig) -> None:
    from roll.models import find_model
    from roll.pipelines.quantization import check_quantization

    if directory := find_model(config.model.path):
        check_quantization(config, directory)


def _check_judge(report: Report, config: RolloutRunConfig) -> None:
    if config.judge is None:
        return
    from roll.inference import get_engine_capabilities
    from roll.models import find_model
    from roll.pipelines.judge.specs import compute_judge_context, resolve_judge_kind
    from roll.pipelines.quantization import check_judge_quantization

    kind, path = resolve_judge_kind(config), config.judge.model
    if (directory := find_model(path, allow_quantized=True)) is not None:
        check_judge_quantization(config.judge, directory)
    sizes = inspect_model(report, path, "the judge's model", allow_quantized=get_engine_capabilities(kind).quantization)
    if sizes is not None:
        report.judge = JudgeEngines(sizes=sizes, kind=kind, max_context=compute_judge_context(config, path))


def _check_context(config: RolloutRunConfig, context_length: int) -> None:
    max_context = config.inference.max_context
    if max_context is not None and max_context > context_length:
        raise ConfigError(
            f"inference.max_context must be <= {context_length}, the context length of the model, got {max_context}: "
            "lower inference.max_context."
        )
    if config.rollout.max_new_tokens >= (max_context or context_length):
        raise ConfigError(
            f"rollout.max_new_tokens {config.rollout.max_new_tokens} leaves no space for prompts in the context "
            f"length of {max_context or context_length} tokens: lower rollout.max_new_tokens."
        )


def _check_prompts(report: Report, config: RolloutRunConfig) -> None:
    from roll.data import build_data
    from roll.data.media_text import count_media_tokens
    from roll.models import check_rope_scaling, find_model, load_tokenizer
    from roll.models.multimodal import open_media
    from roll.pipelines.environments import collect_first_observations
    from roll.rollout.episode_start import EpisodePlan, add_first_observation

    directory = None if report.model is None else find_model(config.model.path)
    if report.model is None or directory is None:
        _report_prompt_counts(report, config)
        return
    media = open_media(directory, None, trust_remote_code=config.model.trust_remote_code)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    context = config.inference.max_context or report.model.context_length
    if context <= config.rollout.max_new_tokens:
        return  # a problem already
    data = build_data(
        config.data,
        tokenizer,
        config.seed,
        context - config.rollout.max_new_tokens,
        pipeline=config.pipeline,
        media=media,
    )
    report.longest_prompt = data.longest_prompt or context - config.rollout.max_new_tokens
    report.media_per_prompt = data.max_media_tokens
    wanted = report.longest_prompt + config.max_rollout_tokens
    report.max_context = config.inference.max_context or min(context, wanted)
    check_rope_scaling(directory, report.max_context, "inference.max_context")
    report.train_prompts = {domain: entry["num_prompts"] for domain, entry in data.train.state().items()}
    report.num_held_out = len(data.held_out)
    begun = run_to_end(collect_first_observations(config.data, config.sandbox, media))
    for _ in range(MAX_DRAWS):
        (draw,) = data.train.draw(1)
        if draw.prompt.environment is not None and draw.prompt.domain in begun:
            draw = add_first_observation(
                draw, begun[draw.prompt.domain], data.renderer, EpisodePlan(max_context=context)
            )
            # Each turn shows as many images as the first observation.
            seen = count_media_tokens(draw.media, media) * draw.prompt.turns
            report.media_per_prompt = max(report.media_per_prompt, seen)
        report.sample = report.sample or (
            draw.prompt,
            _decode_with_media(data.renderer, draw.token_ids, draw.media),
            len(draw.token_ids),
        )
        report.examples.setdefault(draw.prompt.domain, draw.prompt)
        if len(report.examples) == len(config.data):
            break


def _decode_with_media(renderer: ChatRenderer, token_ids: IntArray, media: Sequence[MediaSpan]) -> str:
    """Decode a prompt, with `[image …]` instead of the tokens of each image."""
    pieces, at = [], 0
    for span in media:
        pieces += [renderer.decode(token_ids[at : span.start]), f"[{span.kind} {span.digest[:12]}]"]
        at = span.end
    return "".join([*pieces, renderer.decode(token_ids[at:])])


def _report_prompt_counts(report: Report, config: RolloutRunConfig) -> None:
    """Report each source's number of prompts without a tokenizer: read the prompts, but do not render them."""
    from roll.data.build import load_source

    for entry in config.data:
        domain = entry.domain or entry.source
        # Without the model, it is unknown which media it reads, so all are read.
        training, held_out = load_source(entry, domain, config.seed, config.pipeline, MediaStore(None))
        report.examples[domain] = training[0]
        report.train_prompts[domain] = len(training)
        report.num_held_out += len(held_out)


def _open_store(config: RolloutRunConfig) -> MediaStore | None:
    """Return a store in memory for the media of rows; `None` for a text-only model."""
    from roll.models import find_model
    from roll.models.multimodal import open_media

    directory = find_model(config.model.path)
    if directory is None:
        return MediaStore(None)
    media = open_media(directory, None, trust_remote_code=config.model.trust_remote_code)
    return None if media is None else media.store


def _check_tests(report: Report, config: RolloutRunConfig) -> None:
    if any(reward.needs_sandbox for entry in config.data for reward in entry.reward):
        from roll.preflight.rewards import describe_bad_tests

        report.notes += describe_bad_tests(config.data, config.sandbox, config.seed, _open_store(config))


def _check_references(report: Report, config: RolloutRunConfig) -> None:
    from roll.data.build import load_source
    from roll.preflight.references import find_bad_references

    prompts: dict[str, list[Prompt]] = {}
    store = _open_store(config)
    for entry in config.data:
        domain = entry.domain or entry.source
        training, _ = load_source(entry, domain, config.seed, config.pipeline, store)
        prompts[domain] = [training[index] for index in range(min(len(training), MAX_REFERENCES))]
    for check in run_to_end(find_bad_references(config.data, prompts)):
        (report.problems if check.is_rejected else report.notes).append(str(check))


def _estimate(
    report: Report,
    config: C,
    *,
    extra_memory: Callable[[Report, C, RunSizes], ExtraMemory],
    trained_per_group: tuple[int, int] | None,
) -> None:
    from roll.pipelines.quantization import describe_sync

    model = report.model
    if not report.train_prompts:
        return
    longest = report.longest_prompt or 0
    batch = compute_run_sizes(
        config,
        longest_prompt=longest,
        train_prompts=report.train_prompts,
        held_out_prompts=report.num_held_out,
        trained_per_group=trained_per_group,
        media_per_prompt=report.media_per_prompt,
    )
    report.batch = list(_describe_batch(batch, config, report.train_prompts))
    if not report.num_held_out:
        report.notes.append("no source has held-out prompts, so the run is not evaluated.")
    if model is None or report.engine_kind is None:
        return
    report.batch += describe_sync(config, model)
    context = report.max_context or config.inference.max_context or longest + config.max_rollout_tokens
    more = extra_memory(report, config, batch)
    recorded = estimate_rollout_bytes(config, batch, longest)
    report.disk = estimate_disk_use(
        config,
        config.training,
        model,
        config.training.num_steps,
        num_other_parameters=more.num_trained,
        rollout_bytes=recorded,
    )
    report.memory = estimate_memory_by_role(
        config,
        model,
        batch,
        engine_kind=report.engine_kind,
        max_context=context,
        on_accelerator=report.machine.has_accelerators,
        judge=report.judge,
        extra=more,
    )
    check_memory(report)


def _check_configured_reward_models(report: Report, config: RolloutRunConfig) -> None:
    from roll.rewards.reward_model import check_reward_models

    check_reward_models(config.data)


def _try_rewards_on_examples(report: Report, config: RolloutRunConfig) -> None:
    """Score example answers to one prompt of every domain except environments, in a worker process, as in a run."""
    entries = {entry.domain or entry.source: entry for entry in config.data}
    # the reward of an environment comes from playing: there is no answer to try
    examples = [(entries[domain], p) for domain, p in report.examples.items() if p.environment is None]
    asking = sorted({p.domain for entry, p in examples if any(reward.uses_own_judge for reward in entry.reward)})
    if asking:
        report.notes.append(f"the judge answers only during a run, so the reward of {', '.join(asking)} is not tested.")
        examples = [(entry, p) for entry, p in examples if p.domain not in asking]
    if not examples:
        return
    from roll.preflight.rewards import try_rewards

    report.trials = run_to_end(try_rewards(config.sandbox, examples, report.notes.append))
    for trial in report.trials:
        if not trial.prefers_correct:
            report.notes.append(
                f"the reward of '{trial.domain}' is {trial.correct_reward:g} for the reference answer "
                f"{trial.correct_answer!r} and {trial.incorrect_reward:g} for {trial.incorrect_answer!r}: check "
                "whether the reward requires a format that the bare answer does not have."
            )


def _describe_batch(batch: RunSizes, config: RolloutRunConfig, train_prompts: Mapping[str, int]) -> Iterator[str]:
    rollout, training = config.rollout, config.training
    yield (
        f"{rollout.prompts_per_step} prompts x {rollout.group_size} = {batch.rollouts_per_step} rollouts per step, "
        f"up to {batch.generated_tokens:,} generated tokens"
    )
    shared = "prompts shared within groups" if training.share_prefix else "prompts repeated"
    yield (
        f"up to {batch.trained_tokens:,} trained tokens per step ({shared}): about {batch.micro_batches} "
        f"micro-batch{'es' if batch.micro_batches > 1 else ''} of {batch.tokens_per_micro_batch:,} per rank"
    )
    if batch.evaluation_samples:
        samples = config.evaluation.samples_per_prompt
        yield (
            f"evaluation {batch.num_evaluations} times: {batch.evaluation_samples // samples} prompts x {samples} = "
            f"{batch.evaluation_samples} samples"
        )
    for domain, epochs in batch.epochs.items():
        yield f"{domain}: {train_prompts[domain]:,} prompts to train on, {epochs:.2g} epochs in the run"
    yield (
        "the step time can be measured only after the first step, because it depends on the length of the model's "
        "answers"
    )
