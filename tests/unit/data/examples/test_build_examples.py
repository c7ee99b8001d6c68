"""From data sets as people have them to training samples."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from roll.config.examples import ArithmeticExamples, FileExamples
from roll.data.examples import ExampleKind, Examples, build_examples
from roll.errors import DataError
from roll.models import load_tokenizer
from roll.types import TrainingSample


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tiny_model))


def write(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


USER, ANSWER = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
CHAT = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"


def first_samples(examples: Examples) -> tuple[TrainingSample, ...]:
    samples = examples.samples(examples.train.draw(1)[0])
    assert not isinstance(samples, str), samples
    return samples


class World:
    """Rows in a file, read as a pipeline would."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
        self.tokenizer, self.path = tokenizer, path

    def examples(self, rows: Iterable[Any], kind: ExampleKind = "supervised", **settings: Any) -> Examples:
        own = {key: settings.pop(key) for key in ("max_tokens", "score_at_end") if key in settings}
        path = write(self.path / "rows.jsonl", rows)
        config = FileExamples(**{"source": "file", "path": path, "held_out": 0, **settings})
        return build_examples([config], kind, self.tokenizer, 0, **own)

    def texts(self, row: Any, kind: ExampleKind = "supervised", **settings: Any) -> list[tuple[str, str]]:
        """Of the samples of one row: what is not learnt before the first learnt token, and what is learnt."""
        examples = self.examples([row], kind, **settings)
        texts = []
        for sample in first_samples(examples):
            first = int(sample.loss_mask.argmax())
            learnt = sample.token_ids[sample.loss_mask]
            texts.append((self.tokenizer.decode(sample.token_ids[:first]), self.tokenizer.decode(learnt)))
        return texts

    def refusal(self, rows: Iterable[Any], kind: ExampleKind = "supervised", **settings: Any) -> str:
        with pytest.raises(DataError) as caught:
            self.examples(rows, kind, **settings)
        return str(caught.value)


@pytest.fixture
def world(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> World:
    return World(tokenizer, tmp_path)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"prompt": "1 + 1?", "completion": "2"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"instruction": "1 + 1?", "input": "", "output": "2"},
        {"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]},
    ],
)
def test_a_conversation_is_read_in_every_form_that_people_have(world: World, row: Any) -> None:
    assert world.texts(row) == [(CHAT, "2<|im_end|>")]


def test_every_answer_of_a_conversation_is_learnt(world: World) -> None:
    assert world.texts({"messages": [USER, ANSWER, USER, ANSWER]}) == [(CHAT, "2<|im_end|>2<|im_end|>")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "3"}]},
        {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "3"}]},
    ],
)
def test_a_pair_shares_its_prompt(world: World, row: Any) -> None:
    assert world.texts(row, "pair") == [(CHAT, "2<|im_end|>"), (CHAT, "3<|im_end|>")]
    examples = world.examples([{**row, "margin": 0.5}], "pair")
    better, worse = first_samples(examples)
    assert (better.unit, better.preferred, better.target) == (0, True, 0.5)
    assert (worse.unit, worse.preferred, worse.target) == (0, False, 0.5)
    assert better.prefix_length == worse.prefix_length == len(world.tokenizer(CHAT, add_special_tokens=False).input_ids)
    assert {better.sample_id, worse.sample_id} == {"0.0", "0.1"}


def test_bad_rows_are_counted_and_named_before_training(world: World) -> None:
    good = {"messages": [USER, ANSWER]}
    empty = {"messages": [USER, {**ANSWER, "content": " "}]}
    said = world.refusal([good, empty, {"question": "x"}, *[empty] * 4])
    assert said.startswith("6 of 7 rows of data source 'file' cannot be learnt from:\n  5 × empty answer\n")
    assert said.count("is empty: fill it in") == 3 and "line 2: message 2, of the assistant, is empty" in said
    assert "line 3: no column says what is learnt. It has: 'question'" in said
    examples = world.examples([good, empty], on_bad_row="skip")
    assert examples.train.num_items == 1 and examples.report.bad["file"].counts == {"empty answer": 1}


def test_sums_are_the_same_as_the_prompts(tokenizer: PreTrainedTokenizerBase) -> None:
    examples = build_examples([ArithmeticExamples(source="arithmetic")], "supervised", tokenizer, 0)
    assert (examples.train.num_items, len(examples.held_out)) == (57, 24)
    (sample,) = first_samples(examples)
    text = tokenizer.decode(sample.token_ids[sample.loss_mask])
    assert text.endswith("<|im_end|>") and 2 <= int(text.removesuffix("<|im_end|>")) <= 18
    assert examples.report.num_tokens == pytest.approx(2.4, abs=0.2)  # tokens are letters: some answers have two digits
