"""Whole conversations as tokens, and which of them the assistant would have written."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase
from worlds.chat_templates import TEMPLATES, Template

from roll.data import ChatRenderer
from roll.errors import DataError
from roll.models import load_tokenizer
from roll.types import Message


def user(content: str) -> Message:
    return Message(role="user", content=content)


def assistant(content: str) -> Message:
    return Message(role="assistant", content=content)


def tokenizer_of(model: Path, template: Template) -> PreTrainedTokenizerBase:
    """The model's tokenizer with this template and the tokens that it needs."""
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_special_tokens({"additional_special_tokens": list(template.special)})
    tokenizer.eos_token = template.special[0]
    tokenizer.bos_token = template.special[1]
    tokenizer.chat_template = template.text
    return tokenizer


def learnt(tokenizer: PreTrainedTokenizerBase, messages: list[Message], num_prompt_messages: int = 0) -> list[str]:
    """The texts of the stretches that are learnt."""
    ids, mask = ChatRenderer(tokenizer).tokenize_conversation(messages, num_prompt_messages)
    assert ids.dtype == np.int32 and mask.dtype == np.bool_ and ids.shape == mask.shape
    borders = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return [tokenizer.decode(ids[a:b]) for a, b in zip(borders[::2], borders[1::2], strict=True)]


CHAT = [user("What is 1 + 2?"), assistant("It is 3."), user("And 2 + 2?"), assistant("4, of course.\nSure?")]
ALL_TEMPLATES = sorted(TEMPLATES)
KEEPS_TURNS = [name for name in ALL_TEMPLATES if name != "qwen-3"]


@pytest.mark.parametrize("name", KEEPS_TURNS)
def test_conversation_the_assistants_texts_and_what_ends_them_are_learnt_and_nothing_else(
    tiny_model: Path, name: str
) -> None:
    template = TEMPLATES[name]
    tokenizer = tokenizer_of(tiny_model, template)
    space = " " if name == "mistral" else ""  # it stands before the answer, not at the end of what is asked
    turns = [f"{space}It is 3.{template.end}", f"{space}4, of course.\nSure?{template.end}"]
    assert learnt(tokenizer, CHAT) == turns
    assert learnt(tokenizer, CHAT, 3) == turns[1:]
    assert learnt(tokenizer, CHAT[:2]) == turns[:1]


@pytest.mark.parametrize("name", KEEPS_TURNS)
def test_conversation_the_tokens_are_the_templates_own(tiny_model: Path, name: str) -> None:
    tokenizer = tokenizer_of(tiny_model, TEMPLATES[name])
    ids, mask = ChatRenderer(tokenizer).tokenize_conversation(CHAT)
    whole = tokenizer.apply_chat_template([m.to_dict() for m in CHAT], tokenize=True, return_dict=False)
    assert ids.tolist() == whole and not mask[0]


@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_conversation_every_learnt_turn_follows_what_the_engine_is_given(tiny_model: Path, name: str) -> None:
    tokenizer = tokenizer_of(tiny_model, TEMPLATES[name])
    renderer = ChatRenderer(tokenizer)
    ids, mask = renderer.tokenize_conversation(CHAT, 3)
    head = renderer.render(CHAT[:3])
    assert ids[: len(head)].tolist() == head.tolist()
    assert int(mask.argmax()) == len(head)


def test_conversation_marks_and_prefixes_and_transformers_agree(tiny_model: Path) -> None:
    marked = TEMPLATES["marked"]
    tokenizer = tokenizer_of(tiny_model, marked)
    ids, mask = ChatRenderer(tokenizer).tokenize_conversation(CHAT)
    theirs = tokenizer.apply_chat_template(
        [m.to_dict() for m in CHAT],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert ids.tolist() == theirs["input_ids"] and mask.astype(int).tolist() == theirs["assistant_masks"]
    tokenizer.chat_template = marked.text.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    assert ChatRenderer(tokenizer).tokenize_conversation(CHAT)[1].tolist() == mask.tolist()


def test_conversation_thousands_of_special_tokens_are_found_fast(tiny_model: Path) -> None:
    """As Gemma 3 has them."""
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<unused{i}>" for i in range(6000)]})
    renderer = ChatRenderer(tokenizer)
    assert renderer.find_special_token("a<<unused599>") == "<unused599>"
    assert renderer.find_special_token("<unused6000><unused 1>") is None
    started = time.process_time()
    assert renderer.find_special_token("<unused" * 10_000 + "<div>" * 20_000) is None
    assert time.process_time() - started < 5  # about 30 ms on one core


def test_conversation_a_turn_that_the_template_rewrites_later_is_context_only(tiny_model: Path) -> None:
    tokenizer = tokenizer_of(tiny_model, TEMPLATES["qwen-3"])
    thought = "<think>\nOne and two.\n</think>\n\nIt is 3."
    chat = [user("1 + 2?"), assistant(thought), user("2 + 2?"), assistant(thought.replace("3", "4"))]
    assert learnt(tokenizer, chat[:2]) == [f"{thought}<|im_end|>"]
    assert learnt(tokenizer, chat) == [f"{thought.replace('3', '4')}<|im_end|>"]
    assert learnt(tokenizer, CHAT) == ["<think>\n\n</think>\n\n4, of course.\nSure?<|im_end|>"]


def test_conversation_a_template_that_drops_reasoning_everywhere_is_refused(tiny_model: Path) -> None:
    text = TEMPLATES["marked"].text.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    text = text.replace("message.content + '<|im_end|>'", "message.content.split('</think>')[-1] + '<|im_end|>'", 1)
    tokenizer = tokenizer_of(tiny_model, Template(text=text, special=TEMPLATES["marked"].special, end="<|im_end|>"))
    assert learnt(tokenizer, CHAT[:2]) == ["It is 3.<|im_end|>"]
    with pytest.raises(DataError, match=r"template leaves out a part of the assistant's text.*'<think>so</think>3'"):
        learnt(tokenizer, [user("1 + 2?"), assistant("<think>so</think>3")])


def test_conversation_a_template_whose_generation_prompt_is_no_beginning_is_refused(tiny_model: Path) -> None:
    text = TEMPLATES["qwen-2.5"].text.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
    tokenizer = tokenizer_of(tiny_model, Template(text=text, special=TEMPLATES["qwen-2.5"].special, end="<|im_end|>"))
    with pytest.raises(DataError, match="renders the start of an assistant's message differently"):
        learnt(tokenizer, CHAT[:2])


def test_conversation_a_template_that_ends_no_turn_is_refused(tiny_model: Path) -> None:
    text = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    text += "{{ 'assistant: ' * add_generation_prompt }}"
    tokenizer = tokenizer_of(tiny_model, Template(text=text, special=("</s>", "<s>"), end=""))
    with pytest.raises(DataError, match="does not end an assistant's message with a special token"):
        learnt(tokenizer, CHAT[:2])


def test_conversation_a_token_never_reaches_from_the_header_into_the_answer(default_model: Path) -> None:
    """By default the header's line feed and the answer's would be one token, which no engine begins an answer with."""
    tokenizer = load_tokenizer(str(default_model))
    chat = [user("1 + 1?"), assistant("\n\n2"), user("2 + 2?"), assistant("4")]
    renderer = ChatRenderer(tokenizer)
    ids, mask = renderer.tokenize_conversation(chat)
    assert ids.tolist() != tokenizer.apply_chat_template([m.to_dict() for m in chat], return_dict=False)
    assert learnt(tokenizer, chat) == ["\n\n2<|im_end|>", "4<|im_end|>"]
    head = renderer.render(chat[:1])
    assert ids[: len(head)].tolist() == head.tolist() and mask[len(head)]


def test_conversation_the_default_models_mask_is_what_is_counted_by_hand(default_model: Path) -> None:
    tokenizer = load_tokenizer(str(default_model))
    ids, mask = ChatRenderer(tokenizer).tokenize_conversation([user("What is 3 + 4?"), assistant("7")])
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n"
    )
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode(token) for token in ids[mask]] == ["7", "<|im_end|>"]
    assert mask.tolist() == [False] * (len(ids) - 3) + [True, True, False]  # the last one is the line feed


def test_conversation_without_a_template_texts_follow_each_other(tiny_model: Path) -> None:
    base = load_tokenizer(str(tiny_model))
    base.chat_template = None
    ids, _ = ChatRenderer(base).tokenize_conversation(CHAT)
    end = base.eos_token
    said = f"What is 1 + 2?It is 3.{end}\n\nAnd 2 + 2?\n\n4, of course.\nSure?{end}"
    assert base.decode(ids) == said
    assert learnt(base, CHAT) == [f"It is 3.{end}", f"4, of course.\nSure?{end}"]
    assert learnt(base, CHAT, 3) == [f"4, of course.\nSure?{end}"]


def test_conversation_a_plain_text_is_learnt_to_its_end(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    ids, mask = ChatRenderer(tokenizer).tokenize_plain("once")
    assert tokenizer.decode(ids) == f"once{tokenizer.eos_token}"
    assert mask.tolist() == [False, True, True, True, True]  # nothing comes before the first token


def test_conversation_a_tools_message_is_context(tiny_model: Path) -> None:
    tokenizer = tokenizer_of(tiny_model, TEMPLATES["qwen-2.5"])
    chat: list[Message] = [user("?"), assistant("call f"), Message(role="tool", content="12"), assistant("It is 12.")]
    assert learnt(tokenizer, chat) == ["call f<|im_end|>", "It is 12.<|im_end|>"]


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_conversation_what_the_template_refuses_is_said_in_its_words(tiny_model: Path, name: str) -> None:
    tokenizer = tokenizer_of(tiny_model, TEMPLATES[name])
    with pytest.raises(DataError, match=r"rejects a conversation of user, assistant, assistant: .*must alternate"):
        learnt(tokenizer, [user("a"), assistant("b"), assistant("c")])


def test_conversation_two_answers_in_a_row_are_learnt_where_the_template_takes_them(tiny_model: Path) -> None:
    tokenizer = tokenizer_of(tiny_model, TEMPLATES["llama-3"])
    assert learnt(tokenizer, [user("a"), assistant("b"), assistant("c")]) == ["b<|eot_id|>", "c<|eot_id|>"]


def test_conversation_tokens_that_begin_with_a_space_stay_whole_at_an_answers_beginning() -> None:
    """As in Llama 2 and the first Mistral: `▁` stands for a space, and a text begins with one that nobody wrote."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", "<s>", "</s>", "▁", *"Whatis1+2?:.3ITIN[]/S", "▁3", "▁I", "▁[", "IN"]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(letters))}
    merges = [("▁", "3"), ("▁", "I"), ("▁", "["), ("I", "N")]
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATES["mistral"].text,
    )
    chat = [user("1+1?"), assistant("3"), user("What?"), assistant("3")]
    ids, mask = ChatRenderer(tokenizer).tokenize_conversation(chat)
    assert ids.tolist() == tokenizer.apply_chat_template([m.to_dict() for m in chat], return_dict=False)
    assert [tokenizer.convert_ids_to_tokens(int(token)) for token in ids[mask]] == ["▁3", "</s>"] * 2
