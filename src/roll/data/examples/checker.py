"""Renders examples before training, to find unusable examples and the lengths of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from roll.config.examples import ExampleColumns, ExampleDataConfig
from roll.data.bad_rows import BadRowCollector
from roll.data.examples.report import ExampleReport
from roll.data.examples.samples import TOO_LONG_REASON, SampleBuilder, UnusableExample
from roll.data.examples.sums import ArithmeticExamplesSource
from roll.data.rows import RowItems
from roll.types import Conversation, Example, ExampleDraw, TrainingSample

__all__ = ["ExampleChecker", "Source", "is_skipped"]

Source: TypeAlias = RowItems[Example] | ArithmeticExamplesSource

NUM_ESTIMATE_EXAMPLES = 200
"""Number of examples that are rendered to estimate lengths if there are too many to render all of them."""


@dataclass(kw_only=True, slots=True)
class ExampleChecker:
    """Renders examples before training, and collects their lengths and problems."""

    sample_builder: SampleBuilder
    checks_all: bool
    """If True, render all examples instead of a sample."""
    longest: int = field(default=0, init=False)
    num_trained: int = field(default=0, init=False)
    num_rendered: int = field(default=0, init=False)
    num_truncated: int = field(default=0, init=False)
    num_rewritten: int = field(default=0, init=False)
    """Number of examples with an answer that the template renders differently as the conversation continues."""

    def filter_usable(self, source: Source, config: ExampleDataConfig, bad_rows: BadRowCollector) -> Source:
        """Remove unusable examples from a source, and record them in `bad_rows`.

        If only some examples are rendered (`checks_all` is false), the whole source is returned.
        """
        numbers = range(0, len(source), 1 if self.checks_all else max(len(source) // NUM_ESTIMATE_EXAMPLES, 1))
        out: list[int] = []
        for index in numbers:
            example = source[index]
            draw = ExampleDraw(draw_id=0, example=example, position=-1)
            try:
                samples, cut = self.sample_builder.build_samples(draw, config.too_long)
            except UnusableExample as error:
                out.append(index)
                if self.checks_all or not is_skipped(config, error.reason):
                    bad_rows.add(error.reason, f"{source.describe_location(index)}: {error}")
            else:
                self._count_example(example, samples, cut)
        return source.exclude(out) if out and self.checks_all else source

    def _count_example(self, example: Example, samples: tuple[TrainingSample, ...], is_truncated: bool) -> None:
        self.num_rendered += 1
        self.num_truncated += is_truncated
        self.num_trained += sum(int(sample.loss_mask.sum()) for sample in samples)
        self.longest = max(self.longest, *(len(sample) for sample in samples))
        if not is_truncated and not self.sample_builder.score_at_end:
            sides = zip(example.conversations, samples, strict=True)
            self.num_rewritten += any(_count_answers(side) > _count_trained_spans(sample) for side, sample in sides)

    def build_report(self, bad_rows: Mapping[str, BadRowCollector]) -> ExampleReport:
        """Build the report on all checked examples; `bad_rows` contains the unusable rows by domain."""
        checked = "" if self.checks_all else f" of the {self.num_rendered:,} checked"
        notes = []
        if self.num_truncated:
            notes.append(
                f"{self.num_truncated:,} examples{checked} are longer than the context: their answers are truncated."
            )
        if self.num_rewritten:
            notes.append(
                f"{self.num_rewritten:,} conversations{checked} have answers that the model's chat template changes "
                "as the conversation continues (some leave out earlier reasoning): these are context only, and only "
                "the later answers are trained on."
            )
        return ExampleReport(
            bad=bad_rows,
            longest=self.longest if self.checks_all else None,
            num_tokens=self.num_trained / max(self.num_rendered, 1),
            num_truncated=self.num_truncated,
            num_rewritten=self.num_rewritten,
            notes=tuple(notes),
        )


def _count_answers(conversation: Conversation) -> int:
    return sum(message.role == "assistant" for message in conversation.messages[conversation.num_prompt_messages :])


def _count_trained_spans(sample: TrainingSample) -> int:
    """Count the contiguous spans of trained tokens."""
    return int(np.count_nonzero(np.diff(sample.loss_mask.astype(np.int8)) == 1))


def is_skipped(config: ExampleDataConfig, reason: str) -> bool:
    """Return whether the source skips examples with this type of problem."""
    if reason == TOO_LONG_REASON and config.too_long == "skip":
        return True
    return isinstance(config, ExampleColumns) and config.on_bad_row == "skip"
