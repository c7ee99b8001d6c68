"""Build a training stream and held-out draws from the configuration's `data` entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from roll.config.data import DataConfig, FileData, HuggingFaceData, PythonData
from roll.data.bad_rows import BadRows
from roll.data.cells import BadRow
from roll.data.chat import ChatRenderer
from roll.data.prompt_rendering import prompt_tokens
from roll.data.rows import RowItems
from roll.data.source import Interleaved, Source
from roll.data.stream import PromptStream, WeightedSource, render_checked
from roll.data.tables import warn_of_bad_rows
from roll.errors import DataError
from roll.protocols import PromptSource
from roll.registry import Registry
from roll.types import IntArray, Prompt, PromptDraw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SOURCES", "Data", "build_data", "held_out_draws", "load_source"]

Loader: TypeAlias = Callable[..., tuple[Source[Prompt], Source[Prompt]]]

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

REFUSED = "refused by the chat template"
EAGER_CHECK = 20_000
"""With at most this many prompts, all are rendered at the start, so a prompt that is too long is rejected before
training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The prompts of a run."""

    train: PromptStream
    held_out: PromptSource
    """All held-out prompts, domains interleaved."""
    held_out_fingerprints: Mapping[str, str]
    """Fingerprints by domain; equal for equal prompts in equal order."""
    renderer: ChatRenderer
    max_prompt_tokens: int | None
    longest_prompt: int | None
    """Tokens of the longest training or held-out prompt; `None` if there are too many to render them all."""

    def evaluation(self, num_prompts: int) -> list[PromptDraw]:
        """Return the first `num_prompts` held-out prompts (all, if there are fewer), always the same ones."""
        prompts = [self.held_out[i] for i in range(min(num_prompts, len(self.held_out)))]
        return held_out_draws(prompts, self.renderer, self.max_prompt_tokens)


def held_out_draws(
    prompts: Sequence[Prompt], renderer: ChatRenderer, max_prompt_tokens: int | None = None
) -> list[PromptDraw]:
    """Render prompts for evaluation; their draw IDs count from 0 and are not in the ledger."""
    render = partial(prompt_tokens, renderer=renderer)
    return [
        PromptDraw(draw_id=i, prompt=p, token_ids=render_checked(p, render, max_prompt_tokens))
        for i, p in enumerate(prompts)
    ]


def build_data(
    configs: Sequence[DataConfig],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    max_prompt_tokens: int | None = None,
    *,
    pipeline: str = "",
) -> Data:
    """Read every source.

    Args:
        configs: The entries of the configuration.
        tokenizer: The model's tokenizer, with its chat template.
        seed: Seed of the order and of the held-out split.
        max_prompt_tokens: Longest prompt that fits the context.
        pipeline: The pipeline's name, for messages.

    Raises:
        DataError: A source cannot be read or is empty, or a prompt is too long.
    """
    renderer = ChatRenderer(tokenizer)
    loaded = [
        _Loaded(config, *load_source(config, config.domain or config.source, seed, pipeline)) for config in configs
    ]
    render = partial(prompt_tokens, renderer=renderer)
    longest = _rendered(loaded, render, max_prompt_tokens)
    return Data(
        train=PromptStream(
            [
                WeightedSource(
                    domain=entry.domain,
                    items=entry.training,
                    weight=entry.config.weight,
                    fingerprint=entry.training.fingerprint,
                )
                for entry in loaded
            ],
            render,
            seed,
            max_prompt_tokens=max_prompt_tokens,
        ),
        held_out=Interleaved([entry.held_out for entry in loaded]),
        held_out_fingerprints={entry.domain: entry.held_out.fingerprint for entry in loaded},
        renderer=renderer,
        max_prompt_tokens=max_prompt_tokens,
        longest_prompt=longest,
    )


@dataclass(slots=True)
class _Loaded:
    """One entry of the configuration, with its prompts."""

    config: DataConfig
    training: Source[Prompt]
    held_out: Source[Prompt]

    @property
    def domain(self) -> str:
        return self.config.domain or self.config.source


def load_source(
    config: DataConfig, domain: str, seed: int, pipeline: str = ""
) -> tuple[Source[Prompt], Source[Prompt]]:
    """Return training and held-out prompts of one entry.

    Raises:
        DataError: The source cannot be read, or leaves nothing to train on.
    """
    load = SOURCES.get(config.source.partition(":")[0])
    is_table = isinstance(config, FileData | HuggingFaceData | PythonData)
    training, held_out = load(config, domain, seed, *((pipeline,) if is_table else ()))
    _check_not_empty(training, config, domain)
    return training, held_out


def _rendered(
    loaded: Sequence[_Loaded], render: Callable[[Prompt], IntArray], max_prompt_tokens: int | None
) -> int | None:
    """Render all prompts, unless there are too many; skip or reject prompts that cannot be rendered.

    If a source skips bad rows, all of its prompts are rendered, however many there are.

    Returns:
        Tokens of the longest prompt; `None` if not all were rendered.

    Raises:
        DataError: Prompts cannot be rendered or are too long; the message has the rows of those from tables.
    """
    every = sum(len(entry.training) + len(entry.held_out) for entry in loaded) <= EAGER_CHECK
    longest = 0
    for entry in loaded:
        bad = BadRows()
        bad.num_rows = len(entry.training) + len(entry.held_out)
        sides: list[Source[Prompt]] = []
        for side in (entry.training, entry.held_out):
            out: list[int] = []
            for index in range(len(side)) if every or _skips(entry.config) else ():
                try:
                    longest = max(longest, len(render_checked(side[index], render, max_prompt_tokens)))
                except DataError as error:
                    if not isinstance(side, RowItems):
                        raise
                    bad.add(error.reason if isinstance(error, BadRow) else REFUSED, f"{side.where(index)}: {error}")
                    out.append(index)
            sides.append(side.without(out) if isinstance(side, RowItems) and out else side)
        entry.training, entry.held_out = sides
        if isinstance(entry.config, FileData | HuggingFaceData | PythonData):
            warn_of_bad_rows(bad, entry.config, entry.domain)
        _check_not_empty(entry.training, entry.config, entry.domain)
    return longest if every else None


def _skips(config: DataConfig) -> bool:
    return isinstance(config, FileData | HuggingFaceData | PythonData) and config.on_bad_row == "skip"


def _check_not_empty(training: Source[Prompt], config: DataConfig, domain: str) -> None:
    if len(training):
        return
    if _skips(config):
        raise DataError(f"data source '{domain}' leaves no prompt for training: its rows are held out or left out.")
    held_out = getattr(config, "held_out", 0)
    raise DataError(f"data source '{domain}' leaves no prompt for training: lower its held_out ({held_out}).")
