"""Everything that can be known of a run before it starts, in seconds. Touches no weights.

    configuration ──► machine, model's sizes, prompts ──► arithmetic, memory, disk, one prompt, one reward ──► report

What stops a run is collected, so that one look shows all of it; the report is printed first, then the problems.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from roll.config.estimate import (
    JudgeEngines,
    batch_arithmetic,
    disk_use,
    memory_by_role,
)
from roll.config.run import RLVRConfig
from roll.config.truncation import truncation_note
from roll.errors import ConfigError, DataError, RunDirectoryError, UserError
from roll.preflight.machine import free_disk, inspect_machine
from roll.preflight.report import Report
from roll.running import run_to_end

__all__ = ["inspect"]

MAX_DRAWS = 256
"""Draws after which a domain with a tiny weight is left without an example."""


def inspect(config: RLVRConfig) -> Report:
    """Find out all that can be known before a run."""
    report = Report(config=config, machine=inspect_machine())
    models = (_look_at_model, _look_at_judge)
    for look in (_look_at_places, *models, _look_at_prompts, _look_at_tests, _estimate, _look_at_disk, _try_rewards):
        with _collecting(report):
            look(report)
    return report


@contextlib.contextmanager
def _collecting(report: Report) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if str(error) not in report.problems:
            report.problems.append(str(error))


def _look_at_places(report: Report) -> None:
    config = report.config
    if config.cluster.type == "ray":
        from roll.cluster.devices import place

        report.placement = place(config, config.cluster.devices_per_node or report.machine.devices)
    from roll.inference import resolve_engine_kind

    report.engine_kind = resolve_engine_kind(config.inference.engine)


def _look_at_model(report: Report) -> None:
    from roll.models import CATALOGUE, describe_model, find_model

    path = report.config.model.path
    report.model_is_here = find_model(path) is not None
    if report.model_is_here or path in CATALOGUE:
        report.model = describe_model(path)
    if not report.model_is_here:
        what = "prepare it (about 20 s)" if path in CATALOGUE else "download it"
        report.notes.append(f"the model '{path}' is not here yet: the run will {what} first.")
    if report.model is not None:
        _check_context(report.config, report.model.context_length)
    backbone = report.config.algorithm.critic.model
    if report.config.algorithm.uses_critic and backbone is not None:
        if find_model(backbone) is not None or backbone in CATALOGUE:
            report.critic = describe_model(backbone)
        else:
            report.notes.append(f"the critics' model '{backbone}' is not here yet: the run will download it first.")


def _look_at_judge(report: Report) -> None:
    from roll.models import CATALOGUE, describe_model, find_model

    judge = report.config.judge
    if judge is None:
        return
    from roll.cluster.judge import judge_context, judge_kind

    kind = judge_kind(report.config)
    path = find_model(judge.model)
    if path is None:
        how = "prepare it" if judge.model in CATALOGUE else "download it"
        report.notes.append(f"the judge's model '{judge.model}' is not here yet: the run will {how} first.")
        return
    report.judge = JudgeEngines(
        sizes=describe_model(judge.model), kind=kind, max_context=judge_context(report.config, path)
    )


def _check_context(config: RLVRConfig, context_length: int) -> None:
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


def _look_at_prompts(report: Report) -> None:
    config = report.config
    if not report.model_is_here or report.model is None:
        _count_prompts(report)
        return
    from roll.data import ChatRenderer, build_data
    from roll.envs import longest_rollout
    from roll.models import load_tokenizer

    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    context = config.inference.max_context or report.model.context_length
    if context <= config.rollout.max_new_tokens:
        return  # a problem already
    longest = longest_rollout(config.data, config.rollout.max_new_tokens, ChatRenderer(tokenizer), context)
    data = build_data(config.data, tokenizer, config.seed, context - longest)
    report.longest_rollout = longest
    report.longest_prompt = data.longest_prompt or context - longest
    report.train_prompts = {domain: entry["num_prompts"] for domain, entry in data.train.state().items()}
    report.num_held_out = len(data.held_out)
    for _ in range(MAX_DRAWS):
        (draw,) = data.train.draw(1)
        report.sample = report.sample or (draw.prompt, data.renderer.decode(draw.token_ids), len(draw.token_ids))
        report.examples.setdefault(draw.prompt.domain, draw.prompt)
        if len(report.examples) == len(config.data):
            break


def _count_prompts(report: Report) -> None:
    """Without a tokenizer: read the sources, render nothing."""
    from roll.data.build import SOURCES

    for entry in report.config.data:
        domain = entry.domain or entry.source
        training, held_out = SOURCES.get(entry.source.partition(":")[0])(entry, domain, report.config.seed)
        if not training:
            raise DataError(f"data source '{domain}' leaves no prompt for training: lower its held_out.")
        report.examples[domain] = training[0]
        report.train_prompts[domain] = len(training)
        report.num_held_out += len(held_out)


def _look_at_tests(report: Report) -> None:
    if any(reward.needs_sandbox for entry in report.config.data for reward in entry.reward):
        from roll.preflight.code_tests import notes_on_tests

        report.notes += notes_on_tests(report.config)


def _estimate(report: Report) -> None:
    config, model = report.config, report.model
    if not report.train_prompts:
        return
    longest = report.longest_prompt or 0
    report.batch = batch_arithmetic(
        config,
        longest_prompt=longest,
        train_prompts=report.train_prompts,
        held_out_prompts=report.num_held_out,
    )
    if not report.num_held_out:
        report.notes.append("no source holds prompts out, so the run is not evaluated.")
    truncation = truncation_note(config.algorithm, config.rollout)
    report.notes += [truncation] if truncation else []
    if model is None or report.engine_kind is None:
        return
    context = config.inference.max_context or longest + (report.longest_rollout or config.max_answer_tokens)
    report.disk = disk_use(config, model, report.batch, longest_prompt=longest, critic_sizes=report.critic)
    report.memory = memory_by_role(
        config,
        model,
        report.batch,
        engine_kind=report.engine_kind,
        max_context=context,
        on_accelerator=bool(report.machine.accelerator_bytes),
        critic_sizes=report.critic,
        judge=report.judge,
    )
    _compare_memory(report)


def _compare_memory(report: Report) -> None:
    """Note what does not fit: every accelerator on its own, or main memory for everything together."""
    accelerators = report.machine.accelerator_bytes
    if not accelerators:
        needed = sum(role.bytes_total for role in report.memory)
        if needed > report.machine.memory_bytes:
            report.notes.append(_too_little("this machine", needed, report.machine.memory_bytes))
        return
    for device, needed in _bytes_by_device(report).items():
        free = accelerators[device % len(accelerators)]
        if needed > free:
            report.notes.append(_too_little(f"device {device}", needed, free))


def _bytes_by_device(report: Report) -> dict[int, int]:
    mapping = report.config.cluster.device_mapping
    needed: dict[int, int] = {}
    for role in report.memory:
        devices = report.config.judge_devices if role.role == "judge" else mapping.devices(role.role)
        for device in devices:  # several critics share theirs, the devices of an engine share its memory
            needed[device] = needed.get(device, 0) + role.bytes_total // len(devices)
    return needed


def _too_little(where: str, needed: int, free: int) -> str:
    return (
        f"{where} has {free / 2**30:.1f} GiB free and the run needs up to {needed / 2**30:.1f} GiB: lower "
        "training.max_tokens_per_micro_batch, set training.activation_checkpointing=true, or train adapters "
        "(model.lora)."
    )


def _look_at_disk(report: Report) -> None:
    run_dir = report.config.run_dir
    if (run_dir / "config.yaml").exists():
        report.problems.append(
            f"run directory '{run_dir}' holds a run already: continue it with `roll resume {run_dir}`, or give this "
            "run another name (`name=…`)."
        )
    elif run_dir.is_dir() and any(run_dir.iterdir()):
        raise RunDirectoryError(f"run directory '{run_dir}' is not empty: give this run another name (`name=…`).")
    report.free_disk_bytes = free_disk(Path(run_dir))
    if report.disk is not None and report.disk.peak_bytes > report.free_disk_bytes:
        report.notes.append(
            f"the run writes up to {report.disk.peak_bytes / 2**30:.1f} GiB and the disk has "
            f"{report.free_disk_bytes / 2**30:.1f} GiB free: lower checkpoint.keep_last, or choose another output_dir."
        )


def _try_rewards(report: Report) -> None:
    """Score one prompt of every domain that has answers, in a worker process as a run does."""
    entries = {entry.domain or entry.source: entry for entry in report.config.data}
    # a game's reward comes from playing it: there is no answer to try
    examples = [(entries[domain], p) for domain, p in report.examples.items() if p.environment is None]
    asking = sorted({p.domain for entry, p in examples if any(reward.asks_own_judge for reward in entry.reward)})
    if asking:
        report.notes.append(f"the judge answers only during a run, so the reward of {', '.join(asking)} is not tried.")
        examples = [(entry, p) for entry, p in examples if p.domain not in asking]
    if not examples:
        return
    from roll.preflight.rewards import try_rewards

    report.trials = run_to_end(try_rewards(report.config, examples))
    for trial in report.trials:
        if not trial.tells_apart:
            report.notes.append(
                f"the reward of '{trial.domain}' gives its own reference answer {trial.right!r} "
                f"{trial.right_value:g} and {trial.wrong!r} {trial.wrong_value:g}: see whether it asks for a form "
                "that the bare answer does not have."
            )
