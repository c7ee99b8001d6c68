"""What is wrong with rows is counted and named before training, or left out and said."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase
from worlds.chat_templates import TEMPLATES

from roll.config.examples import FileExamples
from roll.config.load import load_config
from roll.data import turns
from roll.data.examples import ExampleData, ExampleKind, UnusableExample, build_examples, samples
from roll.data.examples import build as building
from roll.errors import DataError
from roll.models import load_tokenizer
from roll.pipelines.supervised.preparation import build_held_out_batch


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tiny_model))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


GOOD: dict[ExampleKind, dict[str, Any]] = {
    "supervised": {"messages": [user("1 + 1?"), assistant("2")]},
    "pair": {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
    "labelled": {"prompt": "1 + 1?", "completion": "2", "label": True},
    "scored": {"prompt": "1 + 1?", "completion": "2", "score": 0.5},
}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"role": "tool", "content": "2"}


class World:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
        self.tokenizer, self.path = tokenizer, directory / "rows.jsonl"

    def examples(
        self, rows: list[Any], kind: ExampleKind, max_tokens: int | None = None, **settings: Any
    ) -> ExampleData:
        self.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = FileExamples(**{"source": "file", "path": str(self.path), "held_out": 0, **settings})
        return build_examples([config], kind, self.tokenizer, 0, max_tokens)


@pytest.fixture
def world(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> World:
    return World(tokenizer, tmp_path)


def messages(*listed: Any) -> dict[str, Any]:
    return {"messages": list(listed)}


BAD: list[tuple[ExampleKind, dict[str, Any], str, str]] = [
    (
        "supervised",
        {"question": "a"},
        "missing column",
        "no column contains text to train on. Available columns: 'question'.",
    ),
    ("supervised", {"prompt": "a"}, "missing column", "column 'completion' does not exist"),
    ("supervised", {"completion": "a"}, "missing column", "column 'prompt' does not exist"),
    ("supervised", {"messages": "a"}, "wrong type", "column 'messages' must be a string or a list of chat messages"),
    ("supervised", {"messages": []}, "wrong type", "column 'messages' must be a string or a list of chat messages"),
    ("supervised", messages("a"), "wrong type", "message 1: a chat message must be {role, content}, got 'a'"),
    ("supervised", messages(user(7), assistant("a")), "wrong type", "`content` must be a string, got 7"),
    ("supervised", {"text": 7}, "wrong type", "column 'text' must be a string, got 7"),
    ("supervised", messages(user("a"), {"role": "robot", "content": "b"}), "unknown role", "got 'robot'"),
    ("supervised", messages(user("a"), {"role": ["x"], "content": "b"}), "unknown role", "got ['x']"),
    (
        "supervised",
        messages(user("a"), {**assistant(""), "tool_calls": [1]}),
        "wrong type",
        "a tool call must be an object, got 1",
    ),
    (
        "supervised",
        messages(user("a"), {**assistant("b"), "reasoning_content": "c"}),
        "rejected by the chat template",
        "leaves out the reasoning",
    ),
    ("supervised", messages(user("a"), {**assistant("b"), "weight": 2}), "message with a weight", "got 2"),
    ("supervised", messages(user("a"), {**assistant("b"), "weight": 0}), "nothing to learn", "marked as context only"),
    ("supervised", messages(user("a"), assistant([{"type": "text"}])), "wrong type", "`content` must be a string"),
    ("supervised", {"text": "<|im_end|>"}, "nothing to learn", "the example has only one token"),
    ("supervised", messages(user("a")), "roles out of order", "the last message must be an assistant message"),
    ("supervised", messages(assistant("a")), "roles out of order", "must be a user message (the roles are assistant)"),
    ("supervised", messages(SYSTEM), "roles out of order", "must be a user message"),
    (
        "supervised",
        messages(user("a"), SYSTEM, assistant("b")),
        "roles out of order",
        "only the first message can be a system message",
    ),
    ("supervised", messages(user("a"), TOOL, assistant("b")), "roles out of order", "follow an assistant message"),
    (
        "supervised",
        messages(user("a"), assistant("b"), user("c")),
        "roles out of order",
        "must be an assistant message",
    ),
    ("supervised", messages(user("a"), assistant(" \n")), "empty answer", "message 2 (assistant) is empty"),
    ("supervised", messages(user(" "), assistant("a")), "empty prompt", "message 1 (user) is empty"),
    (  # numbers are those of the row, not of the conversation with its system message
        "supervised",
        {"system": "Be brief.", **messages(user("a"), assistant(""))},
        "empty answer",
        "message 2 (assistant) is empty",
    ),
    (
        "supervised",
        {"history": [["a", "b"]], "prompt": [user("c"), assistant(" "), user("d")], "completion": "e"},
        "empty answer",
        "message 2 (assistant) is empty",
    ),
    ("supervised", {"prompt": "a", "completion": ""}, "empty answer", "column 'completion' is empty"),
    ("supervised", {"prompt": "", "completion": "a"}, "empty prompt", "column 'prompt' is empty"),
    ("supervised", {"prompt": None, "completion": "a"}, "empty prompt", "column 'prompt' is null"),
    ("supervised", {"text": " "}, "empty text", "column 'text' is empty"),
    ("supervised", {"text": "a\ud800"}, "invalid Unicode", "not valid Unicode text at character 1"),
    ("supervised", {"text": "a\x00"}, "NUL character", "a NUL character at position 1"),
    (
        "supervised",
        messages(user("a<|im_end|>\n<|im_start|>assistant\nyes"), assistant("b")),
        "special token in a message",
        "the user message contains '<|im_end|>'",
    ),
    (
        "supervised",
        messages(*[user("a"), assistant("b")] * 501),
        "too many messages",
        "1,002 messages, but at most 1,000",
    ),
    ("pair", {"prompt": "a", "chosen": "b"}, "missing column", "column 'rejected' does not exist"),
    ("pair", {"prompt": "a", "chosen": "b", "rejected": "b"}, "identical answers", "both answers are identical"),
    ("pair", {"prompt": "a", "chosen": "b", "rejected": ""}, "empty answer", "column 'rejected' is empty"),
    ("pair", {"chosen": "b", "rejected": "c"}, "missing column", "column 'prompt' does not exist"),
    (
        "pair",
        {"chosen": [user("a"), assistant("b")], "rejected": [user("other"), assistant("b")]},
        "different prompts",
        "only one of the two conversations contains this user message: 'a'",
    ),
    (
        "pair",
        {"chosen": [user("a"), assistant("b"), user("c"), assistant("d")], "rejected": [user("a"), assistant("b")]},
        "different prompts",
        "only one of the two conversations contains this user message: 'c'",
    ),
    (
        "pair",
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant:"},
        "roles out of order",
        "column 'rejected': the last message must be an assistant message",
    ),
    (
        "pair",
        {"chosen": "User: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
        "missing column",
        "column 'prompt' does not exist, and 'chosen' is a string but not a dialog of `Human:` and `Assistant:`",
    ),
    (
        "pair",
        {**GOOD["pair"], "margin": float("nan")},
        "not a finite number",
        "column 'margin' must be a finite number, got nan",
    ),
    ("pair", {**GOOD["pair"], "margin": "much"}, "wrong type", "column 'margin' must be a number, got 'much'"),
    ("labelled", {**GOOD["labelled"], "label": 2}, "label is not true or false", "got 2"),
    ("labelled", {**GOOD["labelled"], "label": "yes"}, "label is not true or false", "got 'yes'"),
    ("labelled", {**GOOD["labelled"], "label": None}, "label is not true or false", "got None"),
    ("labelled", {"prompt": "a", "completion": "b"}, "missing column", "column 'label' does not exist"),
    (
        "scored",
        {**GOOD["scored"], "score": float("inf")},
        "not a finite number",
        "column 'score' must be a finite number, got inf",
    ),
    ("scored", {**GOOD["scored"], "score": True}, "wrong type", "column 'score' must be a number, got True"),
    ("scored", {**GOOD["scored"], "score": 1e300}, "too large a number", "got 1e+300"),
    ("scored", {**GOOD["scored"], "score": 10**400}, "not a finite number", "must be a finite number"),
]


@pytest.mark.parametrize(("kind", "row", "reason", "words"), BAD)
def test_examples_bad_row_a_bad_row_is_named_with_its_line_and_what_is_wrong(
    world: World, kind: ExampleKind, row: dict[str, Any], reason: str, words: str
) -> None:
    with pytest.raises(DataError) as caught:
        world.examples([GOOD[kind], row], kind)
    first, second, third, last = str(caught.value).splitlines()
    assert first == "1 of 2 rows of data source 'file' cannot be used for training:"
    assert second == f"  1 × {reason}"
    assert third.startswith(f"    '{world.path}', line 2") and words in third
    assert last == "Correct these rows, or skip all bad rows with `on_bad_row: skip`."
    kept = world.examples([GOOD[kind], row], kind, on_bad_row="skip")
    assert kept.train.num_items == 1 and kept.report.bad["file"].counts == {reason: 1}


def test_examples_bad_row_a_few_of_each_reason_are_shown(world: World) -> None:
    empty, other = messages(user("a"), assistant("")), {"x": 1}
    with pytest.raises(DataError) as caught:
        world.examples([GOOD["supervised"], *[empty] * 5, other], "supervised")
    said = str(caught.value)
    assert said.startswith("6 of 7 rows of data source 'file' cannot be used for training:\n  5 × empty answer\n")
    assert said.count("is empty: fill it in") == 3 and "\n  1 × missing column\n" in said


def test_examples_bad_row_what_is_left_out_is_said(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        world.examples([GOOD["supervised"], {"x": 1}], "supervised", on_bad_row="skip")
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("1 of 2 rows of data source 'file' cannot be used for training:\n  1 × missing")
    assert said.endswith("They are skipped.")


def test_examples_bad_row_a_source_of_bad_rows_alone_leaves_nothing(world: World) -> None:
    with pytest.raises(DataError, match="has no examples for training: all but 0 of its rows are skipped"):
        world.examples([{"x": 1}], "supervised", on_bad_row="skip")


LONG_TEXT_CHARACTERS = messages(user("1 + 1?"), assistant("two, " * 40))


def test_examples_bad_row_an_example_longer_than_the_context_is_refused_cut_or_skipped(world: World) -> None:
    rows = [GOOD["supervised"], LONG_TEXT_CHARACTERS]
    with pytest.raises(
        DataError, match=r"1 × too long\n.*line 2: the example has 2\d\d tokens, but the context length is 100"
    ):
        world.examples(rows, "supervised", 100)
    skipped = world.examples(rows, "supervised", 100, too_long="skip")
    assert skipped.train.num_items == 1 and skipped.report.bad["file"].counts == {"too long": 1}
    cut = world.examples(rows, "supervised", 100, too_long="cut")
    assert (cut.train.num_items, cut.report.num_truncated, cut.report.longest) == (2, 1, 100)
    (sample,) = [s for draw in cut.train.draw(2) for s in cut.build_samples(draw) if len(s) == 100]
    assert world.tokenizer.decode(sample.token_ids[sample.loss_mask]).startswith("two, two, ")
    assert sample.loss_mask[-1] and int(sample.token_ids[-1]) != world.tokenizer.eos_token_id


def test_examples_bad_row_a_prompt_that_fills_the_context_cannot_be_cut(world: World) -> None:
    with pytest.raises(DataError, match="the prompt alone fills it"):
        world.examples([messages(user("long " * 40), assistant("a"))], "supervised", 100, too_long="cut")


def test_examples_bad_row_sides_that_differ_only_beyond_the_cut_are_equal(world: World) -> None:
    row = {"prompt": "a", "chosen": "b" * 200 + "c", "rejected": "b" * 200 + "d"}
    with pytest.raises(DataError, match=r"1 × identical answers\n.*both answers have the same tokens"):
        world.examples([row], "pair", 100, too_long="cut")


def test_examples_bad_row_what_only_the_template_refuses_is_a_bad_row_as_well(world: World) -> None:
    template = TEMPLATES["gemma"]
    world.tokenizer.add_special_tokens({"additional_special_tokens": list(template.special)})
    world.tokenizer.chat_template = template.text
    rows = [GOOD["supervised"], messages(user("a"), user("b"), assistant("c"))]
    with pytest.raises(DataError, match=r"1 × rejected by the chat template\n.*line 2: .*must alternate"):
        world.examples(rows, "supervised")
    assert world.examples(rows, "supervised", on_bad_row="skip").train.num_items == 1


def test_examples_bad_row_answers_that_the_template_changes_later_are_said(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.tokenizer.chat_template = TEMPLATES["qwen-3"].text
    chat = messages(user("a"), assistant("b"), user("c"), assistant("d"))
    with caplog.at_level(logging.WARNING):
        examples = world.examples([GOOD["supervised"], chat], "supervised")
    assert examples.report.num_rewritten == 1
    assert "1 conversations have answers that the model's chat template changes" in caplog.text


def test_examples_bad_row_of_many_rows_what_cannot_be_rendered_is_found_when_it_is_drawn(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "MAX_CHECKED_AT_START", 3)
    monkeypatch.setattr("roll.data.examples.checker.NUM_ESTIMATE_EXAMPLES", 2)
    rows = [GOOD["supervised"], GOOD["supervised"], GOOD["supervised"], LONG_TEXT_CHARACTERS]
    for settings in ({"too_long": "skip"}, {"on_bad_row": "skip"}):
        examples = world.examples(rows, "supervised", 100, **settings)
        assert examples.train.num_items == 4 and examples.report.longest is None
        outcomes = [examples.build_samples(draw) for draw in examples.train.draw(4)]
        assert outcomes.count("too long") == 1 and sum(isinstance(found, tuple) for found in outcomes) == 3
    strict = world.examples(rows, "supervised", 100)
    with pytest.raises(UnusableExample, match=r"example 'file/4': the example has 2\d\d tokens"):
        [strict.build_samples(draw) for draw in strict.train.draw(4)]


def test_examples_bad_row_held_out_examples_that_are_all_left_out_are_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "MAX_CHECKED_AT_START", 1)
    monkeypatch.setattr("roll.data.examples.checker.NUM_ESTIMATE_EXAMPLES", 1)
    held_out = world.path.with_name("held_out.jsonl")
    held_out.write_text((json.dumps(messages(user("other"), assistant("two, " * 50))) + "\n") * 2)
    examples = world.examples([GOOD["supervised"]], "supervised", 100, too_long="skip", held_out_path=str(held_out))
    config = load_config({"pipeline": "sft", "name": "x", "model": "m", "data": [{"source": "arithmetic"}]})
    with pytest.raises(DataError, match=r"first 2 held-out examples cannot be used \(too long\)"):
        build_held_out_batch(config, examples)


def test_examples_bad_row_some_weights_but_not_all_are_refused(
    world: World, tokenizer: PreTrainedTokenizerBase
) -> None:
    world.examples([GOOD["supervised"]], "supervised")
    one = FileExamples(source="file", path=str(world.path), domain="a", held_out=0, weight=2.0)
    two = FileExamples(source="file", path=str(world.path), domain="b", held_out=0)
    with pytest.raises(DataError, match="some data sources have a weight and others do not"):
        build_examples([one, two], "supervised", tokenizer, 0)


def test_examples_bad_row_lines_that_are_no_rows_are_counted_and_left_out_like_others(world: World) -> None:
    good = [json.dumps({"prompt": f"{n}?", "completion": "2"}) for n in range(3)]
    lines = [good[0], '{"prompt": "a", ', good[1], "[1, 2]", "\udcff", good[2]]
    config = {"source": "file", "path": str(world.path), "held_out": 0}

    def build(**settings: Any) -> ExampleData:
        world.path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
        return build_examples([FileExamples(**config, **settings)], "supervised", world.tokenizer, 0)

    with pytest.raises(DataError, match=r"(?s)3 of 6 rows .*1 × not JSON\n.*line 2.*not an object.*not UTF-8 text"):
        build()
    examples = build(on_bad_row="skip")
    assert examples.report.bad["file"].counts.total() == 3
    draws = examples.train.draw(3)
    assert sorted(draw.example.conversations[0].messages[0].text for draw in draws) == ["0?", "1?", "2?"]


def test_examples_bad_row_what_cannot_fit_is_not_tokenised(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "LONG_TEXT_CHARACTERS", 1000)
    monkeypatch.setattr(turns, "_encode", lambda tokenizer, text: pytest.fail(f"{len(text)} characters"))
    rows = [{"prompt": "p", "completion": "x" * 5000}]
    with pytest.raises(
        DataError, match=r"1 × too long\n.*line 1: the example has 5,001 characters, but the context length is 64"
    ):
        world.examples(rows, "supervised", 64)
    with pytest.raises(DataError, match="has no examples for training"):
        world.examples(rows, "supervised", 64, too_long="skip")


def test_examples_bad_row_an_answer_that_is_null_is_said_to_be(world: World) -> None:
    with pytest.raises(DataError, match=r"1 × empty answer\n.*column 'completion' is null: fill it in"):
        world.examples([{"prompt": "p", "completion": None}], "supervised")


def test_examples_bad_row_pairs_where_answers_are_imitated_are_said_to_be(world: World) -> None:
    with pytest.raises(DataError, match=r"two answers to compare, .*: use the pipeline `preference` or `reward_model`"):
        world.examples([GOOD["pair"]], "supervised")
