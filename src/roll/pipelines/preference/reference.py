"""What the reference says of everything that the run will learn from, before its first step.

remaining draws, held-out examples ─► samples of which nothing is kept ─ the model, frozen ─► kept

The model is let go before the policy starts, so the two never share memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

from roll.cluster.base import Cluster
from roll.config.pipelines.preference import PreferenceConfig
from roll.errors import ModelError
from roll.models import load_tokenizer, resolve_model
from roll.models.fingerprint import model_fingerprint
from roll.pipelines.preference.kept import KeptLogprobs
from roll.pipelines.preference.objective import with_other_answers
from roll.pipelines.run import Session, beginning
from roll.pipelines.supervised.course import next_draws, rendered
from roll.pipelines.supervised.preparation import Prepared, held_out_batch
from roll.training import TrainerSpec
from roll.types import TrainingBatch, TrainingSample

__all__ = ["all_samples", "held_out_samples", "keep_reference", "kept_for", "reference_spec"]

CHUNK = 256
"""Samples that are computed and written at once."""


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
    model = config.model.model_copy(update={"lora": None})
    return TrainerSpec(
        model_path=str(path), model=model, training=prepared.training, role="reference", seed=config.seed
    )


def kept_for(spec: TrainerSpec, run: Path) -> KeptLogprobs:
    """What a run keeps of a reference: by its weights and how they are computed with."""
    return KeptLogprobs(run / "reference" / f"{model_fingerprint(Path(spec.model_path))}-{spec.model.dtype}")


async def keep_reference(
    cluster: Cluster,
    spec: TrainerSpec,
    kept: KeptLogprobs,
    samples: list[TrainingSample],
    session: Session | None = None,
) -> None:
    """Let the reference say what is not kept yet; nothing starts where all is."""
    missing = kept.missing(samples)
    if not missing:
        return
    note: Callable[[str], object] = session.tracker.note if session else _say_nothing
    note(f"starting the reference: {len(missing):,} answers are to be compared with it")
    trainer = await cluster.start_trainer(spec, "actor_train")
    try:
        for start in range(0, len(missing), CHUNK):
            chunk = missing[start : start + CHUNK]
            saying = trainer.forward(TrainingBatch(samples=tuple(chunk)), ("logprobs",))
            said = await (session.stop.unless(saying) if session else saying)
            await asyncio.to_thread(kept.add, chunk, said["logprobs"])
            note(f"reference: {start + len(chunk):,} of {len(missing):,} answers")
    finally:
        await trainer.close()


def all_samples(config: PreferenceConfig, prepared: Prepared, session: Session) -> list[TrainingSample]:
    """Everything that the reference will be asked of: what remains to be drawn, and what is held out."""
    stream = prepared.examples.train
    state = beginning(session.saved, stream)
    try:
        found = list(_samples(config, prepared, state.step))
    finally:
        stream.restore(state.data)
    return found + held_out_samples(config, prepared)


def held_out_samples(config: PreferenceConfig, prepared: Prepared) -> list[TrainingSample]:
    """Of all evaluations."""
    return _with_others(config, prepared, held_out_batch(config, prepared.examples).samples)


def _samples(config: PreferenceConfig, prepared: Prepared, step: int) -> Iterator[TrainingSample]:
    """Of every step from here on; pairs that come again are the same samples, and are made once."""
    seen: set[str] = set()
    for _ in range(step, prepared.training.num_steps):
        draws = next_draws(prepared.examples, prepared.training)
        if config.preference.method.compares_pairs:
            draws = [draw for draw in draws if draw.uid not in seen]
            seen |= {draw.uid for draw in draws}
        yield from _with_others(config, prepared, rendered(draws, prepared.examples).samples)


def _with_others(
    config: PreferenceConfig, prepared: Prepared, samples: tuple[TrainingSample, ...]
) -> list[TrainingSample]:
    if config.preference.method.compares_pairs:
        return list(samples)
    return [*samples, *with_other_answers(samples, prepared.examples.rendering.max_tokens)]


def _say_nothing(text: str) -> None:
    """For work that is no run."""
