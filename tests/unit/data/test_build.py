"""From configuration entries to data, and chat rendering, with a real tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from roll.config.data import ArithmeticData, DataConfig, FileData
from roll.data import ChatRenderer, build_data
from roll.errors import DataError
from roll.models import load_tokenizer
from roll.types import Message


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tiny_model))


def arithmetic(**changes: Any) -> ArithmeticData:
    return ArithmeticData(**{"source": "arithmetic", "reward": "math", **changes})


def spell(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tiny model's tokens are single bytes, in GPT-2's spelling."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[{" ": "Ġ", "\n": "Ċ"}.get(letter, letter)] for letter in text]


CHAT: list[Message] = [Message(role="system", content="Brief."), Message(role="user", content="1 + 1?")]


def test_data_source_rendering_is_the_template_exactly_up_to_the_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = ChatRenderer(tokenizer).render(CHAT)
    text = "<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids.tolist()) == text
    # nothing is added before, between, or after
    start, end = 1, 2
    spelt = [start, *spell(tokenizer, "system\nBrief."), end, *spell(tokenizer, "\n")]
    spelt += [start, *spell(tokenizer, "user\n1 + 1?"), end, *spell(tokenizer, "\n")]
    assert ids.tolist() == [*spelt, start, *spell(tokenizer, "assistant\n")]


def test_data_source_decoding_leaves_out_special_tokens_and_nothing_else(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = np.array([*spell(tokenizer, " it ' s  7 .\n"), 2, 3], np.int32)
    assert ChatRenderer(tokenizer).decode(ids) == " it ' s  7 .\n"


def test_data_source_a_model_without_a_template_gets_the_texts_alone(tiny_model: Path) -> None:
    base = load_tokenizer(str(tiny_model))
    base.chat_template = None
    renderer = ChatRenderer(base)
    assert not renderer.has_template
    assert base.decode(renderer.render(CHAT).tolist()) == "Brief.\n\n1 + 1?"


def test_data_source_a_template_that_refuses_a_role_gives_a_data_error(tiny_model: Path) -> None:
    strict = load_tokenizer(str(tiny_model))
    strict.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(
        DataError, match=r"rejects a conversation of system, user: System role not supported. .*system_prompt"
    ):
        ChatRenderer(strict).render(CHAT)


def test_data_source_build_data_counts_and_measures(tokenizer: PreTrainedTokenizerBase) -> None:
    data = build_data([arithmetic()], tokenizer, 0, 100)
    assert (data.train.num_items, len(data.held_out)) == (57, 24)
    length = len(ChatRenderer(tokenizer).render([Message(role="user", content="What is 1 + 2?")]))
    assert data.longest_prompt == length == len(data.train.draw(1)[0].token_ids)


def test_data_source_evaluation_takes_the_same_prompts_every_time_from_all_domains(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    entries: list[DataConfig] = [arithmetic(domain="sums"), arithmetic(domain="products", operations=["*"])]
    data = build_data(entries, tokenizer, 0)
    first = data.get_evaluation_draws(6)
    assert [d.draw_id for d in first] == [*range(6)]
    assert [d.prompt.domain for d in first] == ["sums", "products"] * 3
    assert [d.prompt.uid for d in first] == [d.prompt.uid for d in data.get_evaluation_draws(6)]
    assert len(data.get_evaluation_draws(1000)) == 48
    trained = {draw.prompt.uid for draw in data.train.draw(400)}
    assert len(trained) == 114 and not trained & {d.prompt.uid for d in data.get_evaluation_draws(1000)}


def test_data_source_a_prompt_that_is_too_long_is_refused_before_training(tokenizer: PreTrainedTokenizerBase) -> None:
    entry = arithmetic(min_operand=9, max_operand=10, held_out=0.5)
    longest = build_data([entry], tokenizer, 0).longest_prompt
    assert longest is not None and build_data([entry], tokenizer, 0, longest).longest_prompt == longest
    refusal = (
        rf"prompt 'arithmetic/10\+10' has {longest} tokens, but the context leaves {longest - 1} for prompts: shorten"
    )
    with pytest.raises(DataError, match=refusal):
        build_data([entry], tokenizer, 0, longest - 1)


def test_data_source_a_source_without_training_prompts_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n')
    entry = FileData(source="file", path=str(path), reward="math", held_out=0.999999)
    with pytest.raises(DataError, match="data source 'file' has no prompts for training: lower its held_out"):
        build_data([entry], tokenizer, 0)
