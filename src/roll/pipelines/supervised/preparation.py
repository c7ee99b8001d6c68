"""Preparation of a supervised run before any role starts: the model's files and the examples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from roll.cluster.decoding import decode_in_worker
from roll.config.supervised import SupervisedConfig, SupervisedTrainingConfig
from roll.data.examples import ExampleData, ExampleKind, build_examples, count_examples
from roll.errors import ConfigError, DataError
from roll.models import check_experts, check_rope_scaling, load_tokenizer, read_context_length, resolve_model
from roll.models.multimodal import open_media
from roll.pipelines.engine_checks import check_engines
from roll.pipelines.quantization import check_quantization
from roll.pipelines.state import RunState
from roll.training import Schedule, TrainerSpec
from roll.types import TrainingBatch

__all__ = ["PreparedRun", "build_held_out_batch", "build_policy_spec", "count_planned_steps", "prepare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """The parts of a run that need no device: the model's files, its tokenizer, the examples."""

    model_path: Path
    examples: ExampleData
    training: SupervisedTrainingConfig
    """Training configuration with the run's number of steps."""


@decode_in_worker()
def prepare(
    config: SupervisedConfig,
    kind: ExampleKind,
    state: RunState | None = None,
    *,
    score_at_end: bool = False,
    media_dir: Path | None = None,
) -> PreparedRun:
    """Resolve the model and read the data.

    Args:
        config: Configuration of the run.
        kind: Type of the run's examples.
        state: State of the run; by default a new run.
        score_at_end: Argument of `build_examples`.
        media_dir: The run's media store; `None` keeps images in memory, for a check.

    Raises:
        UserError: The model or a source cannot be used.
    """
    model_path = resolve_model(config.model.path)
    check_experts(model_path, config.training.parallel.ep)
    if (answering := config.build_prompt_run_config()) is not None:
        check_engines(answering)
        check_quantization(answering, model_path)
    longest, max_tokens = read_context_length(model_path), config.training.max_example_tokens
    if max_tokens is not None and max_tokens > longest:
        raise ConfigError(
            f"training.max_example_tokens must be <= {longest}, the context length of the model, got {max_tokens}: "
            "lower training.max_example_tokens."
        )
    check_rope_scaling(model_path, max_tokens or longest, "training.max_example_tokens")
    trust = config.model.trust_remote_code
    tokenizer = load_tokenizer(model_path, trust_remote_code=trust)
    examples = build_examples(
        config.data,
        kind,
        tokenizer,
        config.seed,
        max_tokens or longest,
        score_at_end=score_at_end,
        pipeline=config.pipeline,
        # A reward model has no vision tower.
        media=None if score_at_end else open_media(model_path, media_dir, trust_remote_code=trust),
    )
    training = _set_num_steps(config.training, examples.train.num_items, state or RunState())
    return PreparedRun(model_path=model_path, examples=examples, training=training)


def build_policy_spec(config: SupervisedConfig, prepared: PreparedRun) -> TrainerSpec:
    """Return the spec of the trained model, for a single rank."""
    answers = config.evaluation.answers
    return TrainerSpec(
        model_path=str(prepared.model_path),
        model=config.model,
        training=prepared.training,
        quantization=answers.inference.quantization if answers is not None else "none",
        schedule=Schedule.from_config(prepared.training),
        seed=config.seed,
    )


def _set_num_steps(training: SupervisedTrainingConfig, num_examples: int, state: RunState) -> SupervisedTrainingConfig:
    return training.with_num_steps(num_examples, state.step, state.num_draws)


@decode_in_worker()
def count_planned_steps(config: SupervisedConfig, kind: ExampleKind, state: RunState) -> int:
    """Return the number of steps of a run in a given state, reading no more data than needed."""
    training = config.training
    if training.num_steps and training.num_epochs is None:
        return training.num_steps
    return _set_num_steps(training, count_examples(config.data, kind, config.seed, config.pipeline), state).num_steps


def build_held_out_batch(config: SupervisedConfig, examples: ExampleData) -> TrainingBatch:
    """Return the evaluation batch, which always has the same held-out examples, without those that cannot be rendered.

    Raises:
        DataError: No held-out example can be rendered.
    """
    drawn = list(map(examples.build_samples, examples.get_evaluation_draws(config.evaluation.num_examples)))
    if drawn and all(isinstance(found, str) for found in drawn):
        raise DataError(
            f"the first {len(drawn):,} held-out examples cannot be used ({drawn[0]}), so the run cannot be evaluated: "
            "correct them, or raise evaluation.num_examples."
        )
    return TrainingBatch(samples=tuple(sample for found in drawn if not isinstance(found, str) for sample in found))
