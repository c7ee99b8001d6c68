"""Build a stream of examples, held-out examples, and a report of bad rows from the configuration's `data` entries.

table ── structure of every row ──► examples ── with few of them: every one rendered ──► stream │ held-out draws
                  │                                          │
                  └────────────────► bad rows, counted ◄─────┘   rejected, or skipped and reported
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll.config.examples import ArithmeticExamples, ExampleDataConfig
from roll.data.bad_rows import BadRows
from roll.data.chat import ChatRenderer
from roll.data.examples.checking import Check, Source, is_skipped
from roll.data.examples.reading import ExampleKind, ExampleReader
from roll.data.examples.report import Report
from roll.data.examples.samples import Rendering, UnusableExample
from roll.data.examples.stream import ExampleStream
from roll.data.examples.sums import arithmetic_examples
from roll.data.rows import split_rows
from roll.data.source import Interleaved
from roll.data.stream import WeightedSource
from roll.data.tables import tables_of
from roll.errors import DataError
from roll.protocols import Items
from roll.types import Example, ExampleDraw, TrainingSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["EAGER_CHECK", "Examples", "build_examples", "count_examples"]

logger = logging.getLogger(__name__)

EAGER_CHECK = 20_000
"""With at most this many examples, all are rendered at the start, so unusable ones are known before training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """The examples of a run."""

    train: ExampleStream
    held_out: Items[Example]
    """All held-out examples, domains interleaved."""
    held_out_fingerprints: Mapping[str, str]
    """Fingerprints by domain; equal for equal examples in equal order."""
    rendering: Rendering
    settings: dict[str, ExampleDataConfig]
    """Settings by domain."""
    report: Report

    def samples(self, draw: ExampleDraw) -> tuple[TrainingSample, ...] | str:
        """Return the draw's samples, or the reason it is skipped, if its source skips such examples.

        Raises:
            UnusableExample: The example cannot be trained on, and must not be skipped.
        """
        config = self.settings[draw.example.domain]
        try:
            return self.rendering.samples(draw, config.too_long)[0]
        except UnusableExample as error:
            if is_skipped(config, error.reason):
                return error.reason
            raise UnusableExample(error.reason, f"example '{draw.uid}': {error}") from error

    def evaluation(self, num_examples: int) -> list[ExampleDraw]:
        """Return the first `num_examples` held-out examples (all, if there are fewer), always the same ones."""
        chosen = [self.held_out[i] for i in range(min(num_examples, len(self.held_out)))]
        return [ExampleDraw(draw_id=i, example=example, position=-1) for i, example in enumerate(chosen)]


@dataclass(kw_only=True, slots=True)
class _Loaded:
    """One entry of the configuration, with its examples."""

    config: ExampleDataConfig
    domain: str
    training: Source
    held_out: Source
    bad: BadRows


def build_examples(
    configs: Sequence[ExampleDataConfig],
    kind: ExampleKind,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    max_tokens: int | None = None,
    *,
    score_at_end: bool = False,
    pipeline: str = "",
) -> Examples:
    """Read every source.

    Args:
        configs: The entries of the configuration; their domains differ.
        kind: The kind of examples that the pipeline trains on.
        tokenizer: The model's tokenizer, with its chat template.
        seed: Seed of the order and of the held-out split.
        max_tokens: Longest context, in tokens.
        score_at_end: See `Rendering`.
        pipeline: The pipeline's name, for messages.

    Raises:
        DataError: A source cannot be read or is empty, or rows cannot be trained on; the message names all of them.
    """
    rendering = Rendering(renderer=ChatRenderer(tokenizer), max_tokens=max_tokens, score_at_end=score_at_end)
    if len({config.weight is None for config in configs}) == 2:
        raise DataError("some data sources have a weight and others none: give every one a weight, or none of them.")
    loaded = list(_load(configs, kind, seed, rendering.renderer.special_in, pipeline))
    total = sum(len(entry.training) + len(entry.held_out) for entry in loaded)
    check = Check(rendering=rendering, every=total <= EAGER_CHECK)
    for entry in loaded:
        entry.training, entry.held_out = (
            check.usable(side, entry.config, entry.bad) for side in (entry.training, entry.held_out)
        )
    _refuse_bad_rows(loaded)
    sources = [
        WeightedSource(
            domain=entry.domain,
            items=entry.training,
            weight=entry.config.weight or len(entry.training),
            fingerprint=entry.training.fingerprint,
        )
        for entry in loaded
    ]
    report = check.report({entry.domain: entry.bad for entry in loaded})
    if lines := list(report.lines()):
        logger.warning("%s", "\n".join(lines))
    return Examples(
        train=ExampleStream(sources, seed),
        held_out=Interleaved([entry.held_out for entry in loaded]),
        held_out_fingerprints={entry.domain: entry.held_out.fingerprint for entry in loaded},
        rendering=rendering,
        settings={entry.domain: entry.config for entry in loaded},
        report=report,
    )


def count_examples(configs: Sequence[ExampleDataConfig], kind: ExampleKind, seed: int, pipeline: str = "") -> int:
    """Count the training examples, as far as possible without the model's tokenizer.

    Raises:
        DataError: A source cannot be read or is empty, or rows cannot be trained on; the message names all of them.
    """
    loaded = list(_load(configs, kind, seed, lambda text: None, pipeline))
    _refuse_bad_rows(loaded)
    return sum(len(entry.training) for entry in loaded)


def _load(
    configs: Sequence[ExampleDataConfig],
    kind: ExampleKind,
    seed: int,
    special_in: Callable[[str], str | None],
    pipeline: str,
) -> Iterator[_Loaded]:
    for config in configs:
        domain, bad = config.domain or config.source, BadRows()
        if not isinstance(config, ArithmeticExamples):
            reader = ExampleReader(config, domain, kind, special_in, bad, pipeline)
            sides: tuple[Source, Source] = split_rows(reader, tables_of(config, domain, config.text_key), seed)
        elif kind == "supervised":
            sides = arithmetic_examples(config, domain, seed)
        else:
            raise DataError(
                f"data source '{domain}' has one answer to each sum, which this pipeline cannot learn from: use rows "
                "that have what it compares."
            )
        bad.num_rows = len(sides[0]) + len(sides[1]) + bad.counts.total()
        yield _Loaded(config=config, domain=domain, training=sides[0], held_out=sides[1], bad=bad)


def _refuse_bad_rows(loaded: Sequence[_Loaded]) -> None:
    """Report the bad rows of all sources at once, unless they are skipped.

    Raises:
        DataError: A source has bad rows that must not be skipped, or has no example to train on.
    """
    lines: list[str] = []
    for entry in loaded:
        if any(not is_skipped(entry.config, reason) for reason in entry.bad.counts):
            lines += entry.bad.lines(entry.domain)
    if lines:
        raise DataError("\n".join([*lines, "Correct them, or leave them out with `on_bad_row: skip`."]))
    for entry in loaded:
        if not len(entry.training):
            lost = f"all but {entry.bad.num_rows - entry.bad.counts.total():,} of its rows are left out"
            raise DataError(
                f"data source '{entry.domain}' leaves no example for training: "
                + (f"{lost}." if entry.bad.counts else f"lower its held_out ({entry.config.held_out}).")
            )
