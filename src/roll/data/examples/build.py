"""Builds the stream of examples, the held-out examples, and a report from the configuration's `data` entries.

table ── structure of every row ──► examples ── if they are few: all rendered ──► stream │ held-out draws
                  │                                          │
                  └────────────────► bad rows, counted ◄─────┘   rejected, or skipped and reported
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll.config.examples import ArithmeticExamples, ExampleDataConfig
from roll.data.bad_rows import BadRowCollector
from roll.data.chat import ChatRenderer
from roll.data.examples.checker import ExampleChecker, Source, is_skipped
from roll.data.examples.reader import ExampleKind, ExampleReader
from roll.data.examples.report import ExampleReport
from roll.data.examples.samples import SampleBuilder, UnusableExample
from roll.data.examples.stream import ExampleStream
from roll.data.examples.sums import build_arithmetic_examples
from roll.data.media import build_media_reader
from roll.data.media_columns import MediaColumns
from roll.data.media_text import MediaText
from roll.data.rows import split_rows
from roll.data.source import InterleavedSource
from roll.data.stream import WeightedSource
from roll.data.tables import open_tables
from roll.errors import DataError
from roll.media import MediaStore
from roll.models.multimodal import MediaInputs
from roll.protocols import Items
from roll.types import Example, ExampleDraw, TrainingSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["MAX_CHECKED_AT_START", "ExampleData", "build_examples", "count_examples"]

logger = logging.getLogger(__name__)

MAX_CHECKED_AT_START = 20_000
"""With at most this many examples, all are rendered at the start, so unusable ones are known before training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleData:
    """The examples of a run."""

    train: ExampleStream
    held_out: Items[Example]
    """All held-out examples, domains interleaved."""
    held_out_fingerprints: Mapping[str, str]
    """Fingerprints of the held-out examples by domain; identical for the same examples in the same order."""
    sample_builder: SampleBuilder
    settings: dict[str, ExampleDataConfig]
    """Settings by domain."""
    report: ExampleReport

    def build_samples(self, draw: ExampleDraw) -> tuple[TrainingSample, ...] | str:
        """Build the training samples of a drawn example, or return the reason why it is skipped.

        Raises:
            UnusableExample: The example cannot be trained on, and its source does not skip such examples.
        """
        config = self.settings[draw.example.domain]
        try:
            return self.sample_builder.build_samples(draw, config.too_long)[0]
        except UnusableExample as error:
            if is_skipped(config, error.reason):
                return error.reason
            raise UnusableExample(error.reason, f"example '{draw.uid}': {error}") from error

    def get_evaluation_draws(self, num_examples: int) -> list[ExampleDraw]:
        """Return the first `num_examples` held-out examples, or all if there are fewer; the result is deterministic."""
        chosen = [self.held_out[i] for i in range(min(num_examples, len(self.held_out)))]
        return [ExampleDraw(draw_id=i, example=example, position=-1) for i, example in enumerate(chosen)]


@dataclass(kw_only=True, slots=True)
class _LoadedSource:
    """The examples of one data source."""

    config: ExampleDataConfig
    domain: str
    training: Source
    held_out: Source
    bad: BadRowCollector
    media_columns: MediaColumns | None = None
    """Which media the rows have; `None` if the source is no table."""


def build_examples(
    configs: Sequence[ExampleDataConfig],
    kind: ExampleKind,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    max_tokens: int | None = None,
    *,
    score_at_end: bool = False,
    pipeline: str = "",
    media: MediaInputs | None = None,
) -> ExampleData:
    """Read the examples of all sources.

    Args:
        configs: The sources' entries in the configuration; their domains differ.
        kind: The type of examples that the pipeline trains on.
        tokenizer: The model's tokenizer, with its chat template.
        seed: Seed for shuffling the examples and for the held-out split.
        max_tokens: Maximum context length, in tokens.
        score_at_end: Whether the only loss token of a sample is an end token that is appended to it.
        pipeline: The pipeline's name, for messages.
        media: Store and processor of the run's images; `None` for a text-only model.

    Raises:
        DataError: A source cannot be read or is empty, or has rows that cannot be used; the message names these rows.
    """
    renderer = ChatRenderer(tokenizer, None if media is None else MediaText(media))
    sample_builder = SampleBuilder(renderer=renderer, max_tokens=max_tokens, score_at_end=score_at_end)
    if len({config.weight is None for config in configs}) == 2:
        raise DataError("some data sources have a weight and others do not: set `weight` for all of them, or for none.")
    store = None if media is None else media.store
    loaded = list(_load_sources(configs, kind, seed, sample_builder.renderer.find_special_token, pipeline, store))
    _warn_without_media(loaded, media)
    total = sum(len(entry.training) + len(entry.held_out) for entry in loaded)
    check = ExampleChecker(sample_builder=sample_builder, checks_all=total <= MAX_CHECKED_AT_START)
    for entry in loaded:
        entry.training, entry.held_out = (
            check.filter_usable(side, entry.config, entry.bad) for side in (entry.training, entry.held_out)
        )
    _report_bad_rows(loaded)
    sources = [
        WeightedSource(
            domain=entry.domain,
            items=entry.training,
            weight=entry.config.weight or len(entry.training),
            fingerprint=entry.training.fingerprint,
        )
        for entry in loaded
    ]
    report = check.build_report({entry.domain: entry.bad for entry in loaded})
    if lines := list(report.format_lines()):
        logger.warning("%s", "\n".join(lines))
    return ExampleData(
        train=ExampleStream(sources, seed),
        held_out=InterleavedSource([entry.held_out for entry in loaded]),
        held_out_fingerprints={entry.domain: entry.held_out.fingerprint for entry in loaded},
        sample_builder=sample_builder,
        settings={entry.domain: entry.config for entry in loaded},
        report=report,
    )


def count_examples(configs: Sequence[ExampleDataConfig], kind: ExampleKind, seed: int, pipeline: str = "") -> int:
    """Count the training examples, as far as possible without the model's tokenizer.

    Raises:
        DataError: A source cannot be read or is empty, or has rows that cannot be used; the message names these rows.
    """
    # Images are decoded, but not stored: rows with unreadable images do not count.
    loaded = list(_load_sources(configs, kind, seed, lambda text: None, pipeline, MediaStore(None)))
    _report_bad_rows(loaded)
    return sum(len(entry.training) for entry in loaded)


def _load_sources(
    configs: Sequence[ExampleDataConfig],
    kind: ExampleKind,
    seed: int,
    find_special_token: Callable[[str], str | None],
    pipeline: str,
    media: MediaStore | None,
) -> Iterator[_LoadedSource]:
    for config in configs:
        domain, bad, media_columns = config.domain or config.source, BadRowCollector(), None
        if not isinstance(config, ArithmeticExamples):
            media_reader = build_media_reader(config, media)
            reader = ExampleReader(config, domain, kind, find_special_token, bad, pipeline, media_reader)
            sides: tuple[Source, Source] = split_rows(reader, open_tables(config, domain, config.text_key), seed)
            media_columns = reader.media_columns
            media_columns.check(domain)
        elif kind == "supervised":
            sides = build_arithmetic_examples(config, domain, seed)
        else:
            raise DataError(
                f"data source '{domain}' generates sums with one answer each, but this pipeline requires other "
                "columns, such as two answers or a score: use a source whose rows have these columns."
            )
        bad.num_rows = len(sides[0]) + len(sides[1]) + bad.counts.total()
        yield _LoadedSource(
            config=config, domain=domain, training=sides[0], held_out=sides[1], bad=bad, media_columns=media_columns
        )


def _warn_without_media(loaded: Sequence[_LoadedSource], media: MediaInputs | None) -> None:
    """Log a warning for sources with media in columns that no configuration key names, if the model reads media."""
    for entry in loaded:
        if media is not None and entry.media_columns is not None:
            entry.media_columns.warn_without_media(entry.domain, media.processor.kinds)


def _report_bad_rows(loaded: Sequence[_LoadedSource]) -> None:
    """Report the bad rows of all sources at once, unless they are skipped.

    Raises:
        DataError: A source has bad rows that must not be skipped, or has no example to train on.
    """
    lines: list[str] = []
    for entry in loaded:
        if any(not is_skipped(entry.config, reason) for reason in entry.bad.counts):
            lines += entry.bad.format_lines(entry.domain)
    if lines:
        raise DataError("\n".join([*lines, "Correct these rows, or skip all bad rows with `on_bad_row: skip`."]))
    for entry in loaded:
        if not len(entry.training):
            lost = f"all but {entry.bad.num_rows - entry.bad.counts.total():,} of its rows are skipped"
            raise DataError(
                f"data source '{entry.domain}' has no examples for training: "
                + (f"{lost}." if entry.bad.counts else f"lower its held_out ({entry.config.held_out}).")
            )
