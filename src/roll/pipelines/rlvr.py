"""Reinforcement learning with verifiable rewards, synchronous:

    generate → reward → filter → advantages → train → sync → evaluate

Work up to `advantages` may be thrown away at any moment (a signal, a crash): it changes nothing that lasts. What
follows runs to the step's boundary, where the run can be saved.
"""

from __future__ import annotations

from dataclasses import replace

from roll.data.samples import build_batch
from roll.pipelines import measures
from roll.pipelines.evaluate import evaluate
from roll.pipelines.learning import Selection, select, settle, weigh
from roll.pipelines.parts import Parts
from roll.pipelines.stop import Interrupted
from roll.types import Group, TrainingBatch
from roll.weights import SyncReport

__all__ = ["run"]


async def run(parts: Parts) -> None:
    """Run the remaining steps.

    Raises:
        Interrupted: a signal asked for a stop; everything up to the last step's boundary is saved.
    """
    config, state = parts.config, parts.state
    try:
        with parts.spans.phase("sync"):
            await _sync(parts)
        await _evaluate_if_due(parts)
        while state.step < config.training.num_steps:
            with parts.spans.step(state.step + 1):
                groups, selection = await parts.stop.unless(_generate(parts))
                await _learn(parts, groups, selection)
                await _evaluate_if_due(parts)
                if parts.checkpointer.due(state):
                    await _save(parts)
    except Interrupted:
        _return_to_boundary(parts)
        await _save(parts)
        raise
    if config.checkpoint.at_end:
        await _save(parts)


async def _generate(parts: Parts) -> tuple[list[Group], Selection]:
    """Draw prompts, answer and score them, weigh the answers."""
    with parts.spans.phase("generate"):
        draws = parts.data.train.draw(parts.config.rollout.prompts_per_step)
        parts.ledger.open(draws, parts.state.step + 1)
        groups = await parts.scheduler.collect(draws, parts.train_plan)
    with parts.spans.phase("advantages"):
        return groups, select(
            groups,
            parts.config.algorithm,
            max_length=parts.config.rollout.max_new_tokens,
            moments=parts.state.moments,
        )


async def _learn(parts: Parts, groups: list[Group], selection: Selection) -> None:
    """Update the policy, bring it to the engines, and cross the step's boundary."""
    state, config = parts.state, parts.config
    step = state.step + 1
    metrics = measures.rollout_metrics(groups) | measures.selection_metrics(selection)
    advantages: dict[str, float] = {}
    if selection.rollouts:
        batch = build_batch(
            selection.rollouts, temperature=config.rollout.temperature, max_length=config.rollout.max_new_tokens
        )
        batch = weigh(await _with_reference(parts, batch), selection, config.algorithm)
        advantages = measures.mean_advantages(batch)
        with parts.spans.phase("train"):
            result = await parts.trainer.train_step(batch, parts.loss)
        metrics |= measures.training_metrics(result) | measures.agreement(batch, result)
        if result.stepped:
            state.policy_version += 1
            with parts.spans.phase("sync"):
                metrics |= (await _sync(parts)).metrics()
    settle(parts.ledger, selection, step)
    state.step = step
    state.moments = selection.moments
    state.data = parts.data.train.state()
    state.rewards.append(metrics["reward/mean"])
    metrics |= {f"ledger/{fate}": float(count) for fate, count in parts.ledger.counts().items()}
    metrics |= {"policy_version": float(state.policy_version)}
    metrics |= {
        "engines/replaced": float(parts.proxy.num_replaced),
        "engines/reissued": float(parts.proxy.num_reissued),
    }
    with parts.spans.phase("record"):
        parts.tracker.log_rollouts(step, groups, advantages)
        parts.tracker.log_step(step, metrics | parts.spans.metrics())


async def _sync(parts: Parts) -> SyncReport:
    """Bring the weights to every engine; one that died meanwhile is replaced and brought to them as well."""
    await parts.proxy.settle()
    report = await parts.weights.push(parts.state.policy_version)
    await parts.proxy.restore(report.dead)
    return report


async def _with_reference(parts: Parts, batch: TrainingBatch) -> TrainingBatch:
    """Add `ref_logprobs`, where the KL penalty needs them."""
    if parts.reference is None:
        return batch
    with parts.spans.phase("reference"):
        logprobs = await parts.reference.logprobs(batch)
    samples = tuple(replace(s, ref_logprobs=ref) for s, ref in zip(batch.samples, logprobs, strict=True))
    return replace(batch, samples=samples)


async def _evaluate_if_due(parts: Parts) -> None:
    """Evaluate after this step, if the configuration asks for it and it was not done yet."""
    state, config = parts.state, parts.config.evaluation
    last = state.step == parts.config.training.num_steps
    every = config.every_num_steps
    due = config.before_training if state.step == 0 else last or bool(every and state.step % every == 0)
    if due and state.evaluated_at != state.step:
        with parts.spans.phase("evaluate"):
            await parts.stop.unless(evaluate(parts))


def _return_to_boundary(parts: Parts) -> None:
    """Forget draws of a step that did not finish; they will be drawn again."""
    parts.data.train.restore(parts.state.data)
    parts.ledger.forget_in_flight()


async def _save(parts: Parts) -> None:
    with parts.spans.phase("checkpoint"):
        await parts.checkpointer.save(parts.state, parts.ledger)
