"""The reference model of preference training, and the batches that it scores."""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import numpy as np

from roll.config.pipelines.preference import PreferenceConfig
from roll.errors import ConfigError, ModelError
from roll.models import load_tokenizer, resolve_model
from roll.pipelines.preference.objective import packed_loss_spec, with_other_answers
from roll.pipelines.run import Session
from roll.pipelines.supervised.frozen_outputs import ComputeOutputs, remaining_steps
from roll.pipelines.supervised.output_store import Rows, rows_of
from roll.pipelines.supervised.preparation import Prepared, held_out_batch
from roll.protocols import TrainerGroup
from roll.training import TrainerSpec
from roll.types import TrainingBatch, TrainingSample

__all__ = ["all_batches", "held_out_batches", "reference_outputs", "reference_spec"]

Samples: TypeAlias = tuple[TrainingSample, ...]

MOST_ASKED = 2_000_000
"""Largest number of mismatched answers; all are held in memory until they are scored."""


def reference_spec(config: PreferenceConfig, prepared: Prepared) -> TrainerSpec:
    """Return the trainer spec of the reference.

    Raises:
        ModelError: The reference model cannot be found, or has another tokenizer than the policy.
    """
    name = config.preference.reference_model
    path = prepared.model_path if name is None else resolve_model(name)
    load = partial(load_tokenizer, trust_remote_code=config.model.trust_remote_code)
    if name is not None and load(path).get_vocab() != load(prepared.model_path).get_vocab():
        raise ModelError(
            f"preference.reference_model '{name}' has another tokenizer than model.path '{config.model.path}': a "
            "reference reads the policy's tokens, so take a model of the same family."
        )
    return TrainerSpec.frozen(path, config.model, prepared.training, config.seed)


def reference_outputs(config: PreferenceConfig) -> ComputeOutputs:
    """Return the function that computes the reference's log-probs, packed and rounded as those of the policy in an
    update.

    A policy that equals the reference therefore has log-ratios of exactly 0, also in bfloat16.
    """
    loss = packed_loss_spec(config.preference)

    async def ask(reference: TrainerGroup, batch: TrainingBatch) -> list[Rows]:
        said = (await reference.measure(batch, loss)).logprobs
        return [rows_of(logprobs=p[s.loss_mask].astype(np.float32)) for s, p in zip(batch.samples, said, strict=True)]

    return ask


def all_batches(config: PreferenceConfig, prepared: Prepared, session: Session) -> list[Samples]:
    """Return all batches that the reference will score: the remaining draws and the held-out examples.

    Raises:
        ConfigError: There are too many: a method for single answers pairs prompts and answers anew in every epoch.
    """
    asked = prepared.training.num_steps * prepared.training.examples_per_step
    if asked > MOST_ASKED and not config.preference.method.compares_pairs:
        raise ConfigError(
            f"{config.preference.type} would ask the reference of {asked:,} answers to other prompts before the first "
            f"step, at most {MOST_ASKED:,}: lower training.num_epochs or num_steps, or set model.lora and "
            "preference.reference to adapters, which keeps nothing."
        )
    steps = remaining_steps(prepared, session, again=not config.preference.method.compares_pairs)
    found = [batch for samples in steps for batch in _with_others(config, prepared, samples)]
    return found + held_out_batches(config, prepared)


def held_out_batches(config: PreferenceConfig, prepared: Prepared) -> list[Samples]:
    """Return the batches of all evaluations."""
    return _with_others(config, prepared, held_out_batch(config, prepared.examples).samples)


def _with_others(config: PreferenceConfig, prepared: Prepared, samples: Samples) -> list[Samples]:
    if config.preference.method.compares_pairs:
        return [samples]
    return [samples, with_other_answers(samples, prepared.examples.rendering.max_tokens)]
