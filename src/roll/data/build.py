"""Builds the training stream and the held-out draws from the configuration's `data` entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from roll.config.data import DataConfig, FileData, HuggingFaceData, PythonData
from roll.data.bad_rows import BadRowCollector
from roll.data.cells import BadRow
from roll.data.chat import ChatRenderer
from roll.data.media_text import MediaText, count_media_tokens
from roll.data.prompt_rendering import tokenize_prompt
from roll.data.prompts import PromptReader
from roll.data.rows import RowItems
from roll.data.source import InterleavedSource, Source
from roll.data.stream import PromptStream, WeightedSource, render_and_check
from roll.data.tables import report_bad_rows
from roll.errors import DataError
from roll.media import MediaStore
from roll.models.multimodal import MediaInputs
from roll.protocols import PromptSource
from roll.registry import Registry
from roll.types import EncodedText, Prompt, PromptDraw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SOURCES", "PromptData", "build_data", "load_source", "render_held_out"]

Loader: TypeAlias = Callable[..., tuple[Source[Prompt], Source[Prompt]]]

SOURCES: Registry[Loader] = Registry(
    "prompt source",
    {
        "arithmetic": "roll.data.arithmetic:build_arithmetic_prompts",
        "environment": "roll.data.environment:build_environment_prompts",
        "functions": "roll.data.functions:build_functions_prompts",
        "guess_number": "roll.data.guess_number:build_guess_number_prompts",
        "file": "roll.data.tables:load_table_prompts",
        "huggingface": "roll.data.tables:load_table_prompts",
        "python": "roll.data.tables:load_table_prompts",
        "reasoning_gym": "roll.data.reasoning_gym:build_reasoning_gym_prompts",
    },
)

REJECTED_BY_TEMPLATE = "rejected by the chat template"
MAX_CHECKED_AT_START = 20_000
"""With at most this many prompts, all are rendered at the start, so a prompt that is too long is rejected before
training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptData:
    """The prompts of a run."""

    train: PromptStream
    held_out: PromptSource
    """All held-out prompts, domains interleaved."""
    held_out_fingerprints: Mapping[str, str]
    """Fingerprints of the held-out prompts by domain; identical for the same prompts in the same order."""
    renderer: ChatRenderer
    max_prompt_tokens: int | None
    longest_prompt: int | None
    """Number of tokens of the longest prompt; `None` if there are too many prompts to render them all."""
    max_media_tokens: int = 0
    """Maximum number of media tokens in one prompt, among the prompts rendered before the run."""

    def get_evaluation_draws(self, num_prompts: int) -> list[PromptDraw]:
        """Return the first `num_prompts` held-out prompts, or all if there are fewer; the result is deterministic."""
        prompts = [self.held_out[i] for i in range(min(num_prompts, len(self.held_out)))]
        return render_held_out(prompts, self.renderer, self.max_prompt_tokens)


def render_held_out(
    prompts: Sequence[Prompt], renderer: ChatRenderer, max_prompt_tokens: int | None = None
) -> list[PromptDraw]:
    """Render prompts as draws for evaluation; the draw IDs start at 0 and are not in the data ledger.

    Raises:
        DataError: A prompt is longer than `max_prompt_tokens` or cannot be rendered.
    """
    render = partial(tokenize_prompt, renderer=renderer)
    return [
        PromptDraw(draw_id=i, prompt=p, token_ids=encoded.token_ids, media=encoded.media)
        for i, p in enumerate(prompts)
        for encoded in [render_and_check(p, render, max_prompt_tokens)]
    ]


def build_data(
    configs: Sequence[DataConfig],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    max_prompt_tokens: int | None = None,
    *,
    pipeline: str = "",
    media: MediaInputs | None = None,
) -> PromptData:
    """Read the prompts of all sources.

    Args:
        configs: The sources' entries in the configuration.
        tokenizer: The model's tokenizer, with its chat template.
        seed: Seed for shuffling the prompts and for the held-out split.
        max_prompt_tokens: Longest prompt that fits the context.
        pipeline: The pipeline's name, for messages.
        media: Store and processor of the run's images; `None` for a text-only model.

    Raises:
        DataError: A source cannot be read or is empty, or a prompt is too long.
    """
    renderer = ChatRenderer(tokenizer, None if media is None else MediaText(media))
    store = None if media is None else media.store
    loaded = [
        _LoadedSource(config, *load_source(config, config.domain or config.source, seed, pipeline, store))
        for config in configs
    ]
    render = partial(tokenize_prompt, renderer=renderer)
    if media is not None:
        _warn_without_media(loaded, media)
        render = partial(_check_then_render, render, _find_text_rewards(loaded))
    longest, max_media_tokens = _render_all(loaded, render, max_prompt_tokens, media)
    return PromptData(
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
        held_out=InterleavedSource([entry.held_out for entry in loaded]),
        held_out_fingerprints={entry.domain: entry.held_out.fingerprint for entry in loaded},
        renderer=renderer,
        max_prompt_tokens=max_prompt_tokens,
        longest_prompt=longest,
        max_media_tokens=max_media_tokens,
    )


@dataclass(slots=True)
class _LoadedSource:
    """The prompts of one data source."""

    config: DataConfig
    training: Source[Prompt]
    held_out: Source[Prompt]

    @property
    def domain(self) -> str:
        return self.config.domain or self.config.source


def _warn_without_media(loaded: Sequence[_LoadedSource], media: MediaInputs) -> None:
    """Log a warning for each table without media in its rows, if the model reads media."""
    for entry in loaded:
        reader = entry.training.reader if isinstance(entry.training, RowItems) else None
        if isinstance(reader, PromptReader):
            reader.media_columns.warn_without_media(entry.domain, media.processor.kinds)


def _find_text_rewards(loaded: Sequence[_LoadedSource]) -> dict[str, str]:
    """Find the domains with a reward that reads only text, and return the type of this reward by domain."""
    return {entry.domain: reward.type for entry in loaded for reward in entry.config.reward if reward.reads_prompt_text}


def _check_then_render(
    render: Callable[[Prompt], EncodedText], text_rewards: Mapping[str, str], prompt: Prompt
) -> EncodedText:
    """Check that the rewards of a prompt with images can read images, and render the prompt."""
    reward = text_rewards.get(prompt.domain)
    if reward is not None and any(message.media for message in prompt.messages):
        raise DataError(
            f"prompt '{prompt.uid}' has images, but the reward '{reward}' of domain '{prompt.domain}' supports only "
            "text: choose another reward, or remove the images."
        )
    return render(prompt)


def load_source(
    config: DataConfig, domain: str, seed: int, pipeline: str = "", media: MediaStore | None = None
) -> tuple[Source[Prompt], Source[Prompt]]:
    """Load the training and held-out prompts of a data source.

    Raises:
        DataError: The source cannot be read, or has no prompt to train on.
    """
    load = SOURCES.get(config.source.partition(":")[0])
    is_table = isinstance(config, FileData | HuggingFaceData | PythonData)
    training, held_out = load(config, domain, seed, *((pipeline, media) if is_table else ()))
    _check_not_empty(training, config, domain)
    return training, held_out


def _render_all(
    loaded: Sequence[_LoadedSource],
    render: Callable[[Prompt], EncodedText],
    max_prompt_tokens: int | None,
    media: MediaInputs | None,
) -> tuple[int | None, int]:
    """Render all prompts, unless there are too many; skip or reject prompts that cannot be rendered.

    If a source skips bad rows, all of its prompts are rendered, even if there are many.

    Returns:
        The number of tokens of the longest prompt (`None` if not all prompts were rendered), and the largest number of
        media tokens in one rendered prompt.

    Raises:
        DataError: Prompts cannot be rendered or are too long; the message names their rows if they come from a table.
    """
    # Rendering more prompts than this would delay the start of the run; prompts that are too long are rejected when
    # drawn.
    every = sum(len(entry.training) + len(entry.held_out) for entry in loaded) <= MAX_CHECKED_AT_START
    longest = max_media_tokens = 0
    for entry in loaded:
        bad = BadRowCollector()
        bad.num_rows = len(entry.training) + len(entry.held_out)
        sides: list[Source[Prompt]] = []
        for side in (entry.training, entry.held_out):
            out: list[int] = []
            for index in range(len(side)) if every or _skips_bad_rows(entry.config) else ():
                try:
                    encoded = render_and_check(side[index], render, max_prompt_tokens)
                    longest = max(longest, len(encoded.token_ids))
                    max_media_tokens = max(max_media_tokens, count_media_tokens(encoded.media, media))
                except DataError as error:
                    if not isinstance(side, RowItems):
                        raise
                    bad.add(
                        error.reason if isinstance(error, BadRow) else REJECTED_BY_TEMPLATE,
                        f"{side.describe_location(index)}: {error}",
                    )
                    out.append(index)
            sides.append(side.exclude(out) if isinstance(side, RowItems) and out else side)
        entry.training, entry.held_out = sides
        if isinstance(entry.config, FileData | HuggingFaceData | PythonData):
            report_bad_rows(bad, entry.config, entry.domain)
        _check_not_empty(entry.training, entry.config, entry.domain)
    return longest if every else None, max_media_tokens


def _skips_bad_rows(config: DataConfig) -> bool:
    return isinstance(config, FileData | HuggingFaceData | PythonData) and config.on_bad_row == "skip"


def _check_not_empty(training: Source[Prompt], config: DataConfig, domain: str) -> None:
    if len(training):
        return
    if _skips_bad_rows(config):
        raise DataError(f"data source '{domain}' has no prompts for training: all rows are held out or skipped.")
    held_out = getattr(config, "held_out", 0)
    raise DataError(f"data source '{domain}' has no prompts for training: lower its held_out ({held_out}).")
