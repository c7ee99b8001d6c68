"""From the configuration's `data` entries to a training stream and held-out draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from roll.config.data import DataConfig
from roll.data.chat import ChatRenderer
from roll.data.source import Interleaved, Source
from roll.data.stream import PromptStream, WeightedSource, render_checked
from roll.errors import DataError
from roll.protocols import PromptSource
from roll.registry import Registry
from roll.types import Prompt, PromptDraw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SOURCES", "Data", "build_data", "held_out_draws", "load_source"]

Loader: TypeAlias = Callable[[Any, str, int], tuple[Source[Prompt], Source[Prompt]]]

SOURCES: Registry[Loader] = Registry(
    "prompt source",
    {
        "arithmetic": "roll.data.arithmetic:arithmetic_prompts",
        "environment": "roll.data.environment:environment_prompts",
        "functions": "roll.data.functions:functions_prompts",
        "guess_number": "roll.data.guess_number:guess_number_prompts",
        "file": "roll.data.tables:table_prompts",
        "huggingface": "roll.data.tables:table_prompts",
        "python": "roll.data.tables:table_prompts",
        "reasoning_gym": "roll.data.reasoning_gym:reasoning_gym_prompts",
    },
)

EAGER_CHECK = 20_000
"""With at most this many prompts, all are rendered at once, so one that is too long is refused before training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What a run draws from."""

    train: PromptStream
    held_out: PromptSource
    """All of them, domains interleaved."""
    held_out_fingerprints: Mapping[str, str]
    """By domain; equal for equal prompts in equal order."""
    renderer: ChatRenderer
    max_prompt_tokens: int | None
    longest_prompt: int | None
    """In tokens, over training and held-out prompts; `None` where there are too many to render them all."""

    def evaluation(self, num_prompts: int) -> list[PromptDraw]:
        """The first `num_prompts` held-out prompts (all, where there are fewer), always the same ones."""
        prompts = [self.held_out[i] for i in range(min(num_prompts, len(self.held_out)))]
        return held_out_draws(prompts, self.renderer, self.max_prompt_tokens)


def held_out_draws(
    prompts: Sequence[Prompt], renderer: ChatRenderer, max_prompt_tokens: int | None = None
) -> list[PromptDraw]:
    """Prompts rendered for evaluation; their draw ids count from 0 and are not in the ledger."""
    return [
        PromptDraw(draw_id=i, prompt=p, token_ids=render_checked(p, renderer.render, max_prompt_tokens))
        for i, p in enumerate(prompts)
    ]


def build_data(
    configs: Sequence[DataConfig],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    max_prompt_tokens: int | None = None,
) -> Data:
    """Read every source.

    Args:
        configs: the configuration's entries.
        tokenizer: of the model, with its chat template.
        seed: of order and of what is held out.
        max_prompt_tokens: what the context leaves for prompts.

    Raises:
        DataError: a source cannot be read or is empty, or a prompt is too long.
    """
    renderer = ChatRenderer(tokenizer)
    sources: list[WeightedSource[Prompt]] = []
    held_out: list[Source[Prompt]] = []
    for config in configs:
        domain = config.domain or config.source
        training, other = load_source(config, domain, seed)
        sources.append(
            WeightedSource(domain=domain, items=training, weight=config.weight, fingerprint=training.fingerprint)
        )
        held_out.append(other)
    return Data(
        train=PromptStream(sources, renderer.render, seed, max_prompt_tokens=max_prompt_tokens),
        held_out=Interleaved(held_out),
        held_out_fingerprints={s.domain: other.fingerprint for s, other in zip(sources, held_out, strict=True)},
        renderer=renderer,
        max_prompt_tokens=max_prompt_tokens,
        longest_prompt=_longest([*(s.items for s in sources), *held_out], renderer, max_prompt_tokens),
    )


def load_source(config: DataConfig, domain: str, seed: int) -> tuple[Source[Prompt], Source[Prompt]]:
    """Training and held-out prompts of one entry.

    Raises:
        DataError: the source cannot be read, or leaves nothing to train on.
    """
    training, held_out = SOURCES.get(config.source.partition(":")[0])(config, domain, seed)
    if not len(training):
        held_out = getattr(config, "held_out", 0)
        raise DataError(f"data source '{domain}' leaves no prompt for training: lower its held_out ({held_out}).")
    return training, held_out


def _longest(sources: Sequence[PromptSource], renderer: ChatRenderer, max_prompt_tokens: int | None) -> int | None:
    if sum(map(len, sources)) > EAGER_CHECK:
        return None
    return max(
        len(render_checked(source[i], renderer.render, max_prompt_tokens))
        for source in sources
        for i in range(len(source))
    )
