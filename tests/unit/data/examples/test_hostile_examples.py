"""Whatever stands in a row ends in samples or in a message, and soon."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase
from worlds.chat_templates import TEMPLATES

from roll.config.examples import FileExamples, PythonExamples
from roll.data import ChatRenderer
from roll.data.examples import Examples, build_examples
from roll.errors import DataError
from roll.models import load_tokenizer

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
) -> Examples:
    entry = PythonExamples(**{"source": "python", "held_out": 0, **changes}).with_rows(rows)
    return build_examples([entry], "supervised", tokenizer, 0, max_tokens)


def learnt(examples: Examples, tokenizer: PreTrainedTokenizerBase) -> str:
    (sample,) = examples.samples(examples.train.draw(1)[0])
    return tokenizer.decode(sample.token_ids[sample.loss_mask])


@pytest.mark.parametrize("name", ["llama-3", "qwen-3", "mistral", "marked"])
def test_template_code_in_a_message_is_text(tiny_model: Path, name: str) -> None:
    template = TEMPLATES[name]
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.add_special_tokens({"additional_special_tokens": list(template.special)})
    tokenizer.eos_token, tokenizer.bos_token = template.special[:2]
    tokenizer.chat_template = template.text
    assert TEMPLATE_CODE in learnt(examples_of([chat(TEMPLATE_CODE, TEMPLATE_CODE)], tokenizer), tokenizer)


@pytest.mark.parametrize("special", ["<|im_end|>", "<|im_start|>", "<|endoftext|>"])
@pytest.mark.parametrize("place", range(2))
def test_no_message_can_forge_a_turn(tokenizer: PreTrainedTokenizerBase, special: str, place: int) -> None:
    row = chat(*(f"a{special}b" if place == i else "a" for i in range(2)))
    with pytest.raises(DataError, match="special token in a message"):
        examples_of([row], tokenizer)


@given(asked=st.text(min_size=1, max_size=60), answer=st.text(min_size=1, max_size=60))
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_learnt_as_it_is_or_refused(tokenizer: PreTrainedTokenizerBase, asked: str, answer: str) -> None:
    try:
        examples = examples_of([chat(asked, answer)], tokenizer)
    except DataError as error:
        assert not asked.strip() or not answer.strip() or "\x00" in asked + answer or "Unicode" in str(error)
    else:
        assert learnt(examples, tokenizer) == f"{answer}<|im_end|>"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=8,
)
COLUMNS = ["messages", "prompt", "completion", "text", "conversations", "chosen", "rejected", "label", "score", "input"]


@given(
    row=st.dictionaries(st.sampled_from(COLUMNS), anything), kind=st.sampled_from(["supervised", "pair", "labelled"])
)
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_row_is_an_example_or_a_named_mistake(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], kind: Any
) -> None:
    entry = PythonExamples(source="python", held_out=0).with_rows([row])
    try:
        examples = build_examples([entry], kind, tokenizer, 0, 4096)
    except DataError as error:
        assert str(error).startswith("1 of 1 rows of data source 'python' cannot be learnt from:")
    else:
        for sample in examples.samples(examples.train.draw(1)[0]):
            assert sample.loss_mask.any() and not sample.loss_mask[0]


def test_long_texts_and_many_turns_take_time_with_their_length(tokenizer: PreTrainedTokenizerBase) -> None:
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
    started = time.monotonic()
    examples = examples_of(rows, tokenizer, on_bad_row="skip")
    for draw in examples.train.draw(examples.train.num_items):
        examples.samples(draw)
    assert time.monotonic() - started < 60  # about 3 s on one core
    assert examples.report.bad["python"].counts == {"too long": 5, "too many messages": 2}


def test_json_that_nests_without_end_is_a_named_mistake(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(DataError, match="line 1: not JSON"):
        build_examples([FileExamples(source="file", path=str(path))], "supervised", tokenizer, 0)
    path.write_text(json.dumps(chat("a", "b")).replace('"b"', "[" * 500 + "]" * 500) + "\n")
    with pytest.raises(DataError, match="`content` must be text"):
        build_examples([FileExamples(source="file", path=str(path))], "supervised", tokenizer, 0)


@given(texts=st.lists(st.text(alphabet="ab \n7é", min_size=1, max_size=8), min_size=2, max_size=8))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_merging_tokens_never_move_a_border(merging: PreTrainedTokenizerBase, texts: list[str]) -> None:
    """With a tokenizer whose tokens are many letters long."""
    tokenizer = merging
    renderer = ChatRenderer(tokenizer)
    messages: Any = [
        {"role": "assistant" if i % 2 else "user", "content": text}
        for i, text in enumerate(texts[: len(texts) // 2 * 2])
        if text.strip() or not i % 2
    ]
    while messages and messages[-1]["role"] == "user":
        messages.pop()
    if not messages:
        return
    ids, mask = renderer.conversation(messages)
    borders = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    found = [tokenizer.decode(ids[a:b]) for a, b in zip(borders[::2], borders[1::2], strict=True)]
    assert found == [f"{m['content']}<|im_end|>" for m in messages if m["role"] == "assistant"]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(ids) == rendered
