"""No field of a row, of a message or of a content part is ignored silently, whatever it is called and holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase
from worlds.rows import asked, prompt_data, row_examples, whole

from roll.data.conversations.fields import IGNORED_COLUMNS, IGNORED_MESSAGE_FIELDS, IGNORED_PART_FIELDS
from roll.errors import DataError
from roll.models import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tiny_model))


CALL = {"function": {"name": "f", "arguments": {}}}


def message(content: Any = "a", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


USER = {"role": "user", "content": "q"}
FORMS: dict[str, tuple[Any, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "messages": ("supervised", lambda extra: {"messages": [USER, message()], **extra}),
    "completion": ("supervised", lambda extra: {"prompt": "q", "completion": "a", **extra}),
    "text": ("supervised", lambda extra: {"text": "abc", **extra}),
    "alpaca": ("supervised", lambda extra: {"instruction": "q", "output": "a", **extra}),
    "sharegpt": (
        "supervised",
        lambda extra: {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], **extra},
    ),
    "pair": ("pair", lambda extra: {"prompt": "q", "chosen": "a", "rejected": "b", **extra}),
    "label": ("labelled", lambda extra: {"prompt": "q", "completion": "a", "label": True, **extra}),
    "score": ("scored", lambda extra: {"prompt": "q", "completion": "a", "score": 1.0, **extra}),
    "a user's message": ("supervised", lambda extra: {"messages": [{**USER, **extra}, message()]}),
    "an assistant's message": ("supervised", lambda extra: {"messages": [USER, message(**extra)]}),
    "a message of a pair": (
        "pair",
        lambda extra: {"prompt": [{**USER, **extra}], "chosen": [message()], "rejected": [message("b")]},
    ),
    "a content part": (
        "supervised",
        lambda extra: {"messages": [USER, message([{"type": "text", "text": "a", **extra}])]},
    ),
}
PROMPTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a message": lambda extra: {"prompt": [{**USER, **extra}], "answer": "7"},
    "an earlier answer": lambda extra: {"prompt": [USER, message(**extra), USER], "answer": "7"},
    "a content part": lambda extra: {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "q", **extra}]}],
        "answer": "7",
    },
}
SUSPICIOUS = [
    "reasoning", "thinking", "reasoning_content", "reasoning_details", "images", "train", "loss", "masked", "weight",
    "tools", "system", "system_prompt", "history", "chat_template_kwargs", "tool_calls", "name", "label", "score",
    "margin", "input", "train_detail", "prefix", "video", "audio", "refusal", "cache", "mask", "documents", "suffix",
    "from", "value", "type", "is_error", "Messages", "completions", "thought",
]  # fmt: skip
names = st.sampled_from(SUSPICIOUS) | st.text(min_size=1, max_size=8)
values = st.one_of(
    st.text("xyz", min_size=1, max_size=5),
    st.integers(2, 9),
    st.just(False),
    st.just(["x.png"]),
    st.just({"x": 1}),
    st.just([CALL]),
)
IGNORED = IGNORED_COLUMNS | IGNORED_MESSAGE_FIELDS | IGNORED_PART_FIELDS
quick = settings(
    deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("form", FORMS)
@quick
@given(name=names, value=values)
def test_conversation_unread_field_sft_rows_ignore_no_field_silently(
    tokenizer: PreTrainedTokenizerBase, form: str, name: str, value: Any
) -> None:
    """A field changes what is learnt, or is refused, or is one of the documented list."""
    kind, made = FORMS[form]
    if name in made({}) or (name in USER and "messages" in made({})):
        return
    row = made({name: value})
    if name in IGNORED or (value is False and name in ("train", "loss", "masked")):  # what holds without it
        return
    try:
        examples = row_examples(tokenizer, [row], kind)
    except DataError as error:
        assert "1 of 1 rows" in str(error)
        return
    (draw,) = examples.train.draw(1)
    (before,) = row_examples(tokenizer, [made({})], kind).train.draw(1)
    changed = draw.example.conversations != before.example.conversations or draw.example.target != before.example.target
    assert changed, f"{name}={value!r} of {form} is ignored silently"
    texts, masks = (
        list(found.build_samples(found.train.draw(1)[0]))
        for found in (row_examples(tokenizer, [row], kind), row_examples(tokenizer, [made({})], kind))
    )
    same = all(
        a.token_ids.tolist() == b.token_ids.tolist()
        and a.loss_mask.tolist() == b.loss_mask.tolist()
        and a.target == b.target
        for a, b in zip(texts, masks, strict=True)
    )
    assert not same, f"{name}={value!r} of {form} is read, and then ignored silently"


@pytest.mark.parametrize("form", PROMPTS)
@quick
@given(name=names, value=values)
def test_conversation_unread_field_rlvr_rows_ignore_no_field_of_a_message_silently(
    tokenizer: PreTrainedTokenizerBase, form: str, name: str, value: Any
) -> None:
    if name in ("role", "content", "text") or name in IGNORED:
        return
    made = PROMPTS[form]
    try:
        text = asked(tokenizer, made({name: value}))
    except DataError as error:
        assert "1 of 1 rows" in str(error)
        return
    assert text != asked(tokenizer, made({})) or value is False, f"{name}={value!r} of {form} is ignored silently"


@quick
@given(name=names, value=values)
def test_conversation_unread_field_rlvr_rows_give_every_other_column_to_rewards(
    tokenizer: PreTrainedTokenizerBase, name: str, value: Any
) -> None:
    if name in ("prompt", "answer"):
        return
    try:
        (draw,) = prompt_data(tokenizer, [{"prompt": "q", "answer": "7", name: value}]).train.draw(1)
    except DataError as error:
        assert "1 of 1 rows" in str(error)
        return
    assert draw.prompt.metadata == {name: value}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"messages": [USER, message(emotion="sad")]}, "unsupported field of a message: 'emotion'"),
        ({"messages": [USER, message(toolcalls=[CALL])]}, "unsupported field of a message: 'toolcalls'"),
        ({"messages": [USER, message()], "mood": "sad", "age": 3}, "unsupported columns: 'mood', 'age'"),
        (
            {"messages": [USER, message([{"type": "text", "text": "a", "tone": "low"}])]},
            "unsupported field of a content part: 'tone'",
        ),
        ({"messages": [USER, message(tool_calls=[{**CALL, "score": 1}])]}, "unsupported field of a tool call: 'score'"),
    ],
)
def test_conversation_unread_field_are_named_and_counted(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], what: str
) -> None:
    with pytest.raises(DataError) as caught:
        row_examples(tokenizer, [row, row])
    said = str(caught.value)
    assert said.startswith("2 of 2 rows of data source 'python' cannot be used for training:\n")
    assert f"  2 × {what}\n" in said
    assert "add its name to `ignored_fields`" in said


def test_conversation_unread_field_that_the_configuration_names_are_left_out(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    parts = [{"type": "text", "text": "a", "tone": "low"}, {"type": "image", "url": "x.png"}]
    row = {"messages": [{**USER, "emotion": "sad"}, message(parts)], "mood": "sad"}
    assert whole(tokenizer, row, ignored_fields=["tone", "image", "emotion", "mood"]) == whole(
        tokenizer, {"messages": [USER, message()]}
    )


def test_conversation_unread_field_columns_that_repeat_what_was_read_are_read(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    row = {"messages": [USER, message()], "prompt": "q", "prompt_id": "x", "text": "User: q Assistant: a"}
    assert whole(tokenizer, row) == whole(tokenizer, {"messages": [USER, message()]})
    pair = {"prompt": "q", "chosen": [USER, message()], "rejected": [USER, message("b")], "messages": [USER, message()]}
    assert len(whole(tokenizer, {**pair, "score_chosen": 2.0}, "pair")) == 2
    with pytest.raises(DataError, match="unsupported column: 'prompt'"):
        row_examples(tokenizer, [{**row, "prompt": "another question"}])
    assert whole(tokenizer, {**row, "prompt": "another question"}, prompt_key=None) == whole(tokenizer, row)


RENDERED = [
    "User: q Assistant: a",
    "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n",
    "<s>[INST] q [/INST] a </s>",
    "<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\na<end_of_turn>",
    "### Human: q\n### Assistant: a",
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nq\n\n### Response:\na",
]
MORE = [
    "Be brief. User: q Assistant: a",
    "User: q Assistant: a User: and b? Assistant: b",
    "User: q (think) Assistant: a",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n",
    "User: q Assistant: a\n\nExplanation: 1 + 1 is 2.",
    "Assistant: a User: q",
    "User: q",
    "qa7",
]


@pytest.mark.parametrize("text", RENDERED)
def test_conversation_unread_field_columns_with_a_text_of_the_messages_are_read(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    plain = {"messages": [USER, message()]}
    assert whole(tokenizer, {**plain, "text": text}) == whole(tokenizer, plain)


@pytest.mark.parametrize("text", MORE)
def test_conversation_unread_field_columns_with_a_text_that_says_more_than_the_messages_are_refused(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    row = {"messages": [USER, message()], "text": text}
    with pytest.raises(DataError, match=r"1 of 1 rows.*\n.*1 × unsupported column: 'text'"):
        row_examples(tokenizer, [row])
    assert whole(tokenizer, row, ignored_fields=["text"]) == whole(tokenizer, {"messages": [USER, message()]})
    assert whole(tokenizer, row, text_key=None) == whole(tokenizer, {"messages": [USER, message()]})


SETTING = "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking %}<think>{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("first", "is_read"),
    [
        ("", True),
        ("{% if thinking is not defined %}{% set thinking = false %}{% endif %}", True),
        ("{% set thinking = thinking | default(false) %}", True),
        ("{% set thinking = false %}", False),
        ("{%- set thinking -%}{%- endset -%}", False),
    ],
)
def test_conversation_unread_field_arguments_that_a_template_sets_itself_are_refused(
    tiny_model: Path, first: str, is_read: bool
) -> None:
    """What a template sets before it reads it is its own variable: a row's value would change nothing."""
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = first + SETTING
    given = {"chat_template_kwargs": {"thinking": False}}
    for read in (
        lambda: row_examples(tokenizer, [{"messages": [USER, message()], **given}]),
        lambda: prompt_data(tokenizer, [{"prompt": "q", "answer": "7", **given}]),
    ):
        if is_read:
            read()
        else:
            with pytest.raises(DataError, match="does not use 'thinking'"):
                read()


def test_conversation_unread_field_columns_with_a_text_of_messages_and_calls_are_read(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
        "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 17}}}
    chat = [USER, message("", tool_calls=[call]), {"role": "tool", "content": "25"}, message("It is 25.")]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert whole(tokenizer, {"messages": chat, "text": text}) == whole(tokenizer, {"messages": chat})
    with pytest.raises(DataError, match="unsupported column: 'text'"):
        row_examples(tokenizer, [{"messages": chat, "text": text.replace("17", "18")}])


def test_conversation_unread_field_columns_with_a_long_text_are_compared_in_linear_time(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Ten thousand copies of an answer that may each be the one that was read."""
    row = {"messages": [USER, message()], "text": "User: q x " + "a" * 10_000}
    with pytest.raises(DataError, match="unsupported column: 'text'"):
        row_examples(tokenizer, [row])


def test_conversation_unread_field_the_documented_fields_are_those_that_are_ignored() -> None:
    page = (Path(__file__).parents[4] / "docs" / "data-formats.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Fields that ROLL ignores")
    tables = section.split("\n## ")[0]
    for title, names in (
        ("columns", IGNORED_COLUMNS),
        ("fields of a message", IGNORED_MESSAGE_FIELDS),
        ("fields of a content part", IGNORED_PART_FIELDS),
    ):
        (line,) = [line for line in tables.splitlines() if line.startswith(f"| {title} ")]
        assert {name.strip("` ") for name in line.split("|")[2].split(",")} == names


def test_conversation_unread_field_that_misspell_a_system_prompt_are_told_its_name(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    row = {"messages": [USER, message()], "sytem_prompt": "Be brief."}
    with pytest.raises(DataError, match=r"the column 'sytem_prompt' would be ignored.* Did you mean 'system_prompt'\?"):
        row_examples(tokenizer, [row])
