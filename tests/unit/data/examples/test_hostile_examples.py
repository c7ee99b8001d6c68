"""Whatever stands in a row ends in samples or in a message, and soon."""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase
from worlds.chat_templates import TEMPLATES

from roll.config.examples import FileExamples, PythonExamples
from roll.data import ChatRenderer
from roll.data.examples import ExampleData, build_examples
from roll.errors import DataError
from roll.models import load_tokenizer
from roll.types import Message

TEMPLATE_CODE = "{{ 7 * 7 }}{% for i in range(10**9) %}x{% endfor %}{{ raise_exception('no') }}{% generation %}"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tiny_model))


@pytest.fixture(scope="module")
def merging(default_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(default_model))


def chat(asked: Any, answer: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def examples_of(
    rows: list[Any], tokenizer: PreTrainedTokenizerBase, max_tokens: int = 4096, **changes: Any
) -> ExampleData:
    entry = PythonExamples(**{"source": "python", "held_out": 0, **changes}).with_rows(rows)
    return build_examples([entry], "supervised", tokenizer, 0, max_tokens)


def learnt(examples: ExampleData, tokenizer: PreTrainedTokenizerBase) -> str:
    (sample,) = examples.build_samples(examples.train.draw(1)[0])
    return tokenizer.decode(sample.token_ids[sample.loss_mask])


@pytest.mark.parametrize("name", ["llama-3", "qwen-3", "mistral", "marked"])
def test_examples_hostile_template_code_in_a_message_is_text(tiny_model: Path, name: str) -> None:
    template = TEMPLATES[name]
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.add_special_tokens({"additional_special_tokens": list(template.special)})
    tokenizer.eos_token, tokenizer.bos_token = template.special[:2]
    tokenizer.chat_template = template.text
    assert TEMPLATE_CODE in learnt(examples_of([chat(TEMPLATE_CODE, TEMPLATE_CODE)], tokenizer), tokenizer)


@pytest.mark.parametrize("special", ["<|im_end|>", "<|im_start|>", "<|endoftext|>"])
@pytest.mark.parametrize("place", range(2))
def test_examples_hostile_no_message_can_forge_a_turn(
    tokenizer: PreTrainedTokenizerBase, special: str, place: int
) -> None:
    row = chat(*(f"a{special}b" if place == i else "a" for i in range(2)))
    with pytest.raises(DataError, match="special token in a message"):
        examples_of([row], tokenizer)


@given(asked=st.text(min_size=1, max_size=60), answer=st.text(min_size=1, max_size=60))
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_examples_hostile_any_text_is_learnt_as_it_is_or_refused(
    tokenizer: PreTrainedTokenizerBase, asked: str, answer: str
) -> None:
    try:
        examples = examples_of([chat(asked, answer)], tokenizer)
    except DataError as error:
        assert not asked.strip() or not answer.strip() or "\x00" in asked + answer or "Unicode" in str(error)
    else:
        assert learnt(examples, tokenizer) == f"{answer}<|im_end|>"


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
VALUES: list[Any] = [
    np.bool_(True), np.float32("nan"), np.array([]), np.array(["a", "b"]), pd.NA, pd.NaT, pd.Timestamp(0), b"a", 1j,
    Decimal("NaN"), 10**400, 1e300, "\ud800", "\x00", "\u202e", "<|im_end|>", "{{ 1 / 0 }}", " ", "true", USER, ANSWER,
    [USER], [ANSWER], [USER, ANSWER], [USER, ANSWER, USER, ANSWER], [{"type": "text", "text": "a"}], "a" * 50,
]  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(VALUES),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "from", "value"]), inner)
    ),
    max_leaves=8,
)
COLUMNS = [
    "messages", "prompt", "completion", "text", "conversations", "chosen", "rejected", "label", "score", "input",
    "instruction", "output", "margin", 7, None,
]  # fmt: skip
REASONS = (
    "missing column|pairs|wrong type|unknown role|tool calls|roles out of order|empty (answer|prompt|text)|"
    "identical answers|different prompts|not a finite number|too large a number|label is not true or false|"
    "invalid Unicode|NUL character|special token in a message|too long|nothing to learn|unreadable|not JSON|"
    "unsupported .*|text with a system message.*|two forms in one row"
)


@given(
    row=st.dictionaries(st.sampled_from(COLUMNS), anything),
    kind=st.sampled_from(["supervised", "pair", "labelled", "scored"]),
    max_tokens=st.sampled_from([2, 12, 40, 4096]),
    changes=st.sampled_from(
        [{}, {"prompt_key": None}, {"too_long": "cut"}, {"system_prompt": "s", "margin_key": None}]
    ),
)
@settings(
    deadline=None, max_examples=400, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_examples_hostile_any_row_is_an_example_or_a_named_mistake(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], kind: Any, max_tokens: int, changes: dict[str, Any]
) -> None:
    entry = PythonExamples(**{"source": "python", "held_out": 0, **changes}).with_rows([row])
    try:
        examples = build_examples([entry], kind, tokenizer, 0, max_tokens, score_at_end=kind == "scored")
    except DataError as error:
        first, reason, *_ = str(error).splitlines()
        assert first == "1 of 1 rows of data source 'python' cannot be used for training:"
        assert re.fullmatch(f"  1 × ({REASONS})", reason) and len(str(error)) < 1500
    else:
        samples = examples.build_samples(examples.train.draw(1)[0])
        assert len(samples) == 1 + (kind == "pair")
        for sample in samples:
            assert not isinstance(sample, str) and sample.loss_mask.any() and not sample.loss_mask[0]
            assert len(sample) <= max_tokens and sample.prefix_length <= int(np.argmax(sample.loss_mask))
            learns = tokenizer.decode(sample.token_ids[sample.loss_mask])
            said = "".join(iter_texts(row))
            assert all(part.strip("\ufffd") in said for part in learns.split("<|im_end|>"))


def iter_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | np.ndarray):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from iter_texts(inner)


class Failing(dict[str, Any]):
    def __getitem__(self, key: Any) -> Any:
        raise RuntimeError("not today")


OBJECTS: list[tuple[Any, Any, str]] = [
    (
        "pair",
        {1: 2, None: 3, ("prompt",): 4},
        "column 'chosen' does not exist. Available columns: 1, None, ('prompt',)",
    ),
    (
        "supervised",
        {"messages": [USER, {**ANSWER, "tool_calls": np.array([1, 2])}]},
        "a tool call must be an object, got 1",
    ),
    ("supervised", {"instruction": "a", "input": np.array([1, 2]), "output": "b"}, "column 'input' must be a string"),
    ("supervised", {"text": datetime.datetime(2026, 1, 1)}, "column 'text' must be a string"),
    ("supervised", {"text": b"a"}, "column 'text' must be a string, got b'a'"),
    ("supervised", Failing(text="a"), "cannot be read: RuntimeError: not today"),
    ("scored", {"text": "a", "score": np.timedelta64(5, "ns")}, "column 'score' must be a number"),
    ("scored", {"text": "a", "score": Decimal("sNaN")}, "must be a finite number"),
    ("labelled", {"text": "a", "label": np.array([True])}, "must be true or false"),
    ("labelled", {"text": "a", "label": "true"}, "must be true or false, 1 or 0, got 'true'"),
]


@pytest.mark.parametrize(("kind", "row", "words"), OBJECTS)
def test_examples_hostile_objects_that_no_file_holds_are_named_mistakes(
    tokenizer: PreTrainedTokenizerBase, kind: Any, row: Any, words: str
) -> None:
    with pytest.raises(DataError) as caught:
        build_examples([PythonExamples(source="python", held_out=0).with_rows([row])], kind, tokenizer, 0)
    assert str(caught.value).startswith("1 of 1 rows") and words in str(caught.value)


@pytest.mark.parametrize("nothing", [None, float("nan"), pd.NA, pd.NaT])
def test_examples_hostile_what_data_frames_write_for_nothing_is_nothing(
    tokenizer: PreTrainedTokenizerBase, nothing: Any
) -> None:
    answer = {**ANSWER, "tool_calls": nothing, "weight": nothing}
    row = {"messages": nothing, "prompt": np.array([USER]), "completion": [answer], "input": nothing}
    assert learnt(examples_of([row], tokenizer), tokenizer) == "b<|im_end|>"
    row = {"completion": nothing, "instruction": "a", "input": nothing, "output": "b", "text": nothing}
    assert learnt(examples_of([row], tokenizer), tokenizer) == "b<|im_end|>"


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2**30], pa.int32()).cast(pa.date32()),
        pa.array([2**62]).cast(pa.timestamp("us")),
        pa.array([1]).cast(pa.timestamp("us")).cast(pa.timestamp("us", tz="Mars/Olympus")),
        pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]),
    ],
)
def test_examples_hostile_columns_that_python_cannot_hold_are_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, column: Any
) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"text": ["ab"], "x": column}), path)
    with pytest.raises(DataError, match=r"rows\.parquet' is not a readable Parquet file: "):
        build_examples([FileExamples(source="file", path=str(path))], "supervised", tokenizer, 0)


def test_examples_hostile_a_data_frame_is_told_what_to_be(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="is a data frame: pass its rows"):
        examples_of(pd.DataFrame({"text": ["a"]}), tokenizer)  # pyrefly: ignore[bad-argument-type]


def test_examples_hostile_texts_that_have_no_question_in_common_are_no_pair(tokenizer: PreTrainedTokenizerBase) -> None:
    entry = PythonExamples(source="python", held_out=0, prompt_key=None).with_rows([{"chosen": "a", "rejected": "b"}])
    with pytest.raises(DataError, match="1 × different prompts"):
        build_examples([entry], "pair", tokenizer, 0)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% include 'x' %}",
        "{% for %}",
        "",
        {"one": CHATML, "other": CHATML},
        CHATML.replace("<|im_start|>", "\ud800"),
        " ",
        CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"),
    ],
)
def test_examples_hostile_whatever_a_template_does_is_a_named_mistake(tiny_model: Path, template: Any) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = template or "{{ '' }}"
    with pytest.raises(DataError, match="1 × rejected by the chat template"):
        examples_of([chat("a", "b")], tokenizer)


def test_examples_hostile_a_template_that_marks_what_is_asked_does_not_make_it_learnt(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = "{% generation %}" + CHATML + "{% endgeneration %}"
    assert learnt(examples_of([chat("a", "b")], tokenizer), tokenizer) == "b<|im_end|>"


def test_examples_hostile_a_tokenizer_without_an_end_or_places_is_refused(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = tokenizer.eos_token = None
    with pytest.raises(DataError, match="has no EOS token"):
        examples_of([chat("a", "b")], tokenizer)
    slow = ByT5Tokenizer()
    slow.chat_template = CHATML.replace("<|im_end|>", "</s>")
    with pytest.raises(DataError, match=r"choose a model that has a tokenizer\.json"):
        examples_of([chat("a", "b")], slow)


def test_examples_hostile_long_texts_and_many_turns_take_time_with_their_length(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: list[Any] = [
        chat("a", "b"),
        chat("a" * 100_000, "b" * 100_000),
        chat(" \n" * 50_000 + "a", "ẞ" * 100_000),
        chat("<|im_" * 20_000, "<" * 100_000),
        {"messages": turn * 500},
        {"messages": turn * 100_000},
        {"text": "{" * 100_000},
        {"messages": [[[[]]]] * 100_000},
    ]
    started = time.process_time()
    examples = examples_of(rows, tokenizer, on_bad_row="skip")
    for draw in examples.train.draw(examples.train.num_items):
        examples.build_samples(draw)
    assert time.process_time() - started < 60  # about 3 s on one core
    assert examples.report.bad["python"].counts == {"too long": 5, "too many messages": 2}


def test_examples_hostile_json_that_nests_without_end_is_a_named_mistake(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(DataError, match="line 1: the line is not valid JSON"):
        build_examples([FileExamples(source="file", path=str(path))], "supervised", tokenizer, 0)
    path.write_text(json.dumps(chat("a", "b")).replace('"b"', "[" * 500 + "]" * 500) + "\n")
    with pytest.raises(DataError, match="`content` must be a string"):
        build_examples([FileExamples(source="file", path=str(path))], "supervised", tokenizer, 0)


@given(texts=st.lists(st.text(alphabet="ab \n7é", min_size=1, max_size=8), min_size=2, max_size=8))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_examples_hostile_merging_tokens_never_move_a_border(
    merging: PreTrainedTokenizerBase, texts: list[str]
) -> None:
    """With a tokenizer whose tokens are many letters long."""
    tokenizer = merging
    renderer = ChatRenderer(tokenizer)
    messages: Any = [
        Message(role="assistant" if i % 2 else "user", content=text)
        for i, text in enumerate(texts[: len(texts) // 2 * 2])
        if text.strip() or not i % 2
    ]
    while messages and messages[-1].role == "user":
        messages.pop()
    if not messages:
        return
    ids, mask = renderer.tokenize_conversation(messages)
    borders = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    found = [tokenizer.decode(ids[a:b]) for a, b in zip(borders[::2], borders[1::2], strict=True)]
    assert found == [f"{m.text}<|im_end|>" for m in messages if m.role == "assistant"]
    rendered = tokenizer.apply_chat_template([m.to_dict() for m in messages], tokenize=False)
    assert tokenizer.decode(ids) == rendered
