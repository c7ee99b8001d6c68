"""From the configuration's `data` entries to a stream of examples, held-out ones, and what is wrong with which rows.

table ── structure of every row ──► examples ── with few of them: every one rendered ──► stream │ held-out draws
                  │                                          │
                  └────────────────► what is bad, counted ◄──┘   refused, or left out and said
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from roll.config.examples import (
    ArithmeticExamples,
    ExampleColumns,
    ExampleDataConfig,
    FileExamples,
    HuggingFaceExamples,
    PythonExamples,
    TooLong,
)
from roll.data.chat import ChatRenderer
from roll.data.examples.reading import BadRows, ExampleReader, Kind
from roll.data.examples.samples import SkippedExample, samples_of
from roll.data.examples.stream import ExampleStream
from roll.data.examples.sums import ArithmeticExamplesSource, arithmetic_examples
from roll.data.rows import RowItems, Table, split_rows
from roll.data.source import Interleaved
from roll.data.stream import WeightedSource
from roll.errors import DataError
from roll.protocols import Items
from roll.types import Example, ExampleDraw, TrainingSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["EAGER_CHECK", "Examples", "build_examples"]

logger = logging.getLogger(__name__)

EAGER_CHECK = 20_000
"""With at most this many examples, all are rendered at once, so one that cannot be is known before training."""
NUM_MEASURED = 200
"""Of more examples, so many are rendered to say how long they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """What a run learns from."""

    train: ExampleStream
    held_out: Items[Example]
    """All of them, domains interleaved."""
    renderer: ChatRenderer
    max_tokens: int | None
    too_long: Mapping[str, TooLong]
    """By domain."""
    score_at_end: bool
    report: Mapping[str, BadRows]
    """What is wrong with the rows of each domain; they are left out."""
    longest: int | None
    """Tokens of the longest sample; `None` where there are too many to render them all."""
    num_tokens: float
    """Tokens of an example that the loss counts, on average."""
    num_cut: int
    """Examples whose answers were found too long and are cut."""

    def samples(self, draw: ExampleDraw) -> tuple[TrainingSample, ...]:
        """See `samples_of`; settled as the draw's source says."""
        too_long = self.too_long[draw.example.domain]
        return samples_of(draw, self.renderer, self.max_tokens, too_long, score_at_end=self.score_at_end)

    def evaluation(self, num_examples: int) -> list[ExampleDraw]:
        """The first so many held-out examples (all, where there are fewer), always the same ones."""
        chosen = [self.held_out[i] for i in range(min(num_examples, len(self.held_out)))]
        return [ExampleDraw(draw_id=i, example=example, position=-1) for i, example in enumerate(chosen)]


_Source = RowItems[Example] | ArithmeticExamplesSource


def build_examples(
    configs: Sequence[ExampleDataConfig],
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    max_tokens: int | None = None,
    *,
    score_at_end: bool = False,
) -> Examples:
    """Read every source.

    Args:
        configs: the configuration's entries; their domains differ.
        kind: what the pipeline learns from.
        tokenizer: of the model, with its chat template.
        seed: of order and of what is held out.
        max_tokens: of the context.
        score_at_end: see `samples_of`.

    Raises:
        DataError: a source cannot be read or is empty, or rows cannot be learnt from; names all of them.
    """
    renderer = ChatRenderer(tokenizer)
    loaded: list[tuple[ExampleDataConfig, str, _Source, _Source, BadRows]] = []
    for config in configs:
        domain = config.domain or config.source
        bad = BadRows()
        training, held_out = _load(config, domain, kind, seed, renderer, bad)
        loaded.append((config, domain, training, held_out, bad))
    check = _Check(renderer, max_tokens, score_at_end, sum(len(t) + len(h) for _, _, t, h, _ in loaded) <= EAGER_CHECK)
    sources: list[WeightedSource[Example]] = []
    others: list[_Source] = []
    for config, domain, training, held_out, bad in loaded:
        training, held_out = (check.usable(side, config, bad) for side in (training, held_out))
        _say(bad, domain, config)
        if not len(training):
            raise DataError(
                f"data source '{domain}' leaves no example for training: lower its held_out ({config.held_out})."
            )
        sources.append(
            WeightedSource(domain=domain, items=training, weight=config.weight, fingerprint=training.fingerprint)
        )
        others.append(held_out)
    return Examples(
        train=ExampleStream(sources, seed),
        held_out=Interleaved(others),
        renderer=renderer,
        max_tokens=max_tokens,
        too_long={domain: config.too_long for config, domain, *_ in loaded},
        score_at_end=score_at_end,
        report={domain: bad for _, domain, _, _, bad in loaded},
        longest=check.longest if check.every else None,
        num_tokens=check.num_learnt / max(check.num_rendered, 1),
        num_cut=check.num_cut,
    )


def _load(
    config: ExampleDataConfig, domain: str, kind: Kind, seed: int, renderer: ChatRenderer, bad: BadRows
) -> tuple[_Source, _Source]:
    if isinstance(config, ArithmeticExamples):
        if kind != "supervised":
            raise DataError(
                f"data source '{domain}' has one answer to each sum, which this pipeline cannot learn from: use rows "
                "that have what it compares."
            )
        return arithmetic_examples(config, domain, seed)
    reader = ExampleReader(config, domain, kind, renderer.special_in, bad)
    return split_rows(reader, _tables(config, domain), seed)


def _tables(config: FileExamples | HuggingFaceExamples | PythonExamples, domain: str) -> tuple[Table, Table | None]:
    from roll.data.files import file_tables
    from roll.data.huggingface import huggingface_tables
    from roll.data.python import python_tables

    match config:
        case FileExamples():
            return file_tables(config)
        case HuggingFaceExamples():
            return huggingface_tables(config)
        case PythonExamples():
            return python_tables(config, domain, config.text_key)
        case _:
            assert_never(config)


class _Check:
    """Renders examples before training, and keeps what is known of their lengths."""

    def __init__(self, renderer: ChatRenderer, max_tokens: int | None, score_at_end: bool, every: bool) -> None:
        self._renderer, self._max_tokens, self._score_at_end = renderer, max_tokens, score_at_end
        self.every = every
        self.longest = self.num_learnt = self.num_rendered = self.num_cut = 0

    def usable(self, source: _Source, config: ExampleDataConfig, bad: BadRows) -> _Source:
        """The source without examples that cannot be rendered; of a large one, some are tried."""
        numbers = range(len(source)) if self.every else range(0, len(source), max(len(source) // NUM_MEASURED, 1))
        out: list[int] = []
        for index in numbers:
            draw = ExampleDraw(draw_id=0, example=source[index], position=-1)
            try:
                samples = samples_of(
                    draw, self._renderer, self._max_tokens, config.too_long, score_at_end=self._score_at_end
                )
            except DataError as error:
                reason = error.reason if isinstance(error, SkippedExample) else "cannot be rendered"
                bad.add(reason, f"{source.where(index)}: {error}")
                out.append(index)
            else:
                self.num_rendered += 1
                self.num_learnt += sum(int(sample.loss_mask.sum()) for sample in samples)
                self.longest = max(self.longest, *(len(sample) for sample in samples))
        if not out or not self.every or not isinstance(source, RowItems):
            return source
        return source.without(out)


def _say(bad: BadRows, domain: str, config: ExampleDataConfig) -> None:
    """Refuse bad rows, or say that they are left out.

    Raises:
        DataError: there are some, and they are to be refused.
    """
    if not bad.counts:
        return
    skipped = isinstance(config, ExampleColumns) and config.on_bad_row == "skip"
    if not skipped:
        raise DataError(f"{bad.text(domain)}\nCorrect them, or leave them out with `on_bad_row: skip`.")
    logger.warning("%s\nThey are left out.", bad.text(domain))
