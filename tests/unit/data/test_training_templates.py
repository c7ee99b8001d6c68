"""Masks of the training templates that TRL ships, against what a model would generate.

The expected turns are written by hand from the models' formats. The texts of the templates are read from the installed
TRL; nothing of it is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase
from unit.data.training_templates import templates, tokenizers_of

from roll.data import ChatRenderer
from roll.data.templates import TEMPLATE_DATE
from roll.errors import DataError
from roll.models import load_tokenizer
from roll.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How a model writes an answer."""

    end: str
    """What ends an answer."""
    begin: str = ""
    """What it writes before an answer without a thought."""
    thought: str = ""
    """What it writes for the thought of `reasoning_content`; empty where the template has no place for one."""
    spelt: str = "<think>\nOne and two.\n</think>\n\n"
    """What it writes for a thought that is spelt in the content."""
    spelt_begin: str = ""
    call: str = ""
    """What it writes for a call of `add(a=1, b=2)`, from the answer's beginning to its end."""
    call_end: str | None = None
    middle_end: str | None = None
    """What ends an answer in the middle of a conversation, where that is another token: it is not learnt."""
    takes: frozenset[str] = frozenset({"system", "twice"})
    mode: tuple[tuple[str, bool], ...] = ()
    """Variables of the template with which the generation prompt is continued by an answer without a thought."""
    thinking_mode: tuple[tuple[str, bool], ...] = ()


EVERYTHING = frozenset({"system", "twice"})
ALTERNATING = frozenset({"system"})
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
PARAMETERS = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
)
CHATML = Format(end="<|im_end|>")
OPENED = Format(
    end="<|im_end|>",
    begin="\n</think>\n\n",
    thought="One and two.\n</think>\n\n",
    spelt="One and two.\n</think>\n\n",
    call=f"\n</think>\n\n{PARAMETERS}",
)
NO_THINKING, THINKING = (("enable_thinking", False),), (("enable_thinking", True),)


def nemotron(thought: str) -> Format:
    return Format(
        end="<|im_end|>",
        thought=thought,
        spelt="One and two.\n</think>\n\n",
        call=f"\n{PARAMETERS}\n",
        mode=NO_THINKING,
    )


UTTERANCE = Format(end="<end_of_utterance>", begin=" ", spelt=" <think>\nOne and two.\n</think>\n\n")
PHI = Format(end="<|end|>")
DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
FORMATS: dict[str, Format | None] = {
    "cohere": Format(end="<|END_OF_TURN_TOKEN|>", takes=ALTERNATING),
    "cohere2": Format(end="<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", takes=ALTERNATING),
    "deepseek_r1_distill": None,
    "deepseekv3": None,
    "diffusion_gemma": Format(
        end="<turn|>",
        thought="<|channel>thought\nOne and two.\n<channel|>",
        call="<|tool_call>call:add{a:1,b:2}<tool_call|>",
        call_end="<|tool_response>",
        takes=ALTERNATING,
    ),
    "gemma": Format(end="<end_of_turn>", takes=frozenset()),
    "gemma3": Format(end="<end_of_turn>", takes=ALTERNATING),
    "glm4moe": Format(
        end="<|user|>",
        begin="\n<think></think>\n",
        thought="\n<think>One and two.</think>\n",
        spelt="\n<think>One and two.</think>\n",
        call="\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        call_end="<|observation|>",
    ),
    "gptoss": Format(
        end="<|return|>",
        begin="<|channel|>final<|message|>",
        thought="<|channel|>analysis<|message|>One and two.<|end|><|start|>assistant<|channel|>final<|message|>",
        spelt="<|channel|>final<|message|><think>\nOne and two.\n</think>\n\n",
        call=' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}',
        call_end="<|call|>",
        middle_end="<|end|>",
    ),
    "idefics3": UTTERANCE,
    "lfm2": CHATML,
    "lfm2_v2": Format(end="<|im_end|>", call="<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>"),
    "llama3": Format(end="<|eot_id|>"),
    "llava_next": Format(end="</s>", begin=" ", spelt=" <think>\nOne and two.\n</think>\n\n"),
    "muse_glimmer": Format(
        end="<|eot|>",
        begin=" to=user<|message|>",
        thought=" to=self<|message|>One and two.<|eom|><|start|>assistant to=user<|message|>",
        spelt=" to=user<|message|><think>\nOne and two.\n</think>\n\n",
        call=' to=add<|message|><atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1'
        '</atem:parameter>\n<atem:parameter name="b">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    ),
    "nemotron_3_5_lightning": nemotron("One and two.</think>"),
    "nemotron_3_nano": nemotron("One and two.\n</think>\n"),
    "nemotron_3_super": nemotron("One and two.\n</think>\n"),
    "nemotron_3_ultra": nemotron("One and two.</think>"),
    "phi3": PHI,
    "phi3_5": PHI,
    "qwen2_5": Format(end="<|im_end|>", call=HERMES),
    "qwen2_5_vl": CHATML,
    "qwen3": Format(
        end="<|im_end|>",
        begin="<think>\n\n</think>\n\n",
        thought="<think>\nOne and two.\n</think>\n\n",
        call=f"<think>\n\n</think>\n\n{HERMES}",
    ),
    "qwen3_5_nothink": Format(
        end="<|im_end|>",
        thought="One and two.\n</think>\n\n",
        spelt="One and two.\n</think>\n\n",
        call=PARAMETERS,
        thinking_mode=THINKING,
    ),
    "qwen3_5_think": OPENED,
    "qwen3_6": OPENED,
    "qwen3_8": Format(
        end="<|im_end|>",
        begin="\n</think>\n\n",
        thought="One and two.\n</think>\n\n",
        spelt="\n</think>\n\n<think>\nOne and two.\n</think>\n\n",
        call=f"\n</think>\n\n{PARAMETERS}",
    ),
    "qwen3_instruct_2507": Format(end="<|im_end|>", call=HERMES),
    "qwen3_vl": Format(end="<|im_end|>", call=HERMES),
    "smolvlm": UTTERANCE,
}
"""`None`: the generation prompt begins a thought that no answer without one continues; see the tests of their own."""
WRITTEN = {name: form for name, form in FORMATS.items() if form is not None}
ASKED = Message(role="user", content="What is 1 + 2?")
ASKED_AGAIN = Message(role="user", content="And 2 + 2?")


def assistant(content: str, **fields: Any) -> Message:
    return Message.from_dict({"role": "assistant", "content": content, **fields})


CALLED = [
    ASKED,
    assistant(
        "",
        tool_calls=[
            {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        ],
    ),
    Message(role="tool", content="3", tool_call_id="abcdefghi", name="add"),
    assistant("It is 3."),
]


@pytest.fixture(scope="module")
def tokenizers(tiny_model: Path) -> dict[str, PreTrainedTokenizerBase]:
    return tokenizers_of(tiny_model)


def check(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    turns: list[str],
    mode: tuple[tuple[str, bool], ...] = (),
) -> None:
    """Check that these turns are learnt and nothing else, each right behind the rendered generation prompt."""
    ids, mask = ChatRenderer(tokenizer).tokenize_conversation(messages)
    borders = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    assert [tokenizer.decode(ids[a:b]) for a, b in zip(borders[::2], borders[1::2], strict=True)] == turns
    places = [i for i, message in enumerate(messages) if message.role == "assistant"]
    parts = tokenizer.apply_chat_template(
        _as_read(messages, tokenizer), tokenize=True, return_dict=False, strftime_now=TEMPLATE_DATE.strftime
    )
    assert ids.tolist() == parts
    for place, begin in zip(places, borders[::2], strict=True):
        prompt = tokenizer.apply_chat_template(
            _as_read(messages[:place], tokenizer),
            tokenize=True,
            return_dict=False,
            add_generation_prompt=True,
            strftime_now=TEMPLATE_DATE.strftime,
            **dict(mode),
        )
        assert ids[:begin].tolist() == prompt


def _as_read(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> Any:
    """The messages in the form that the template reads."""
    if "message.thinking" in str(tokenizer.chat_template):
        return [
            message.to_dict() | ({"thinking": message.reasoning} if message.reasoning is not None else {})
            for message in messages
        ]
    if "message['content'][0]['" not in str(tokenizer.chat_template):
        return [message.to_dict() for message in messages]
    return [message.to_dict() | {"content": [{"type": "text", "text": message.text}]} for message in messages]


def test_chat_template_masks_every_training_template_of_trl_is_known() -> None:
    assert set(templates()) == set(FORMATS)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_chat_template_masks_of_one_answer(tokenizers: dict[str, PreTrainedTokenizerBase], name: str) -> None:
    form = WRITTEN[name]
    check(tokenizers[name], [ASKED, assistant("It is 3.")], [f"{form.begin}It is 3.{form.end}"], form.mode)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_chat_template_masks_of_several_answers(tokenizers: dict[str, PreTrainedTokenizerBase], name: str) -> None:
    form = WRITTEN[name]
    chat = [ASKED, assistant("It is 3."), ASKED_AGAIN, assistant("4, of course.\nSure?")]
    first = "" if form.middle_end else form.end
    turns = [f"{form.begin}It is 3.{first}", f"{form.begin}4, of course.\nSure?{form.end}"]
    check(tokenizers[name], chat, turns, form.mode)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_chat_template_masks_behind_a_system_prompt(tokenizers: dict[str, PreTrainedTokenizerBase], name: str) -> None:
    form = WRITTEN[name]
    chat: list[Message] = [Message(role="system", content="Be brief."), ASKED, assistant("It is 3.")]
    if "system" not in form.takes:
        with pytest.raises(DataError, match=r"rejects a conversation of system, user, assistant"):
            ChatRenderer(tokenizers[name]).tokenize_conversation(chat)
    else:
        check(tokenizers[name], chat, [f"{form.begin}It is 3.{form.end}"], form.mode)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_chat_template_masks_of_a_tool_call(tokenizers: dict[str, PreTrainedTokenizerBase], name: str) -> None:
    form = WRITTEN[name]
    if not form.call:
        with pytest.raises(DataError, match=r"rejects a conversation|leaves out the call to tool 'add'"):
            ChatRenderer(tokenizers[name]).tokenize_conversation(CALLED)
    elif name == "diffusion_gemma":  # it marks the header that it writes behind a tool's result as not generated
        ids, mask = ChatRenderer(tokenizers[name]).tokenize_conversation(CALLED)
        assert tokenizers[name].decode(ids[mask]) == f"{form.call}{form.call_end}It is 3.{form.end}"
    else:
        end = form.end if form.call_end is None else form.call_end
        check(tokenizers[name], CALLED, [f"{form.call}{end}", f"{form.begin}It is 3.{form.end}"], form.mode)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_chat_template_masks_of_reasoning_in_the_content(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str
) -> None:
    form = WRITTEN[name]
    chat = [ASKED, assistant("<think>\nOne and two.\n</think>\n\nIt is 3.")]
    check(tokenizers[name], chat, [f"{form.spelt}It is 3.{form.end}"], form.thinking_mode)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_chat_template_masks_of_reasoning_in_a_field(tokenizers: dict[str, PreTrainedTokenizerBase], name: str) -> None:
    form = WRITTEN[name]
    chat = [ASKED, assistant("It is 3.", reasoning_content="One and two.")]
    if form.thought:
        check(tokenizers[name], chat, [f"{form.thought}It is 3.{form.end}"], form.thinking_mode)
    else:
        with pytest.raises(DataError, match="leaves out the reasoning"):
            ChatRenderer(tokenizers[name]).tokenize_conversation(chat)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_chat_template_masks_of_an_empty_answer_have_its_end(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str
) -> None:
    form = WRITTEN[name]
    begin = form.begin.rstrip("\n") if name == "glm4moe" else form.begin
    check(tokenizers[name], [ASKED, assistant("")], [f"{begin}{form.end}"], form.mode)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_chat_template_masks_of_two_answers_in_a_row(tokenizers: dict[str, PreTrainedTokenizerBase], name: str) -> None:
    form = WRITTEN[name]
    chat = [ASKED, assistant("It is 3."), assistant("Indeed.")]
    if "twice" in form.takes:
        first = "" if form.middle_end else form.end
        turns = [f"{form.begin}It is 3.{first}", f"{form.begin}Indeed.{form.end}"]
        check(tokenizers[name], chat, turns, form.mode)
    else:
        with pytest.raises(
            DataError, match=r"rejects a conversation|renders the start of an assistant's message differently"
        ):
            ChatRenderer(tokenizers[name]).tokenize_conversation(chat)


def test_chat_template_masks_of_deepseek_begin_in_the_thought_that_the_prompt_begins(
    tokenizers: dict[str, PreTrainedTokenizerBase],
) -> None:
    chat = [ASKED, assistant("<think>\nOne and two.\n</think>\n\n3")]
    check(tokenizers["deepseek_r1_distill"], chat, [f"One and two.\n</think>\n\n3{DEEPSEEK_END}"])


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3"])
@pytest.mark.parametrize(
    "chat",
    [
        [ASKED, assistant("It is 3.")],
        [ASKED, assistant("It is 3."), ASKED_AGAIN, assistant("4")],
        [Message(role="system", content="Be brief."), ASKED, assistant("It is 3.")],
        [ASKED, assistant("It is 3."), assistant("Indeed.")],
        [ASKED, assistant("")],
    ],
)
def test_chat_template_masks_of_answers_that_do_not_continue_the_prompt_are_refused(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str, chat: list[Message]
) -> None:
    """The prompt begins a thought, so the model would never generate these answers."""
    with pytest.raises(DataError, match=r"differently from its generation prompt \(which ends with .*<think>"):
        ChatRenderer(tokenizers[name]).tokenize_conversation(chat)


def test_chat_template_masks_behind_a_tools_result_of_deepseek(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    """Behind a tool's result its prompt begins no thought; the call itself does not continue the one that it begins."""
    ids, mask = ChatRenderer(tokenizers["deepseekv3"]).tokenize_conversation(CALLED)
    assert tokenizers["deepseekv3"].decode(ids[mask]) == f"It is 3.{DEEPSEEK_END}"
    with pytest.raises(DataError, match="leaves out the call to tool 'add'"):
        ChatRenderer(tokenizers["deepseek_r1_distill"]).tokenize_conversation(CALLED)


def test_chat_template_masks_leave_out_messages_that_are_not_to_be_trained(
    tokenizers: dict[str, PreTrainedTokenizerBase],
) -> None:
    chat = [ASKED, assistant("It is 3."), ASKED_AGAIN, assistant("4")]
    renderer = ChatRenderer(tokenizers["qwen3"])
    ids, mask = renderer.tokenize_conversation(chat, untrained_messages={3})
    assert tokenizers["qwen3"].decode(ids[mask]) == "<think>\n\n</think>\n\nIt is 3.<|im_end|>"
    assert not renderer.tokenize_conversation(chat, untrained_messages={1, 3})[1].any()


def test_chat_template_masks_follow_the_variables_of_the_template(
    tokenizers: dict[str, PreTrainedTokenizerBase],
) -> None:
    renderer = ChatRenderer(tokenizers["qwen3_5_think"])
    ids, mask = renderer.tokenize_conversation([ASKED, assistant("3")], template_kwargs={"enable_thinking": False})
    assert tokenizers["qwen3_5_think"].decode(ids[mask]) == "3<|im_end|>"
    prompt = renderer.render([ASKED], template_kwargs={"enable_thinking": False})
    assert ids[: len(prompt)].tolist() == prompt.tolist()


def test_chat_template_masks_of_a_conversation_with_tools_show_the_tools(
    tokenizers: dict[str, PreTrainedTokenizerBase],
) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    for name in ("qwen2_5", "gptoss", "glm4moe", "diffusion_gemma"):
        ids, mask = ChatRenderer(tokenizers[name]).tokenize_conversation(CALLED, tools=[tool])
        shown = tokenizers[name].decode(ids[: int(mask.argmax())])
        assert "Adds." in shown and tokenizers[name].decode(ids[mask]).startswith(WRITTEN[name].call)


def test_chat_template_masks_keep_to_narrower_marks(tiny_model: Path) -> None:
    """Marks of one's own may exclude reasoning; the token that ends the message is learnt all the same."""
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{{ m.content[:-1] }}{% generation %}{{ m.content[-1] }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    ids, mask = ChatRenderer(tokenizer).tokenize_conversation([ASKED, assistant("1+2=3")])
    assert tokenizer.decode(ids[mask]) == "3<|im_end|>"
    tokenizer.chat_template = tokenizer.chat_template.replace("m.role == 'assistant'", "m.role == 'nobody'")
    with pytest.raises(DataError, match="but they contain no assistant tokens"):
        ChatRenderer(tokenizer).tokenize_conversation([ASKED, assistant("1+2=3")])


def test_chat_template_prompts_reach_templates_that_take_content_as_read(
    tokenizers: dict[str, PreTrainedTokenizerBase],
) -> None:
    """The templates of some models for pictures leave out content that is a text."""
    for name in ("idefics3", "smolvlm"):
        assert "User: What is 1 + 2?" in ChatRenderer(tokenizers[name]).render_text([ASKED])
    assert "[INST] What is 1 + 2? [/INST]" in ChatRenderer(tokenizers["llava_next"]).render_text([ASKED])


def test_chat_template_demonstrations_end_with_the_token_that_ends_an_answer(
    tokenizers: dict[str, PreTrainedTokenizerBase],
) -> None:
    """Not with the one by which the template of Phi ends a conversation."""
    answer = ChatRenderer(tokenizers["phi3"]).tokenize_answer("3")
    assert tokenizers["phi3"].decode(answer) == "3<|end|>"
