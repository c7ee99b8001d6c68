"""The inspection of a run before it starts, in seconds.

configuration ──► machine, model's sizes, prompts ──► arithmetic, memory, disk, one prompt, one reward ──► report
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

from roll.config.activation_memory import element_bytes
from roll.config.estimate import JudgeEngines, disk_use, num_quantized_parameters, sync_bytes
from roll.config.generating import GeneratingConfig
from roll.errors import ConfigError
from roll.pipelines.colocation import offloads_colocated
from roll.pipelines.engine_checks import check_engines
from roll.pipelines.online.check.estimate import (
    NOTHING_FURTHER,
    BatchArithmetic,
    ExtraMemory,
    batch_arithmetic,
    memory_by_role,
    rollout_bytes,
)
from roll.preflight.inspection import check_disk, check_roles, compare_memory, describe_role, run_checks
from roll.preflight.layout import check_layout
from roll.preflight.machine import inspect_machine
from roll.preflight.report import Report
from roll.running import run_to_end
from roll.types import Prompt

__all__ = ["inspect_run"]

C = TypeVar("C", bound=GeneratingConfig)

MAX_REFERENCES = 20_000
"""Largest number of prompts of a source whose references are scored against themselves."""
MAX_DRAWS = 256
"""Largest number of draws in search of an example of every domain."""


def inspect_run(
    config: C,
    method: str,
    *looks: Callable[[Report, C], None],
    further: Callable[[Report, C, BatchArithmetic], ExtraMemory] = lambda report, config, batch: NOTHING_FURTHER,
    trained_per_group: tuple[int, int] | None = None,
) -> Report:
    """Check a run before it starts.

    Args:
        config: Configuration of the run.
        method: Name of the method.
        looks: Checks of the pipeline, which run after the check of the model.
        further: Returns the pipeline's memory apart from policy, engines and judge.
        trained_per_group: See `batch_arithmetic`.
    """
    return run_checks(
        Report(config=config, method=f"{method}, {config.training.num_steps} steps", machine=inspect_machine()),
        config,
        _look_at_roles,
        _look_at_model,
        *looks,
        check_layout,
        _look_at_judge,
        _look_at_reward_models,
        _look_at_prompts,
        _look_at_tests,
        _look_at_references,
        partial(_estimate, further=further, trained_per_group=trained_per_group),
        check_disk,
        _try_rewards,
    )


def _look_at_roles(report: Report, config: GeneratingConfig) -> None:
    from roll.agents.programs import check_agent
    from roll.rollout.loops import load_own_loop

    check_agent(config.rollout.agent)
    load_own_loop(config.rollout.loop)
    check_roles(report, config)
    from roll.inference import resolve_engine_kind

    report.engine_kind = resolve_engine_kind(config.inference.engine)
    check_engines(config)
    report.hands_over = offloads_colocated(config, accelerated=report.machine.has_accelerators)


def _look_at_model(report: Report, config: GeneratingConfig) -> None:
    report.model = describe_role(report, config.model.path, "the model")
    if report.model is not None and config.inference.quantization != "none":
        _look_at_linear_weights(config)
    if report.model is not None:
        _check_context(config, report.model.context_length)


def _look_at_linear_weights(config: GeneratingConfig) -> None:
    from roll.models import check_linear, find_model

    if directory := find_model(config.model.path):
        check_linear(directory)


def _look_at_judge(report: Report, config: GeneratingConfig) -> None:
    if config.judge is None:
        return
    from roll.inference import engine_capabilities
    from roll.pipelines.judge.specs import judge_context, judge_kind

    kind, path = judge_kind(config), config.judge.model
    sizes = describe_role(report, path, "the judge's model", allow_quantized=engine_capabilities(kind).quantization)
    if sizes is not None:
        report.judge = JudgeEngines(sizes=sizes, kind=kind, max_context=judge_context(config, path))


def _check_context(config: GeneratingConfig, context_length: int) -> None:
    asked = config.inference.max_context
    if asked is not None and asked > context_length:
        raise ConfigError(
            f"inference.max_context {asked} exceeds the {context_length} tokens that the model was made for: lower it."
        )
    if config.rollout.max_new_tokens >= (asked or context_length):
        raise ConfigError(
            f"rollout.max_new_tokens {config.rollout.max_new_tokens} leaves no room for prompts in a context of "
            f"{asked or context_length} tokens: lower it."
        )


def _look_at_prompts(report: Report, config: GeneratingConfig) -> None:
    from roll.data import build_data
    from roll.models import check_rope_scaling, find_model, load_tokenizer
    from roll.pipelines.environments import first_observations
    from roll.rollout.episode import EpisodePlan, with_first_observation

    directory = None if report.model is None else find_model(config.model.path)
    if report.model is None or directory is None:
        _count_prompts(report, config)
        return
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    context = config.inference.max_context or report.model.context_length
    if context <= config.rollout.max_new_tokens:
        return  # a problem already
    data = build_data(
        config.data, tokenizer, config.seed, context - config.rollout.max_new_tokens, pipeline=config.pipeline
    )
    report.longest_prompt = data.longest_prompt or context - config.rollout.max_new_tokens
    wanted = report.longest_prompt + config.max_rollout_tokens
    report.max_context = config.inference.max_context or min(context, wanted)
    check_rope_scaling(directory, report.max_context, "inference.max_context")
    report.train_prompts = {domain: entry["num_prompts"] for domain, entry in data.train.state().items()}
    report.num_held_out = len(data.held_out)
    begun = run_to_end(first_observations(config.data, config.sandbox, config.pipeline))
    for _ in range(MAX_DRAWS):
        (draw,) = data.train.draw(1)
        if draw.prompt.environment is not None and draw.prompt.domain in begun:
            draw = with_first_observation(
                draw, begun[draw.prompt.domain], data.renderer, EpisodePlan(max_context=context)
            )
        report.sample = report.sample or (draw.prompt, data.renderer.decode(draw.token_ids), len(draw.token_ids))
        report.examples.setdefault(draw.prompt.domain, draw.prompt)
        if len(report.examples) == len(config.data):
            break


def _count_prompts(report: Report, config: GeneratingConfig) -> None:
    """Count prompts without a tokenizer: read the sources and render nothing."""
    from roll.data.build import load_source

    for entry in config.data:
        domain = entry.domain or entry.source
        training, held_out = load_source(entry, domain, config.seed, config.pipeline)
        report.examples[domain] = training[0]
        report.train_prompts[domain] = len(training)
        report.num_held_out += len(held_out)


def _look_at_tests(report: Report, config: GeneratingConfig) -> None:
    if any(reward.needs_sandbox for entry in config.data for reward in entry.reward):
        from roll.preflight.rewards import notes_on_tests

        report.notes += notes_on_tests(config.data, config.sandbox, config.seed)


def _look_at_references(report: Report, config: GeneratingConfig) -> None:
    from roll.data.build import load_source
    from roll.preflight.references import references_of_sources

    prompts: dict[str, list[Prompt]] = {}
    for entry in config.data:
        domain = entry.domain or entry.source
        training, _ = load_source(entry, domain, config.seed, config.pipeline)
        prompts[domain] = [training[index] for index in range(min(len(training), MAX_REFERENCES))]
    for check in run_to_end(references_of_sources(config.data, prompts)):
        (report.problems if check.is_refused else report.notes).append(str(check))


def _estimate(
    report: Report,
    config: C,
    *,
    further: Callable[[Report, C, BatchArithmetic], ExtraMemory],
    trained_per_group: tuple[int, int] | None,
) -> None:
    model = report.model
    if not report.train_prompts:
        return
    longest = report.longest_prompt or 0
    batch = batch_arithmetic(
        config,
        longest_prompt=longest,
        train_prompts=report.train_prompts,
        held_out_prompts=report.num_held_out,
        trained_per_group=trained_per_group,
    )
    report.batch = list(_in_words(batch, config, report.train_prompts))
    if not report.num_held_out:
        report.notes.append("no source holds prompts out, so the run is not evaluated.")
    if model is None or report.engine_kind is None:
        return
    if num_quantized_parameters(config.inference, model):
        sent = sync_bytes(config.inference, model, element_bytes(config.model.dtype))
        report.batch.append(
            f"a weight sync sends {sent / 1e6:,.0f} MB, linear weights as {config.inference.quantization}; engines "
            f"hold them read back, in {config.model.dtype}"
        )
    context = report.max_context or config.inference.max_context or longest + config.max_rollout_tokens
    more = further(report, config, batch)
    recorded = rollout_bytes(config, batch, longest)
    report.disk = disk_use(
        config, config.training, model, config.training.num_steps, num_further=more.num_trained, rollout_bytes=recorded
    )
    report.memory = memory_by_role(
        config,
        model,
        batch,
        engine_kind=report.engine_kind,
        max_context=context,
        on_accelerator=report.machine.has_accelerators,
        judge=report.judge,
        further=more,
    )
    compare_memory(report)


def _look_at_reward_models(report: Report, config: GeneratingConfig) -> None:
    from roll.rewards.reward_model import check_reward_models

    check_reward_models(config.data)


def _try_rewards(report: Report, config: GeneratingConfig) -> None:
    """Score one prompt of every domain that has answers, in a worker process as a run does."""
    entries = {entry.domain or entry.source: entry for entry in config.data}
    # the reward of an environment comes from playing: there is no answer to try
    examples = [(entries[domain], p) for domain, p in report.examples.items() if p.environment is None]
    asking = sorted({p.domain for entry, p in examples if any(reward.asks_own_judge for reward in entry.reward)})
    if asking:
        report.notes.append(f"the judge answers only during a run, so the reward of {', '.join(asking)} is not tried.")
        examples = [(entry, p) for entry, p in examples if p.domain not in asking]
    if not examples:
        return
    from roll.preflight.rewards import try_rewards

    report.trials = run_to_end(try_rewards(config.sandbox, examples))
    for trial in report.trials:
        if not trial.tells_apart:
            report.notes.append(
                f"the reward of '{trial.domain}' gives its own reference answer {trial.right!r} "
                f"{trial.right_value:g} and {trial.wrong!r} {trial.wrong_value:g}: see whether it asks for a form "
                "that the bare answer does not have."
            )


def _in_words(batch: BatchArithmetic, config: GeneratingConfig, train_prompts: Mapping[str, int]) -> Iterator[str]:
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
    yield "how long a step takes is known from a first one alone: it depends on how long the model's answers become"
