"""Rows of data sets, read as pipelines read them, and the text that the model is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from roll.config.data import PythonData
from roll.config.examples import PythonExamples
from roll.data import PromptData, build_data
from roll.data.examples import ExampleData, ExampleKind, build_examples

__all__ = ["asked", "learnt", "prompt_data", "row_examples", "whole"]


def row_examples(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], kind: ExampleKind = "supervised", **settings: Any
) -> ExampleData:
    """Return the examples of rows."""
    entry = PythonExamples(**{"source": "python", "held_out": 0, **settings}).with_rows(list(rows))
    return build_examples([entry], kind, tokenizer, 0)


def whole(tokenizer: PreTrainedTokenizerBase, row: Any, kind: ExampleKind = "supervised", **settings: Any) -> list[str]:
    """Return the texts of a row's samples."""
    examples = row_examples(tokenizer, [row], kind, **settings)
    samples = examples.build_samples(examples.train.draw(1)[0])
    return [tokenizer.decode(sample.token_ids) for sample in samples if not isinstance(sample, str)]


def learnt(
    tokenizer: PreTrainedTokenizerBase, row: Any, kind: ExampleKind = "supervised", **settings: Any
) -> list[list[str]]:
    """Return the stretches of text that are learnt, of each sample of a row."""
    examples = row_examples(tokenizer, [row], kind, **settings)
    found = []
    for sample in examples.build_samples(examples.train.draw(1)[0]):
        assert not isinstance(sample, str), sample
        borders = np.flatnonzero(np.diff(np.concatenate([[False], sample.loss_mask, [False]]).astype(int)))
        pairs = zip(borders[::2], borders[1::2], strict=True)
        found.append([tokenizer.decode(sample.token_ids[begin:end]) for begin, end in pairs])
    return found


def prompt_data(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], **settings: Any) -> PromptData:
    """Return the prompts of rows."""
    fixed = {"source": "python", "held_out": 0, "reward": "math", "domain": "rows"}
    return build_data([PythonData(**{**fixed, **settings}).with_rows(list(rows))], tokenizer, 0)


def asked(tokenizer: PreTrainedTokenizerBase, row: Any, **settings: Any) -> str:
    """Return the text that the model is given for a row's prompt."""
    return tokenizer.decode(prompt_data(tokenizer, [row], **settings).train.draw(1)[0].token_ids)
