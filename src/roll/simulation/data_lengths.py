"""Lengths of a run's prompts or examples in tokens, measured on its own data if data and tokenizer are available."""

from __future__ import annotations

from pathlib import Path

from roll.config.generating import GeneratingConfig, PromptedConfig
from roll.config.supervised import SupervisedConfig
from roll.data import build_data
from roll.data.examples import ExampleKind, build_examples
from roll.errors import UserError
from roll.models import CATALOGUE, load_tokenizer, resolve_model

__all__ = ["measure_examples", "measure_prompts"]

NUM_MEASURED = 64


def measure_prompts(config: GeneratingConfig, model: str) -> list[float]:
    """Return the lengths of the first prompts of a run; empty if its data or tokenizer cannot be read on this machine.

    Args:
        config: the run.
        model: the model with the tokenizer; it is not downloaded.
    """
    if not isinstance(config, PromptedConfig) or not _is_here(model):
        return []
    try:
        data = build_data(config.data, load_tokenizer(resolve_model(model)), config.seed)
        return [float(len(draw.token_ids)) for draw in data.train.draw(NUM_MEASURED)]
    except UserError:
        return []  # `roll check` reports problems of the data; a plan only needs its lengths


def measure_examples(config: SupervisedConfig, model: str) -> list[float]:
    """Return the number of tokens that the first examples of a run train or process; see `measure_prompts`."""
    if not _is_here(model):
        return []
    kinds: tuple[ExampleKind, ...] = ("supervised",)
    if config.pipeline in ("preference", "reward_model"):
        kinds = ("pair", "labelled", "scored")
    for kind in kinds:
        try:
            tokenizer = load_tokenizer(resolve_model(model))
            examples = build_examples(config.data, kind, tokenizer, config.seed, config.training.max_example_tokens)
            drawn = [examples.samples(draw) for draw in examples.train.draw(NUM_MEASURED)]
        except UserError:
            continue
        return [float(sum(len(s.token_ids) for s in found)) for found in drawn if not isinstance(found, str)]
    return []


def _is_here(model: str) -> bool:
    return model in CATALOGUE or Path(model).is_dir()
