"""Which model the reference is, what it is asked, and of what."""

from __future__ import annotations

import numpy as np

from roll.config.pipelines.preference import PreferenceConfig
from roll.errors import ModelError
from roll.models import load_tokenizer, resolve_model
from roll.pipelines.preference.objective import with_other_answers
from roll.pipelines.run import Session
from roll.pipelines.supervised.asking import remaining_steps
from roll.pipelines.supervised.kept import Rows, rows_of
from roll.pipelines.supervised.preparation import Prepared, held_out_batch
from roll.protocols import TrainerGroup
from roll.training import TrainerSpec
from roll.types import TrainingBatch, TrainingSample

__all__ = ["all_samples", "held_out_samples", "logprobs", "reference_spec"]


def reference_spec(config: PreferenceConfig, prepared: Prepared) -> TrainerSpec:
    """The reference as a role.

    Raises:
        ModelError: it cannot be found, or reads other tokens than the policy.
    """
    name = config.preference.reference_model
    path = prepared.model_path if name is None else resolve_model(name)
    if name is not None and load_tokenizer(path).get_vocab() != load_tokenizer(prepared.model_path).get_vocab():
        raise ModelError(
            f"preference.reference_model '{name}' has another tokenizer than model.path '{config.model.path}': a "
            "reference reads the policy's tokens, so take a model of the same family."
        )
    return TrainerSpec.frozen(path, config.model, prepared.training, config.seed)


async def logprobs(reference: TrainerGroup, batch: TrainingBatch) -> list[Rows]:
    """What it is asked."""
    said = (await reference.forward(batch, ("logprobs",)))["logprobs"]
    return [rows_of(logprobs=p[s.loss_mask].astype(np.float32)) for s, p in zip(batch.samples, said, strict=True)]


def all_samples(config: PreferenceConfig, prepared: Prepared, session: Session) -> list[TrainingSample]:
    """Everything that the reference will be asked of: what remains to be drawn, and what is held out."""
    steps = remaining_steps(prepared, session, again=not config.preference.method.compares_pairs)
    found = [sample for samples in steps for sample in _with_others(config, prepared, samples)]
    return found + held_out_samples(config, prepared)


def held_out_samples(config: PreferenceConfig, prepared: Prepared) -> list[TrainingSample]:
    """Of all evaluations."""
    return _with_others(config, prepared, held_out_batch(config, prepared.examples).samples)


def _with_others(
    config: PreferenceConfig, prepared: Prepared, samples: tuple[TrainingSample, ...]
) -> list[TrainingSample]:
    if config.preference.method.compares_pairs:
        return list(samples)
    return [*samples, *with_other_answers(samples, prepared.examples.rendering.max_tokens)]
