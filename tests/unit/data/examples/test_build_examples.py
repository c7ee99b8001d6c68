"""From data sets as people have them to training samples."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase
from worlds.rows import asked

from roll.config.examples import (
    ArithmeticExamples,
    ExampleDataConfig,
    FileExamples,
    HuggingFaceExamples,
    PythonExamples,
)
from roll.data.examples import ExampleData, ExampleKind, build_examples
from roll.data.examples.reader import ExampleReader
from roll.data.examples.report import BadRowCollector
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


def first_samples(examples: ExampleData) -> tuple[TrainingSample, ...]:
    samples = examples.build_samples(examples.train.draw(1)[0])
    assert not isinstance(samples, str), samples
    return samples


class World:
    """Rows in a file, read as a pipeline would."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
        self.tokenizer, self.path = tokenizer, path

    def examples(self, rows: Iterable[Any], kind: ExampleKind = "supervised", **settings: Any) -> ExampleData:
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
def test_examples_a_conversation_is_read_in_every_form_that_people_have(world: World, row: Any) -> None:
    assert world.texts(row) == [(CHAT, "2<|im_end|>")]


def test_examples_every_answer_of_a_conversation_is_learnt(world: World) -> None:
    assert world.texts({"messages": [USER, ANSWER, USER, ANSWER]}) == [(CHAT, "2<|im_end|>2<|im_end|>")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "3"}]},
        {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "3"}]},
    ],
)
def test_examples_a_pair_shares_its_prompt(world: World, row: Any) -> None:
    assert world.texts(row, "pair") == [(CHAT, "2<|im_end|>"), (CHAT, "3<|im_end|>")]
    examples = world.examples([{**row, "margin": 0.5}], "pair")
    better, worse = first_samples(examples)
    assert (better.unit, better.preferred, better.target) == (0, True, 0.5)
    assert (worse.unit, worse.preferred, worse.target) == (0, False, 0.5)
    assert better.prefix_length == worse.prefix_length == len(world.tokenizer(CHAT, add_special_tokens=False).input_ids)
    assert {better.sample_id, worse.sample_id} == {"0.0", "0.1"}


def test_examples_bad_rows_are_counted_and_named_before_training(world: World) -> None:
    good = {"messages": [USER, ANSWER]}
    empty = {"messages": [USER, {**ANSWER, "content": " "}]}
    said = world.refusal([good, empty, {"question": "x"}, *[empty] * 4])
    assert said.startswith("6 of 7 rows of data source 'file' cannot be used for training:\n  5 × empty answer\n")
    assert said.count("is empty: fill it in") == 3 and "line 2: message 2 (assistant) is empty" in said
    assert "line 3: no column contains text to train on. Available columns: 'question'" in said
    examples = world.examples([good, empty], on_bad_row="skip")
    assert examples.train.num_items == 1 and examples.report.bad["file"].counts == {"empty answer": 1}


def test_examples_sums_are_the_same_as_the_prompts(tokenizer: PreTrainedTokenizerBase) -> None:
    examples = build_examples([ArithmeticExamples(source="arithmetic")], "supervised", tokenizer, 0)
    assert (examples.train.num_items, len(examples.held_out)) == (57, 24)
    (sample,) = first_samples(examples)
    text = tokenizer.decode(sample.token_ids[sample.loss_mask])
    assert text.endswith("<|im_end|>") and 2 <= int(text.removesuffix("<|im_end|>")) <= 18
    assert examples.report.num_tokens == pytest.approx(2.4, abs=0.2)  # tokens are letters: some answers have two digits


def test_examples_a_text_is_learnt_as_a_whole_with_its_end(world: World) -> None:
    assert world.texts({"text": "Once upon"}) == [("O", f"nce upon{world.tokenizer.eos_token}")]


def test_examples_a_text_may_be_a_chat_that_is_written_out_already(world: World) -> None:
    examples = world.examples([{"text": f"{CHAT}2<|im_end|>"}])
    (sample,) = first_samples(examples)
    assert sample.token_ids[0] == world.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert sample.token_ids.tolist().count(world.tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2  # no third one


def test_examples_an_input_comes_below_its_instruction(world: World) -> None:
    ((asked, learnt),) = world.texts({"instruction": "Add", "input": "1 and 1", "output": "2"})
    assert asked == CHAT.replace("1 + 1?", "Add\n\n1 and 1") and learnt == "2<|im_end|>"


def test_examples_columns_may_have_other_names_and_a_form_may_be_turned_off(world: World) -> None:
    row = {"messages": [USER, {**ANSWER, "content": "no"}], "q": "1 + 1?", "a": "2"}
    assert world.texts(row, messages_key=None, prompt_key="q", completion_key="a") == [(CHAT, "2<|im_end|>")]
    assert world.texts({"dialogue": [USER, ANSWER]}, messages_key="dialogue") == [(CHAT, "2<|im_end|>")]


def test_examples_prompts_are_dressed_as_prompt_sources_are(world: World) -> None:
    settings = {"system_prompt": "Brief.", "prompt_template": "Q: {prompt}"}
    system = "<|im_start|>system\nBrief.<|im_end|>\n"
    ((asked, _),) = world.texts({"prompt": "1 + 1?", "completion": "2"}, **settings)
    assert asked == system + CHAT.replace("1 + 1?", "Q: 1 + 1?")
    ((asked, _),) = world.texts({"messages": [USER, ANSWER]}, **settings)
    assert asked == system + CHAT.replace("1 + 1?", "Q: 1 + 1?")
    ((asked, _),) = world.texts({"messages": [{"role": "system", "content": "Own."}, USER, ANSWER]}, **settings)
    assert asked == system.replace("Brief", "Own") + CHAT.replace("1 + 1?", "Q: 1 + 1?")
    assert "requires exactly one user message" in world.refusal(
        [{"messages": [USER, ANSWER, USER, ANSWER]}], **settings
    )


def test_examples_content_in_parts_is_joined(world: World) -> None:
    parts = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]
    assert world.texts({"messages": [{"role": "user", "content": parts}, ANSWER]}) == [(CHAT, "2<|im_end|>")]
    image = {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}
    assert "the model supports only text; images require a vision-language model" in world.refusal([image])


def test_examples_answers_without_a_prompts_column_are_texts_that_differ_at_their_end(world: World) -> None:
    row = {"chosen": "\n\nHuman: 1 + 1?\n\nAssistant: 2", "rejected": "\n\nHuman: 1 + 1?\n\nAssistant: 30"}
    end, common = world.tokenizer.eos_token, "\n\nHuman: 1 + 1?\n\nAssistant: "
    assert world.texts(row, "pair", prompt_key=None) == [(common, f"2{end}"), (common, f"30{end}")]


def test_examples_a_whole_conversation_on_each_side_needs_no_prompt_and_ignores_one(world: World) -> None:
    other = {**ANSWER, "content": "3"}
    row = {"prompt": "1 + 1?", "chosen": [USER, ANSWER], "rejected": [USER, other], "messages": [USER, ANSWER]}
    assert world.texts(row, "pair") == [(CHAT, "2<|im_end|>"), (CHAT, "3<|im_end|>")]


def test_examples_answers_that_begin_alike_share_their_prompt_alone(world: World) -> None:
    examples = world.examples([{"prompt": "1 + 1?", "chosen": "It is 2", "rejected": "It is 3"}], "pair")
    better, worse = first_samples(examples)
    assert world.tokenizer.decode(better.token_ids[: better.prefix_length]) == CHAT
    assert int(better.loss_mask.argmax()) == int(worse.loss_mask.argmax()) == better.prefix_length


@pytest.mark.parametrize("label", [True, 1, 1.0])
def test_examples_a_labelled_answer_says_whether_it_is_wanted(world: World, label: Any) -> None:
    (wanted,) = first_samples(world.examples([{"prompt": "1 + 1?", "completion": "2", "label": label}], "labelled"))
    (unwanted,) = first_samples(world.examples([{"prompt": "1 + 1?", "completion": "2", "label": 0}], "labelled"))
    assert (wanted.preferred, unwanted.preferred, wanted.target) == (True, False, None)


def test_examples_of_a_whole_conversation_the_last_answer_is_judged(world: World) -> None:
    row = {"messages": [USER, ANSWER, USER, ANSWER], "label": True}
    ((asked, learnt),) = world.texts(row, "labelled")
    assert asked == f"{CHAT}2<|im_end|>\n{CHAT}" and learnt == "2<|im_end|>"


@pytest.mark.parametrize("kind", ["pair", "scored"])
def test_examples_a_score_is_read_after_the_last_token(world: World, kind: ExampleKind) -> None:
    answers = {"chosen": "2", "rejected": "3", "margin": None} if kind == "pair" else {"completion": "2", "score": 2}
    row = {"prompt": "1 + 1?", **answers}
    scored = first_samples(world.examples([row], kind, score_at_end=True))
    plain = first_samples(world.examples([row], kind))
    end = world.tokenizer.eos_token_id
    for sample, before in zip(scored, plain, strict=True):
        assert sample.token_ids.tolist() == [*before.token_ids.tolist(), end]
        assert sample.loss_mask.tolist() == [False] * len(before) + [True]
        assert sample.prefix_length == before.prefix_length
        assert sample.target == (2.0 if kind == "scored" else None)


def test_examples_the_token_at_the_end_fits_into_the_context(world: World) -> None:
    row = {"prompt": "1 + 1?", "completion": "2", "score": 2}
    (sample,) = first_samples(world.examples([row], "scored", score_at_end=True))
    world.examples([row], "scored", score_at_end=True, max_tokens=len(sample))
    refusal = world.refusal([row], "scored", score_at_end=True, max_tokens=len(sample) - 1)
    assert f"the example has {len(sample) - 1} tokens, but the context length is {len(sample) - 2}" in refusal


def test_examples_further_columns_are_metadata(world: World) -> None:
    examples = world.examples([{"prompt": "1 + 1?", "completion": "2", "topic": "sums"}])
    assert examples.train.draw(1)[0].example.metadata == {"topic": "sums"}


def test_examples_the_same_question_is_never_on_both_sides(world: World) -> None:
    rows = [{"prompt": f"{i % 50}?", "completion": str(i)} for i in range(200)]
    examples = world.examples(rows, held_out=0.3)
    held_out = {e.conversations[0].messages[0].text for e in (d.example for d in examples.get_evaluation_draws(200))}
    trained = {d.example.conversations[0].messages[0].text for d in examples.train.draw(examples.train.num_items)}
    assert held_out and trained and not held_out & trained and len(held_out | trained) == 50


def test_examples_of_two_texts_what_is_asked_is_what_both_begin_with() -> None:
    """So pairs that answer the same are on the same side of what is held out."""
    config = FileExamples(source="file", path="rows.jsonl", prompt_key=None)
    reader = ExampleReader(config, "d", "pair", lambda text: None, BadRowCollector())
    pairs = [{"chosen": f"1 + 1? {good}", "rejected": f"1 + 1? {bad}"} for good, bad in (("2", "3"), ("two", "five"))]
    items = [reader.read(pair, str(number), "here") for number, pair in enumerate(pairs)]
    assert [list(reader.get_question(item)) for item in items] == [["1 + 1? "], ["1 + 1? "]]


def test_examples_parquet_and_datasets_and_objects_give_the_same(
    world: World, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    import datasets
    import pyarrow
    from pyarrow import parquet

    rows = [{"messages": [USER, ANSWER], "text": None}, {"messages": None, "text": "Once"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    entries: list[ExampleDataConfig] = [
        FileExamples(source="file", path=str(tmp_path / "rows.parquet"), held_out=0),
        HuggingFaceExamples(source="huggingface", path=str(tmp_path / "saved"), held_out=0),
        PythonExamples(source="python", held_out=0).with_rows(rows),
        PythonExamples(source="python", held_out=0).with_rows([rows[0], "Once"]),
    ]
    found = []
    for entry in entries:
        examples = build_examples([entry], "supervised", tokenizer, 0)
        found.append(
            sorted(tokenizer.decode(s.token_ids) for d in examples.train.draw(2) for s in examples.build_samples(d))
        )
    assert found[0] == found[1] == found[2] == found[3] == sorted([f"{CHAT}2<|im_end|>\n", "Once<|im_end|>"])


def test_examples_another_file_may_be_held_out(world: World, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", [{"prompt": "2 + 2?", "completion": "4"}])
    examples = world.examples([{"prompt": "1 + 1?", "completion": "2"}], held_out=0.5, held_out_path=other)
    assert [d.uid for d in examples.get_evaluation_draws(9)] == ["file/held_out/1"] and examples.train.num_items == 1


@pytest.mark.parametrize(("weights", "shares"), [((3, 1), (6, 2)), ((None, None), (2, 6))])
def test_examples_sources_are_mixed_by_their_weights_and_else_by_their_sizes(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, weights: tuple[Any, Any], shares: tuple[int, int]
) -> None:
    entries: list[ExampleDataConfig] = []
    for domain, size, weight in zip("ab", (2, 6), weights, strict=True):
        path = write(tmp_path / f"{domain}.jsonl", [{"text": f"{domain} {i}"} for i in range(size)])
        asked = write(tmp_path / f"{domain}-other.jsonl", [{"text": f"other {domain} {i}"} for i in range(3)])
        entries.append(FileExamples(source="file", domain=domain, path=path, held_out_path=asked, weight=weight))
    examples = build_examples(entries, "supervised", tokenizer, 0)
    drawn = [draw.example.domain for draw in examples.train.draw(8)]
    assert (drawn.count("a"), drawn.count("b")) == shares
    measured = [draw.uid for draw in examples.get_evaluation_draws(4)]  # any beginning has some of every source
    assert [uid.split("/")[:2] for uid in measured] == [["a", "held_out"], ["b", "held_out"]] * 2
    assert len(set(measured)) == 4


def test_examples_a_sum_may_be_written_out_in_its_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    config = ArithmeticExamples(source="arithmetic", answer_template="{sum} = {answer}")
    source = build_examples([config], "supervised", tokenizer, 0)
    for draw in source.train.draw(5):
        (sample,) = source.build_samples(draw)
        text = tokenizer.decode(sample.token_ids[sample.loss_mask].tolist(), skip_special_tokens=True)
        a, plus, b, equals, number = text.split()
        assert (plus, equals, int(number)) == ("+", "=", int(a) + int(b))
    with pytest.raises(ValueError, match=r"must contain \{answer\}"):
        ArithmeticExamples(source="arithmetic", answer_template="{sum}")


def test_examples_sums_are_no_pairs(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="'arithmetic' generates sums with one answer each, but this pipeline"):
        build_examples([ArithmeticExamples(source="arithmetic")], "pair", tokenizer, 0)


def test_examples_every_row_of_the_documentation_is_read(world: World) -> None:
    page = (Path(__file__).parents[4] / "docs" / "data-formats.md").read_text()
    rows = [json.loads(row) for row in re.findall(r"`(\{\".*?\})`(?= \||\s\()", page)]
    kinds: dict[str, ExampleKind] = {"chosen": "pair", "label": "labelled", "score": "scored"}
    found: list[ExampleKind] = []
    prompts = [row for row in rows if "answer" in row]
    assert len(prompts) == 3
    for row in prompts:
        assert "1 + 1?" in asked(world.tokenizer, row)
    for row in (row for row in rows if "answer" not in row):
        kind = next((kind for column, kind in kinds.items() if column in row), "supervised")
        assert len(world.texts(row, kind)) == (2 if kind == "pair" else 1)
        found.append(kind)
    assert [found.count(kind) for kind in ("supervised", "pair", "labelled", "scored")] == [6, 3, 1, 1]
