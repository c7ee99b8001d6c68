"""Preparation of a supervised run before any role starts: the model's files and the examples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from roll.config.supervised import SupervisedConfig, SupervisedTraining
from roll.data.examples import ExampleKind, Examples, build_examples, count_examples
from roll.errors import ConfigError, DataError
from roll.models import check_experts, check_rope_scaling, context_length, load_tokenizer, resolve_model
from roll.pipelines.engine_checks import check_engines
from roll.pipelines.state import RunState
from roll.training import Schedule, TrainerSpec
from roll.types import TrainingBatch

__all__ = ["Prepared", "held_out_batch", "planned_steps", "policy_spec", "prepare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The parts of a run that need no device."""

    model_path: Path
    examples: Examples
    training: SupervisedTraining
    """Training configuration with the run's number of steps."""


def prepare(
    config: SupervisedConfig, kind: ExampleKind, at: RunState | None = None, *, score_at_end: bool = False
) -> Prepared:
    """Resolve the model and read the data.

    Args:
        config: Configuration of the run.
        kind: Kind of its examples.
        at: State of the run; by default its beginning.
        score_at_end: See `build_examples`.

    Raises:
        UserError: The model or a source cannot be used.
    """
    model_path = resolve_model(config.model.path)
    check_experts(model_path, config.training.parallel.ep)
    if (answering := config.answering()) is not None:
        check_engines(answering)
    longest, asked = context_length(model_path), config.training.max_example_tokens
    if asked is not None and asked > longest:
        raise ConfigError(
            f"training.max_example_tokens {asked} exceeds the {longest} tokens that the model was made for: lower it."
        )
    check_rope_scaling(model_path, asked or longest, "training.max_example_tokens")
    tokenizer = load_tokenizer(model_path, trust_remote_code=config.model.trust_remote_code)
    examples = build_examples(
        config.data, kind, tokenizer, config.seed, asked or longest, score_at_end=score_at_end, pipeline=config.pipeline
    )
    training = _from(config.training, examples.train.num_items, at or RunState())
    return Prepared(model_path=model_path, examples=examples, training=training)


def policy_spec(config: SupervisedConfig, prepared: Prepared) -> TrainerSpec:
    """Return the spec of the trained model, for a single rank."""
    answers = config.evaluation.answers
    return TrainerSpec(
        model_path=str(prepared.model_path),
        model=config.model,
        training=prepared.training,
        quantization=answers.inference.quantization if answers is not None else "none",
        schedule=Schedule.of(prepared.training),
        seed=config.seed,
    )


def _from(training: SupervisedTraining, num_examples: int, at: RunState) -> SupervisedTraining:
    return training.within(num_examples, at.step, at.num_draws)


def planned_steps(config: SupervisedConfig, kind: ExampleKind, at: RunState) -> int:
    """Return the number of steps of a run in a given state, reading no more data than needed."""
    training = config.training
    if training.num_steps and training.num_epochs is None:
        return training.num_steps
    return _from(training, count_examples(config.data, kind, config.seed, config.pipeline), at).num_steps


def held_out_batch(config: SupervisedConfig, examples: Examples) -> TrainingBatch:
    """Return the batch of every evaluation: always the same held-out examples, without those that cannot be rendered.

    Raises:
        DataError: No held-out example can be rendered.
    """
    drawn = list(map(examples.samples, examples.evaluation(config.evaluation.num_examples)))
    if drawn and all(isinstance(found, str) for found in drawn):
        raise DataError(
            f"the first {len(drawn):,} held-out examples are all left out ({drawn[0]}), so nothing can be measured: "
            "correct them, or raise evaluation.num_examples."
        )
    return TrainingBatch(samples=tuple(sample for found in drawn if not isinstance(found, str) for sample in found))
