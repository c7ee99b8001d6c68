"""A text that begins with the token that its tokenizer puts before texts has it once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerBase
from worlds.chat_templates import TEMPLATES
from worlds.rows import asked, row_examples

from roll.data import ChatRenderer
from roll.models import load_tokenizer

BOS = "<|begin_of_text|>"
CHAT = f"{BOS}<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    """Adds its token before texts, as Llama's does."""
    template = TEMPLATES["llama-3"]
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.add_special_tokens({"additional_special_tokens": [*template.special]})
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template = BOS, template.end, template.text
    bos = tokenizer.convert_tokens_to_ids(BOS)
    single = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    tokenizer.backend_tokenizer.post_processor = single
    assert tokenizer("a")["input_ids"][0] == bos
    return tokenizer


def sample(tokenizer: PreTrainedTokenizerBase, row: Any) -> Any:
    examples = row_examples(tokenizer, [row])
    (found,) = examples.build_samples(examples.train.draw(1)[0])
    return found


@pytest.mark.parametrize("text", [f"{CHAT}a<|eot_id|>", CHAT.removeprefix(BOS) + "a<|eot_id|>"])
def test_conversation_bos_texts_have_the_token_that_begins_them_once(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    bos = tokenizer.bos_token_id
    found = sample(tokenizer, {"text": text})
    assert found.token_ids.tolist().count(bos) == 1 and found.token_ids[0] == bos
    assert not found.loss_mask[0] and found.loss_mask[1:].all()
    assert tokenizer.decode(found.token_ids) == f"{CHAT}a<|eot_id|>"


def test_conversation_bos_prompts_that_are_rendered_have_it_once(tokenizer: PreTrainedTokenizerBase) -> None:
    for prompt in (CHAT, CHAT.removeprefix(BOS), "q"):
        assert asked(tokenizer, {"prompt": prompt, "answer": "7"}) == CHAT


def test_conversation_bos_base_models_prompts_have_it_once(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    for prompt in ("q", f"{BOS}q"):
        assert asked(tokenizer, {"prompt": prompt, "answer": "7"}) == f"{BOS}q"


def test_conversation_bos_tokens_that_the_text_has_itself_are_kept(
    tokenizer: PreTrainedTokenizerBase, tiny_model: Path
) -> None:
    assert (
        ChatRenderer(tokenizer).tokenize(f"{BOS}{BOS}a", add_special_tokens=True).tolist().count(tokenizer.bos_token_id)
        == 2
    )
    other = load_tokenizer(str(tiny_model))  # adds none
    other.add_tokens([AddedToken(BOS, special=True)])
    other.bos_token = BOS
    assert ChatRenderer(other).tokenize(f"{BOS}{BOS}a", add_special_tokens=True).tolist().count(other.bos_token_id) == 2
