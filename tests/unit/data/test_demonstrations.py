"""Demonstrations from the data: columns, an expert's guesses, and the tokens of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.data import FileData, GuessNumberData
from roll.data import ChatRenderer
from roll.data.guess_number import build_guess_number_prompts, compute_binary_search
from roll.data.tables import load_table_prompts
from roll.envs import make
from roll.errors import DataError
from roll.models import load_tokenizer
from roll.types import Message


@given(max_number=st.integers(2, 64), num_turns=st.integers(1, 8), data=st.data())
def test_data_demonstrations_halving_wins_exactly_where_the_turns_allow_it(
    max_number: int, num_turns: int, data: Any
) -> None:
    secret = data.draw(st.integers(1, max_number))
    guesses = compute_binary_search(max_number, num_turns, secret)
    env = make("guess_number", {"max_number": max_number, "num_turns": num_turns, "secret": secret})
    env.reset()
    outcomes = [env.step(guess) for guess in guesses]
    assert [ended for _, _, ended, _, _ in outcomes] == [False] * (len(guesses) - 1) + [True]
    if 2**num_turns > max_number:  # so many numbers can be told apart
        assert outcomes[-1][1] == 1.0


def test_data_demonstrations_the_game_brings_an_expert_where_it_is_asked_to() -> None:
    config: dict[str, Any] = {"source": "guess_number", "max_number": 3, "num_turns": 2}
    plain, _ = build_guess_number_prompts(GuessNumberData(**config), "d", 0)
    shown, held_out = build_guess_number_prompts(GuessNumberData(**config, demonstrations=True), "d", 0)
    assert [p.expert for p in (plain[i] for i in range(3))] == [(), (), ()]
    assert [p.expert for p in (shown[i] for i in range(3))] == [("2", "1"), ("2",), ("2", "3")]
    assert plain.fingerprint != shown.fingerprint  # a resumed run notices
    assert len(held_out) == 3


def rows(path: Path, *values: Any) -> Any:
    lines = [json.dumps({"prompt": f"q{i}", "answer": "1", "how": value, "level": 2}) for i, value in enumerate(values)]
    path.write_text("\n".join(lines))
    config = FileData(source="file", path=str(path), reward="math", held_out=0, expert_key="how")
    return load_table_prompts(config, "d", 0)[0]


def test_data_demonstrations_a_column_holds_demonstrations_and_some_rows_have_none(tmp_path: Path) -> None:
    source = rows(tmp_path / "d.jsonl", "First 1.", None, "")
    assert [source[i].expert for i in range(3)] == [("First 1.",), (), ()]
    assert source[0].metadata == {"level": 2}


def test_data_demonstrations_a_demonstration_that_is_no_text_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2.*'how' must be the text of an answer, or null.*\[1\]"):
        rows(tmp_path / "d.jsonl", "1", [1])


def test_data_demonstrations_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "q", "answer": "1"}')
    config = FileData(source="file", path=str(path), reward="math", held_out=0, expert_key="how")
    with pytest.raises(DataError, match="`expert_key`"):
        load_table_prompts(config, "d", 0)


def test_data_demonstrations_an_answer_goes_on_where_the_prompt_ends_and_a_turn_where_the_answer_ends(
    tiny_model: Path,
) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    renderer = ChatRenderer(tokenizer)
    prompt = renderer.render([Message(role="user", content="Guess.")])
    flat = [
        *prompt,
        *renderer.tokenize_answer("2"),
        *renderer.tokenize_follow_up("Higher."),
        *renderer.tokenize_answer("3"),
    ]
    assert tokenizer.decode(flat) == (
        "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nHigher.<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    )


def test_data_demonstrations_an_answer_of_a_model_without_a_template_ends_with_its_end_of_text(
    tiny_model: Path,
) -> None:
    base = load_tokenizer(str(tiny_model))
    base.chat_template = None
    ids = ChatRenderer(base).tokenize_answer("2")
    assert ids[-1] == base.eos_token_id
    assert base.decode(ids[:-1].tolist()) == "2"


def test_data_demonstrations_a_template_that_begins_answers_otherwise_is_refused(tiny_model: Path) -> None:
    strange = load_tokenizer(str(tiny_model))
    strange.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'answer: ' }}{% endif %}"
    )
    with pytest.raises(DataError, match="cannot be tokenized as the model's answer"):
        ChatRenderer(strange).tokenize_answer("2")
