"""Measure the lengths of a run's prompts or examples in tokens, if data and tokenizer are available."""

from __future__ import annotations

from pathlib import Path

from roll.cluster.decoding import decode_in_worker
from roll.config.rollout_run import PromptRunConfig, RolloutRunConfig
from roll.config.supervised import SupervisedConfig
from roll.data import build_data
from roll.data.examples import ExampleKind, build_examples
from roll.errors import UserError
from roll.models import CATALOGUE, load_tokenizer, resolve_model
from roll.models.multimodal import open_media

__all__ = ["measure_examples", "measure_prompts"]

MAX_MEASURED_SAMPLES = 64
"""Maximum number of prompts or examples whose tokens are counted."""


@decode_in_worker()
def measure_prompts(config: RolloutRunConfig, model: str) -> list[float]:
    """Return the token counts of a run's first prompts; an empty list if the data or the tokenizer cannot be read.

    Args:
        config: Configuration of the run.
        model: The model whose tokenizer is used; it is not downloaded.
    """
    if not isinstance(config, PromptRunConfig) or not _is_local(model):
        return []
    try:
        directory = resolve_model(model)
        data = build_data(config.data, load_tokenizer(directory), config.seed, media=open_media(directory, None))
        return [float(len(draw.token_ids)) for draw in data.train.draw(MAX_MEASURED_SAMPLES)]
    except UserError:
        return []  # `roll check` reports problems of the data; a plan only needs its lengths


@decode_in_worker()
def measure_examples(config: SupervisedConfig, model: str) -> list[float]:
    """Return the token counts of a run's first examples; an empty list if the data or the tokenizer cannot be read."""
    if not _is_local(model):
        return []
    kinds: tuple[ExampleKind, ...] = ("supervised",)
    if config.pipeline in ("preference", "reward_model"):
        kinds = ("pair", "labelled", "scored")
    for kind in kinds:
        try:
            directory = resolve_model(model)
            tokenizer, limit = load_tokenizer(directory), config.training.max_example_tokens
            media = open_media(directory, None)
            examples = build_examples(config.data, kind, tokenizer, config.seed, limit, media=media)
            drawn = [examples.build_samples(draw) for draw in examples.train.draw(MAX_MEASURED_SAMPLES)]
        except UserError:
            continue
        return [float(sum(len(s.token_ids) for s in found)) for found in drawn if not isinstance(found, str)]
    return []


def _is_local(model: str) -> bool:
    return model in CATALOGUE or Path(model).is_dir()
