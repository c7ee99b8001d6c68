"""From the configuration's `data` entries to a training stream and held-out draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from roll.config.data import DataConfig
from roll.data.chat import ChatRenderer
from roll.data.stream import PromptStream, WeightedSource, render_checked
from roll.errors import DataError
from roll.registry import Registry
from roll.types import IntArray, Prompt, PromptDraw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SOURCES", "Data", "build_data", "held_out_draws"]

Loader: TypeAlias = Callable[[Any, str, int], tuple[list[Prompt], list[Prompt]]]

SOURCES: Registry[Loader] = Registry(
    "prompt source",
    {
        "arithmetic": "roll.data.arithmetic:arithmetic_prompts",
        "file": "roll.data.files:file_prompts",
        "huggingface": "roll.data.huggingface:huggingface_prompts",
        "reasoning_gym": "roll.data.reasoning_gym:reasoning_gym_prompts",
    },
)

EAGER_CHECK = 20_000
"""With at most this many prompts, all are rendered at once, so one that is too long is refused before training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What a run draws from."""

    train: PromptStream
    held_out: tuple[Prompt, ...]
    """All of them, domains interleaved."""
    renderer: ChatRenderer
    max_prompt_tokens: int | None
    longest_prompt: int | None
    """In tokens, over training and held-out prompts; `None` where there are too many to render them all."""

    @property
    def num_train_prompts(self) -> int:
        """Different prompts to train on."""
        return self.train.num_prompts

    def evaluation(self, num_prompts: int) -> list[PromptDraw]:
        """The first `num_prompts` held-out prompts (all, where there are fewer), always the same ones."""
        return held_out_draws(self.held_out[:num_prompts], self.renderer, self.max_prompt_tokens)


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
    sources: list[WeightedSource] = []
    held_out: list[list[Prompt]] = []
    for config in configs:
        domain = config.domain or config.source
        training, other = SOURCES.get(config.source.partition(":")[0])(config, domain, seed)
        if not training:
            raise DataError(
                f"data source '{domain}' leaves no prompt for training: lower its held_out ({config.held_out})."
            )
        sources.append(WeightedSource(domain=domain, prompts=training, weight=config.weight))
        held_out.append(other)
    longest = None
    if sum(len(s.prompts) for s in sources) + sum(map(len, held_out)) <= EAGER_CHECK:
        everything: list[Prompt] = [p for s in sources for p in s.prompts] + [
            p for part in held_out for p in part
        ]
        longest = max(len(_checked(p, renderer, max_prompt_tokens)) for p in everything)
    return Data(
        train=PromptStream(sources, renderer.render, seed, max_prompt_tokens=max_prompt_tokens),
        held_out=tuple(_interleave(held_out)),
        renderer=renderer,
        max_prompt_tokens=max_prompt_tokens,
        longest_prompt=longest,
    )


def _checked(prompt: Prompt, renderer: ChatRenderer, max_prompt_tokens: int | None) -> IntArray:
    return render_checked(prompt, renderer.render, max_prompt_tokens)


def _interleave(parts: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """One of each in turn, so that any beginning covers every domain."""
    longest = max((len(part) for part in parts), default=0)
    return [part[i] for i in range(longest) for part in parts if i < len(part)]
