"""The reference model of preference training, and the batches that it scores."""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import numpy as np

from roll.config.pipelines.preference import PreferenceConfig
from roll.errors import ConfigError, ModelError
from roll.models import load_tokenizer, resolve_model
from roll.pipelines.preference.objective import get_benchmark_loss, mismatch_answers
from roll.pipelines.run import Session
from roll.pipelines.supervised.frozen_outputs import ComputeOutputs, list_remaining_steps
from roll.pipelines.supervised.output_store import Rows, build_rows
from roll.pipelines.supervised.preparation import PreparedRun, build_held_out_batch
from roll.protocols import TrainerGroup
from roll.training import TrainerSpec
from roll.types import TrainingBatch, TrainingSample

__all__ = ["build_held_out_batches", "build_reference_scorer", "build_reference_spec", "list_batches"]

Samples: TypeAlias = tuple[TrainingSample, ...]

MAX_MISMATCHED_ANSWERS = 2_000_000
"""Maximum number of mismatched answers, which are kept in memory until they are scored."""


def build_reference_spec(config: PreferenceConfig, prepared: PreparedRun) -> TrainerSpec:
    """Return the trainer spec of the reference.

    Raises:
        ModelError: The reference model cannot be found, or its tokenizer differs from the policy's.
    """
    name = config.preference.reference_model
    path = prepared.model_path if name is None else resolve_model(name)
    load = partial(load_tokenizer, trust_remote_code=config.model.trust_remote_code)
    if name is not None and load(path).get_vocab() != load(prepared.model_path).get_vocab():
        raise ModelError(
            f"the tokenizer of preference.reference_model '{name}' differs from that of model.path "
            f"'{config.model.path}', but the reference uses the policy's token ids: use a model of the same family."
        )
    return TrainerSpec.for_frozen_model(path, config.model, prepared.training, config.seed)


def build_reference_scorer(config: PreferenceConfig) -> ComputeOutputs:
    """Return a function that computes the reference's log-probs with the packing and rounding of the policy's updates.

    A policy with the reference's weights then has log-ratios of exactly 0, even in bfloat16.
    """
    loss = get_benchmark_loss(config.preference)

    async def compute_logprobs(reference: TrainerGroup, batch: TrainingBatch) -> list[Rows]:
        logprobs = (await reference.measure(batch, loss)).logprobs
        return [
            build_rows(logprobs=p[s.loss_mask].astype(np.float32)) for s, p in zip(batch.samples, logprobs, strict=True)
        ]

    return compute_logprobs


def list_batches(config: PreferenceConfig, prepared: PreparedRun, session: Session) -> list[Samples]:
    """Return all batches that the reference will score: the batches of the remaining steps, and the held-out examples.

    Raises:
        ConfigError: There are too many answers to score, because KTO pairs prompts with different answers in every
            epoch.
    """
    num_answers = prepared.training.num_steps * prepared.training.examples_per_step
    if num_answers > MAX_MISMATCHED_ANSWERS and not config.preference.method.compares_pairs:
        raise ConfigError(
            f"{config.preference.type} requires the reference's log-probs of {num_answers:,} mismatched answers "
            f"before the first step, but at most {MAX_MISMATCHED_ANSWERS:,} are allowed: lower training.num_epochs or "
            "training.num_steps. Or use LoRA (model.lora) and set preference.reference to `adapters`, which computes "
            "these log-probs during training."
        )
    steps = list_remaining_steps(prepared, session, repeat_examples=not config.preference.method.compares_pairs)
    found = [batch for samples in steps for batch in _add_mismatched_answers(config, prepared, samples)]
    return found + build_held_out_batches(config, prepared)


def build_held_out_batches(config: PreferenceConfig, prepared: PreparedRun) -> list[Samples]:
    """Return the batches of held-out examples that the reference scores."""
    return _add_mismatched_answers(config, prepared, build_held_out_batch(config, prepared.examples).samples)


def _add_mismatched_answers(config: PreferenceConfig, prepared: PreparedRun, samples: Samples) -> list[Samples]:
    if config.preference.method.compares_pairs:
        return [samples]
    return [samples, mismatch_answers(samples, prepared.examples.sample_builder.max_tokens)]
