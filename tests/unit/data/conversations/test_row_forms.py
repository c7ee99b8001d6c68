"""Rows as people have them, to the text that the template writes and the tokens that are learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from transformers import PreTrainedTokenizerBase
from worlds.published_templates import published_tokenizer
from worlds.rows import learnt, row_examples, whole

from roll.data.call_arguments import has_python_style_arguments
from roll.data.chat import ChatRenderer
from roll.data.templates import ChatTemplate
from roll.errors import DataError
from roll.types import Message

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
AGAIN = [{"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]
WEATHER = {"name": "get_w", "description": "weather", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": WEATHER}
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_w", "arguments": '{"c": "x"}'}}
THOUGHT = "<think>\nbecause\n</think>\n\n"


@pytest.fixture
def qwen3(default_model: Path) -> PreTrainedTokenizerBase:
    return published_tokenizer(default_model, "qwen3")


@pytest.fixture
def plain(default_model: Path) -> PreTrainedTokenizerBase:
    """A template without reasoning and tools."""
    return published_tokenizer(default_model, "smollm2")


def messages(*listed: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": list(listed), **columns}


REASONED = [
    {"reasoning_content": "because"},
    {"reasoning": "because"},
    {"thinking": "because"},
    {"reasoning_details": [{"type": "reasoning.text", "text": "because", "format": "x", "index": 0}]},
    {"reasoning_details": [{"type": "reasoning.summary", "summary": "because"}]},
    {"thinking_blocks": [{"type": "thinking", "thinking": "because", "signature": "xyz"}]},
    {"content": [{"type": "thinking", "thinking": "because"}, {"type": "text", "text": "a"}]},
    {"reasoning": "because", "reasoning_details": [{"type": "reasoning.text", "text": "because"}]},
    {
        "thinking_blocks": [{"type": "thinking", "thinking": "be"}, {"type": "thinking", "thinking": "cause"}],
        "content": [
            {"type": "thinking", "thinking": "be"},
            {"type": "thinking", "thinking": "cause"},
            {"type": "text", "text": "a"},
        ],
        "reasoning_content": "because",
    },
]


@pytest.mark.parametrize("said", REASONED)
def test_conversation_row_sft_rows_with_reasoning_are_rendered_where_the_template_has_a_place(
    qwen3: PreTrainedTokenizerBase, plain: PreTrainedTokenizerBase, said: dict[str, Any]
) -> None:
    row = messages(USER, {**ANSWER, **said})
    assert learnt(qwen3, row) == [[f"{THOUGHT}a<|im_end|>"]]
    with pytest.raises(DataError, match=r"1 × rejected by the chat template\n.*leaves out the reasoning"):
        row_examples(plain, [row])


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]},
            "'reasoning.encrypted', which has no readable text",
        ),
        ({"reasoning": "one", "thinking": "other"}, "the reasoning fields reasoning, thinking differ"),
        (
            {"reasoning": "one", "content": [{"type": "thinking", "thinking": "b"}, {"type": "text", "text": "a"}]},
            "the reasoning fields reasoning, content differ",
        ),
        ({"reasoning": 7}, "`reasoning` must be a string"),
        ({"content": [{"type": "redacted_thinking", "data": "x"}]}, "unsupported content part"),
    ],
)
def test_conversation_row_sft_rows_whose_reasoning_cannot_be_read_are_refused(
    qwen3: PreTrainedTokenizerBase, said: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        row_examples(qwen3, [messages(USER, {**ANSWER, **said})])


@pytest.mark.parametrize(
    "mark",
    [
        {"train": False},
        {"loss": False},
        {"masked": True},
        {"weight": 0},
        {"weight": 0.0},
        {"training": np.bool_(False)},
    ],
)
def test_conversation_row_sft_rows_with_marked_messages_learn_only_the_others(
    plain: PreTrainedTokenizerBase, mark: dict[str, Any]
) -> None:
    row = messages(USER, {**ANSWER, **mark}, *AGAIN)
    assert learnt(plain, row) == [["b<|im_end|>"]]
    assert learnt(plain, messages(USER, ANSWER, *AGAIN)) == [["a<|im_end|>", "b<|im_end|>"]]
    last = messages(USER, ANSWER, AGAIN[0], {**AGAIN[1], **mark})
    assert learnt(plain, last) == [["a<|im_end|>"]]
    assert learnt(plain, messages({"role": "system", "content": "s"}, *row["messages"])) == [["b<|im_end|>"]]
    base = published_tokenizer.__wrapped__(Path(plain.name_or_path), "smollm2")
    base.chat_template = None
    assert learnt(base, row) == [[f"b{base.eos_token}"]]


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        ([USER, {**ANSWER, "train": False}], "nothing to learn"),
        ([{**USER, "train": True}, ANSWER], "message of another role marked for training"),
        ([USER, {**ANSWER, "train": True, "masked": True}], "contradictory marks"),
        ([USER, {**ANSWER, "train": "yes"}], "wrong type"),
        ([USER, {**ANSWER, "loss": 0.53}], "wrong type"),
        ([USER, {**ANSWER, "weight": 0.5}], "message with a weight"),
    ],
)
def test_conversation_row_sft_rows_with_marks_that_cannot_be_followed_are_refused(
    plain: PreTrainedTokenizerBase, listed: list[Any], reason: str
) -> None:
    with pytest.raises(DataError, match=f"  1 × {reason}\n"):
        row_examples(plain, [messages(*listed)])


def test_conversation_row_preference_rows_with_judged_answers_that_are_marked_are_refused(
    plain: PreTrainedTokenizerBase,
) -> None:
    row = {"prompt": "q", "chosen": [{**ANSWER, "train": False}], "rejected": "b"}
    with pytest.raises(DataError, match=r"1 × (nothing to learn|masked answer)"):
        row_examples(plain, [row], "pair")


def test_conversation_row_sft_rows_of_sharegpt_follow_weights(plain: PreTrainedTokenizerBase) -> None:
    said = [("human", "q", None), ("gpt", "a", 0), ("human", "r", None), ("gpt", "b", 1)]
    row = {"conversations": [{"from": who, "value": text, "weight": weight} for who, text, weight in said]}
    assert learnt(plain, row) == [["b<|im_end|>"]]


def test_conversation_row_sft_rows_of_sharegpt_may_call_functions(qwen3: PreTrainedTokenizerBase) -> None:
    call = json.dumps({"name": "get_w", "arguments": {"c": "x"}})
    said = [("system", "s"), ("human", "q"), ("function_call", call), ("observation", "20"), ("gpt", "a")]
    row = {"conversations": [{"from": who, "value": text} for who, text in said], "tools": json.dumps([WEATHER])}
    (text,) = whole(qwen3, row)
    assert '<tool_call>\n{"name": "get_w", "arguments": {"c": "x"}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\n20\n</tool_response>" in text and '"name": "get_w", "description": "weather"' in text


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        json.dumps([TOOL]),
        [WEATHER],
        [json.dumps(TOOL)],
        np.array([TOOL], object),
        [{"name": "get_w", "description": "weather", "input_schema": WEATHER["parameters"]}],
    ],
)
def test_conversation_row_sft_rows_with_tools_give_them_to_the_template(
    qwen3: PreTrainedTokenizerBase, plain: PreTrainedTokenizerBase, tools: Any
) -> None:
    row = messages(USER, ANSWER, tools=tools)
    (text,) = whole(qwen3, row)
    expected = qwen3.apply_chat_template([USER, ANSWER], tools=[TOOL], tokenize=False)
    assert text == expected and "get_w" in text
    with pytest.raises(DataError, match=r"rejected by the chat template\n.*does not support tools"):
        row_examples(plain, [row])
    assert "get_w" not in whole(plain, row, ignored_fields=["tools"])[0]
    assert whole(qwen3, messages(USER, ANSWER, tools="[]")) == whole(qwen3, messages(USER, ANSWER))


@pytest.mark.parametrize("tools", ["calculator", ["calculator"], [{"type": "web_search"}], {"a": 1}, 7, [{"name": 1}]])
def test_conversation_row_sft_rows_with_other_tools_are_refused(qwen3: PreTrainedTokenizerBase, tools: Any) -> None:
    with pytest.raises(DataError, match="set tools_key to null"):
        row_examples(qwen3, [messages(USER, ANSWER, tools=tools)])


@pytest.mark.parametrize(
    "said",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": json.dumps([CALL])},
        {"tool_calls": [{"name": "get_w", "arguments": {"c": "x"}}]},
        {"content": None, "tool_calls": [{**CALL, "index": 0}]},
        {"function_call": {"name": "get_w", "arguments": '{"c": "x"}'}},
        {"content": [{"type": "tool_use", "id": "toolu_1", "name": "get_w", "input": {"c": "x"}}]},
    ],
)
def test_conversation_row_sft_rows_with_calls_of_tools_are_rendered_alike(
    qwen3: PreTrainedTokenizerBase, plain: PreTrainedTokenizerBase, said: dict[str, Any]
) -> None:
    row = messages(USER, {"role": "assistant", "content": "", **said}, {"role": "tool", "content": "20"}, ANSWER)
    (text,) = whole(qwen3, row)
    assert '<tool_call>\n{"name": "get_w", "arguments": {"c": "x"}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\n20\n</tool_response>" in text
    with pytest.raises(DataError, match="1 × rejected by the chat template"):
        row_examples(plain, [row])


def test_conversation_row_sft_rows_of_anthropic_keep_text_calls_and_results(qwen3: PreTrainedTokenizerBase) -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "20"}], "is_error": False}
    row = messages(
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "I call"}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}}]},
        ANSWER,
    )
    (text,) = whole(qwen3, row)
    assert 'I call\n<tool_call>\n{"name": "f", "arguments": {}}' in text
    assert "<tool_response>\n20\n</tool_response><|im_end|>\n<|im_start|>user\nAnd?<|im_end|>" in text
    failed = messages(*row["messages"][:2], {"role": "user", "content": [{**result, "is_error": True}]}, ANSWER)
    with pytest.raises(DataError, match="failed tool call"):
        row_examples(qwen3, [failed])
    late = messages(USER, {"role": "assistant", "content": [call, {"type": "text", "text": "I called"}]})
    with pytest.raises(DataError, match="parts out of order"):
        row_examples(qwen3, [late])


def test_conversation_row_sft_rows_whose_template_writes_one_call_of_several_are_refused(
    plain: PreTrainedTokenizerBase,
) -> None:
    tokenizer = published_tokenizer.__wrapped__(Path(plain.name_or_path), "qwen3")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
        "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    one, two = ({"role": "assistant", "content": "", "tool_calls": [CALL] * count} for count in (1, 2))
    (text,) = whole(tokenizer, messages(USER, one))
    assert 'get_w{"c": "x"}' in text  # not as Python writes a dictionary
    with pytest.raises(DataError, match="leaves out the last tool call"):
        row_examples(tokenizer, [messages(USER, two)])


@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_conversation_row_sft_rows_with_a_system_column_begin_with_it(
    plain: PreTrainedTokenizerBase, column: str
) -> None:
    told = {"role": "system", "content": "You are a pirate."}
    expected = whole(plain, messages(told, USER, ANSWER))
    for form in (
        messages(USER, ANSWER),
        {"prompt": "q", "completion": "a"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"instruction": "q", "input": "", "output": "a", "history": []},
        messages(told, USER, ANSWER),
    ):
        assert whole(plain, {**form, column: "You are a pirate."}, system_prompt="Not this.") == expected
    with pytest.raises(DataError, match="1 × two system messages"):
        row_examples(plain, [messages(told, USER, ANSWER, **{column: "Be brief."})])
    with pytest.raises(DataError, match="a row with plain text must not have"):
        row_examples(plain, [{"text": "abc", column: "Be brief."}])
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", column: "You are a pirate."}
    assert whole(plain, pair, "pair")[0] == expected[0]


def test_conversation_row_sft_rows_with_history_have_it_as_context(plain: PreTrainedTokenizerBase) -> None:
    row = {"instruction": "r", "input": "", "output": "b", "history": [["q", "a"]], "system": "s"}
    expected = whole(plain, messages({"role": "system", "content": "s"}, USER, ANSWER, *AGAIN))
    assert whole(plain, row) == expected and learnt(plain, row) == [["b<|im_end|>"]]
    with pytest.raises(DataError, match="two forms in one row"):
        row_examples(plain, [messages(USER, ANSWER, history=[["q", "a"]])])
    with pytest.raises(DataError, match=r"must be a list of \[question, answer\]"):
        row_examples(plain, [{**row, "history": ["q"]}])


def test_conversation_row_sft_rows_give_arguments_to_the_template(
    qwen3: PreTrainedTokenizerBase, plain: PreTrainedTokenizerBase
) -> None:
    row = {"prompt": "q", "completion": "a", "chat_template_kwargs": {"enable_thinking": False}}
    assert learnt(qwen3, row) == [["a<|im_end|>"]]  # the empty thought is given, not generated
    with pytest.raises(DataError, match="does not use 'enable_thinking'"):
        row_examples(plain, [row])
    with pytest.raises(DataError, match="sets 'tokenize', a reserved argument of the chat template"):
        row_examples(qwen3, [{**row, "chat_template_kwargs": {"tokenize": True}}])


@pytest.mark.parametrize("column", ["images", "image", "videos", "audio"])
def test_conversation_row_with_pictures_are_refused_by_name(plain: PreTrainedTokenizerBase, column: str) -> None:
    row = messages(USER, ANSWER, **{column: ["a.png"]})
    with pytest.raises(DataError, match=rf"1 × unsupported column: '{column}'\n.*the model supports only text"):
        row_examples(plain, [row])
    assert row_examples(plain, [row], ignored_fields=[column]).train.num_items == 1
    assert row_examples(plain, [messages(USER, ANSWER, **{column: []})]).train.num_items == 1


@pytest.mark.parametrize(
    "column",
    [
        json.dumps([USER, ANSWER]),
        (USER, ANSWER),
        np.array([USER, ANSWER], object),
        pd.Series([USER, ANSWER]),
        [{**USER, "name": None, "tool_calls": np.nan}, {**ANSWER, "refusal": None, "annotations": [], "audio": None}],
        [{**USER, "id": "1", "timestamp": 3.5}, ANSWER],
    ],
)
def test_conversation_row_sft_rows_may_have_messages_as_any_sequence_or_as_json(
    plain: PreTrainedTokenizerBase, column: Any
) -> None:
    assert whole(plain, {"messages": column}) == whole(plain, messages(USER, ANSWER))


def test_conversation_row_sft_rows_with_messages_that_are_not_json_are_refused(plain: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"1 × not JSON\n.*column 'messages' is not valid JSON"):
        row_examples(plain, [{"messages": "[{'role': 'user'}]"}])


HH = "\n\nHuman: hi there\n\nAssistant: Hello\n\nHuman: sum?\n\nAssistant: "


def test_conversation_row_preference_rows_of_hh_rlhf_are_pairs_of_conversations(plain: PreTrainedTokenizerBase) -> None:
    row = {"chosen": f"{HH}4", "rejected": f"{HH}I refuse"}
    asked = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "Hello"}]
    asked.append({"role": "user", "content": "sum?"})
    expected = [{"role": "assistant", "content": said} for said in ("4", "I refuse")]
    same = {"chosen": [*asked, expected[0]], "rejected": [*asked, expected[1]]}
    assert whole(plain, row, "pair") == whole(plain, same, "pair")
    assert learnt(plain, row, "pair") == [["4<|im_end|>"], ["I refuse<|im_end|>"]]
    apart = {"prompt": HH.rstrip(), "chosen": "4", "rejected": "I refuse"}
    assert whole(plain, apart, "pair") == whole(plain, same, "pair")
    assert learnt(plain, row, completion_key="chosen") == [["Hello<|im_end|>", "4<|im_end|>"]]


def test_conversation_row_preference_rows_whose_judged_answers_are_marked_are_refused(
    plain: PreTrainedTokenizerBase,
) -> None:
    """A loss of pairs takes whole answers: neither the only one nor one of several can be left out."""
    row = {"prompt": "q", "chosen": [{**ANSWER, "train": False}], "rejected": [AGAIN[1]]}
    with pytest.raises(DataError, match="nothing to learn"):
        row_examples(plain, [row], "pair")
    row["chosen"] += AGAIN
    with pytest.raises(DataError, match=r"masked answer\n.*remove the mask"):
        row_examples(plain, [row], "pair")
    given = [USER, {**ANSWER, "train": False}, AGAIN[0]]  # earlier turns may be marked
    pair = {"chosen": [*given, AGAIN[1]], "rejected": [*given, {**AGAIN[1], "content": "c"}]}
    assert learnt(plain, pair, "pair") == [["b<|im_end|>"], ["c<|im_end|>"]]


def test_conversation_row_preference_rows_of_llama_factory_have_their_prompt_among_the_conversations(
    plain: PreTrainedTokenizerBase,
) -> None:
    row = {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    }
    assert whole(plain, row, "pair") == whole(plain, {"prompt": "q", "chosen": "a", "rejected": "b"}, "pair")
    alpaca = {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"}
    assert whole(plain, row, "pair") == whole(plain, alpaca, "pair")


def test_conversation_row_arrow_tables_fill_in_no_arguments_of_calls(
    qwen3: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    from roll.config.examples import FileExamples
    from roll.data.examples import build_examples

    def row(arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": arguments}}
        return messages(USER, {"role": "assistant", "content": "", "tool_calls": [call]})

    rows = [row({"c": "x"}), row({"d": 1})]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    config = FileExamples(source="file", path=str(tmp_path / "rows.parquet"), held_out=0)
    examples = build_examples([config], "supervised", qwen3, 0)
    texts = {qwen3.decode(s.token_ids) for draw in examples.train.draw(2) for s in examples.build_samples(draw)}
    assert texts == {text for one in rows for text in whole(qwen3, one)}
    explicit = row({"c": None})
    assert '"arguments": {"c": null}' in whole(qwen3, explicit)[0]


@pytest.mark.parametrize("indent", [None, 1])
def test_conversation_row_sft_answers_that_are_messages_as_json_are_read_however_they_are_laid_out(
    qwen3: PreTrainedTokenizerBase, indent: int | None
) -> None:
    row = {"prompt": [USER], "completion": json.dumps([ANSWER], indent=indent)}
    assert whole(qwen3, row) == whole(qwen3, messages(USER, ANSWER))


@pytest.mark.parametrize("text", ['[{"city": "Paris"}]', '[ {"role": "admin"}, 3 ]', "[{"])
def test_conversation_row_sft_answers_that_are_other_json_are_learnt_as_text(
    qwen3: PreTrainedTokenizerBase, text: str
) -> None:
    assert learnt(qwen3, {"prompt": "q", "completion": text})[0][0].endswith(f"{text}<|im_end|>")


def test_conversation_row_sft_columns_that_repeat_the_messages_are_left_unread(qwen3: PreTrainedTokenizerBase) -> None:
    again = {"conversations": [{"from": "human", "value": " q"}, {"from": "gpt", "value": "a"}], "prompt": "q"}
    assert whole(qwen3, messages(USER, ANSWER, **again)) == whole(qwen3, messages(USER, ANSWER))


@pytest.mark.parametrize(
    "other",
    [
        [USER, {**ANSWER, "weight": 0}],
        [USER, {**ANSWER, "reasoning": "because"}],
        [USER, {**ANSWER, "tool_calls": [CALL]}],
        [ANSWER, USER],
        [{**ANSWER, "content": "q"}],
    ],
)
def test_conversation_row_sft_columns_that_say_more_than_the_messages_are_refused(
    qwen3: PreTrainedTokenizerBase, other: Any
) -> None:
    for form in (other, json.dumps(other)):
        with pytest.raises(DataError, match=r"1 of 1 rows.*\n.*1 × unsupported column: 'conversations'"):
            row_examples(qwen3, [messages(USER, ANSWER, conversations=form)])


@pytest.mark.parametrize("name", ["system", "message", "name", "loop", "x"])
def test_conversation_row_sft_template_arguments_that_are_no_variables_of_the_template_are_refused(
    qwen3: PreTrainedTokenizerBase, name: str
) -> None:
    """The template's text has these words, but the values would change nothing."""
    with pytest.raises(DataError, match=f"does not use '{name}'"):
        row_examples(qwen3, [messages(USER, ANSWER, chat_template_kwargs={name: "y"})])


def test_conversation_row_sft_fields_are_compared_in_a_time_that_does_not_grow_with_the_square_of_the_messages(
    qwen3: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message is rendered after the latest question; a few are after all that came before."""
    rendered: list[int] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Any, *args: Any, **named: Any) -> str:
        rendered.append(len(messages))
        return render(self, messages, *args, **named)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    turns = [USER, called, {"role": "tool", "content": "t"}, ANSWER] * 20
    ChatRenderer(qwen3).check_fully_rendered([Message.from_dict(turn) for turn in turns], [], {})
    assert sum(rendered) <= 10 * len(turns)


def test_conversation_row_sft_messages_of_many_calls_take_linear_time() -> None:
    """Of the calls whose arguments Python writes otherwise than JSON does, a few are looked for in the text."""
    looked: list[str] = []

    class Text(str):
        def __contains__(self, part: object) -> bool:
            looked.append(str(part))
            return False

    calls = [{"function": {"name": "f", "arguments": {"x": f"{i}"}}} for i in range(1000)]
    message = Message(role="assistant", content="", tool_calls=tuple(calls))
    assert not has_python_style_arguments([message], Text())
    assert 0 < len(looked) <= 10
