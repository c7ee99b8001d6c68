"""A model's reasoning, told from its answer."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from roll.data import ChatRenderer
from roll.data.reasoning import detect_reasoning_format, extract_answer, find_reasoning_start, split_reasoning
from roll.models import load_tokenizer
from roll.types import Message

HARMONY = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>Four."


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("Four.", "", "Four."),
        ("", "", ""),
        ("<think>Two and two.</think>Four.", "Two and two.", "Four."),
        ("<think>\nTwo and two.\n</think>\n\nFour.", "Two and two.", "\n\nFour."),
        ("Two and two.</think>Four.", "Two and two.", "Four."),
        ("<think>Five.</think>No.<think>Four.</think>Four.", "Five.</think>No.<think>Four.", "Four."),
        ("<think>Two and two", "Two and two", None),
        ("  <think>Two and two", "Two and two", None),
        ("<think>Two.</think><think>And two", "Two.<think>And two", None),
        ("Four. <think>Or five?", "Or five?", "Four. "),
        ("<think>Two and two.</think>", "Two and two.", ""),
        ("[THINK]Two and two.[/THINK]Four.", "Two and two.", "Four."),
        ("[THINK]Two and two.", "Two and two.", None),
        ("<seed:think>Two and two.</seed:think>Four.", "Two and two.", "Four."),
        ("<|START_THINKING|>Two and two.<|END_THINKING|>Four.", "Two and two.", "Four."),
        ("\u25c1think\u25b7Two and two.\u25c1/think\u25b7Four.", "Two and two.", "Four."),
        ("<|channel>thought\nTwo and two.\n<channel|>Four.", "Two and two.", "Four."),
        ("<|channel>thought\nTwo and two.", "Two and two.", None),
        (" to=self<|message|>Two.<|eom|><|start|>assistant to=user<|message|>Four.<|eot|>", None, "Four."),
        (HARMONY, None, "Four."),
        (f"{HARMONY}<|return|>", None, "Four."),
        (HARMONY[: HARMONY.index("<|start|>")], None, None),
        ("<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>commentary<|message|>y", None, None),
        ("analysisTwo and two.assistantfinalFour.", "Two and two.", "Four."),
        ("analysis of <b>the</b> data", "", "analysis of <b>the</b> data"),
    ],
)
def test_data_reasoning_is_told_from_the_answer(text: str, thought: str | None, answer: str | None) -> None:
    found, rest = split_reasoning(text)
    assert rest == answer
    if thought is not None:
        assert found == thought


def test_data_reasoning_that_the_prompt_began_needs_its_end() -> None:
    assert extract_answer("Two and two.</think>Four.", begun=True) == "Four."
    assert extract_answer("Two and two. Four.", begun=True) is None
    assert extract_answer("Two and two. Four.", begun=False) == "Two and two. Four."


def test_data_reasoning_of_a_known_format_is_read_in_that_one_alone() -> None:
    """An answer about another model's tags is an answer."""
    harmony = detect_reasoning_format("{{ '<|channel|>final<|message|>' }}")
    assert extract_answer("<|channel|>final<|message|>It ends with </think>, always.", harmony) == (
        "It ends with </think>, always."
    )


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>"),
        ("<|im_start|>assistant\n<think>", "<think>"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("<|im_start|>assistant\n", ""),
        ("Write <think> first.<|im_start|>assistant\n", ""),
        ("[/INST][THINK]", "[THINK]"),
        ("<tool_response|><|channel>thought\n", "<|channel>thought"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "<|channel|>analysis"),
        ("<|start|>assistant", ""),
        ("", ""),
    ],
)
def test_data_reasoning_begun_by_a_prompt_is_seen(prompt: str, begun: str) -> None:
    assert find_reasoning_start(prompt) == begun


def templates() -> Path:
    package = find_spec("trl")
    if package is None or package.origin is None:
        pytest.skip("TRL, which set-up installs, keeps models' chat templates")
    return Path(package.origin).parent / "chat_templates"


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("qwen3", "</think>"),
        ("qwen3_5_think", "</think>"),
        ("deepseek_r1_distill", "</think>"),
        ("glm4moe", "</think>"),
        ("nemotron_3_nano", "</think>"),
        ("gptoss", "<|channel|>final<|message|>"),
        ("gemma4", "<channel|>"),
        ("muse_glimmer", " to=user<|message|>"),
        ("qwen2_5", None),
        ("llama3_1", None),
        ("gemma3", None),
        ("phi3", None),
        ("lfm2", None),
    ],
)
def test_data_reasoning_format_is_that_of_the_template(name: str, end: str | None) -> None:
    form = detect_reasoning_format((templates() / f"{name}.jinja").read_text(encoding="utf-8"))
    assert (form is None) if end is None else (form is not None and form.ends == (end,))


def test_data_reasoning_format_is_that_of_the_tokenizer_without_a_template() -> None:
    form = detect_reasoning_format("", {"[INST]", "[THINK]", "[/THINK]"})
    assert form is not None and form.ends == ("[/THINK]",)
    assert detect_reasoning_format("", {"<|im_end|>"}) is None


def test_data_reasoning_format_of_a_template_of_ones_own() -> None:
    form = detect_reasoning_format("{{ '<reasoning>' + m.thought + '</reasoning>' }}")
    assert extract_answer("<reasoning>Two.</reasoning>Four.", form) == "Four."
    assert extract_answer("<reasoning>Two.", form) is None


def with_special(model: Path, template: str, *special: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer


def test_data_reasoning_marked_by_special_tokens_is_seen_in_what_was_generated(tiny_model: Path) -> None:
    special = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>")
    template = (templates() / "gptoss.jinja").read_text(encoding="utf-8")
    renderer = ChatRenderer(with_special(tiny_model, template, *special))
    prompt = renderer.render([Message(role="user", content="2 + 2?")])
    answer = renderer.tokenize(f"{HARMONY}<|return|>")
    assert renderer.decode(answer) == HARMONY
    assert renderer.decode_final_text(answer, prompt) == "Four."
    assert renderer.decode_final_text(renderer.tokenize("<|channel|>analysis<|message|>Two and"), prompt) == ""


def test_data_reasoning_marked_by_tokens_of_the_tokenizer_is_seen(tiny_model: Path) -> None:
    tokenizer = with_special(tiny_model, "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]", "[INST]", "[/INST]"]})
    renderer = ChatRenderer(tokenizer)
    answer = renderer.tokenize("[THINK]Two.[/THINK]Four.</s>[INST]<|im_end|>")
    assert renderer.decode(answer) == "[THINK]Two.[/THINK]Four.</s>"
    assert renderer.decode_final_text(answer, renderer.tokenize("[INST]2 + 2?[/INST]")) == "Four.</s>"


def test_data_reasoning_begun_by_the_generation_prompt_needs_its_end(tiny_model: Path) -> None:
    template = (templates() / "qwen3_5_think.jinja").read_text(encoding="utf-8")
    renderer = ChatRenderer(with_special(tiny_model, template))
    prompt = renderer.render([Message(role="user", content="2 + 2?")])
    assert renderer.decode_final_text(renderer.tokenize("Two.\n</think>\n\nFour.<|im_end|>"), prompt) == "\n\nFour."
    assert renderer.decode_final_text(renderer.tokenize("Two. Four.<|im_end|>"), prompt) == ""
    silent = renderer.render([Message(role="user", content="2 + 2?")], template_kwargs={"enable_thinking": False})
    assert renderer.decode_final_text(renderer.tokenize("Four.<|im_end|>"), silent) == "Four."


def test_data_reasoning_leaves_texts_of_models_without_special_marks_as_they_were(tiny_model: Path) -> None:
    renderer = ChatRenderer(load_tokenizer(str(tiny_model)))
    ids = renderer.tokenize("<|im_start|>Two <tool_call> and two.<|im_end|>")
    assert renderer.decode(ids) == "Two <tool_call> and two."
    assert renderer.decode(np.zeros(0, np.int32)) == ""


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n", "<"])), st.booleans())
def test_data_reasoning_is_no_part_of_the_answer(parts: list[str], begun: bool) -> None:
    text = "".join(parts)
    answer = extract_answer(text, begun=begun)
    if answer is None:
        assert begun or "<think>" in text
    else:
        assert answer in text and "</think>" not in answer and "<think>" not in answer


@pytest.mark.parametrize("piece", ["<think>", "</think>", "<|channel|>", "<|channel|>final<|message|>", " ", "\n<"])
def test_data_reasoning_of_hostile_texts_takes_linear_time(piece: str) -> None:
    started = time.process_time()
    split_reasoning(piece * (2_000_000 // len(piece)), begun=True)
    find_reasoning_start(piece * (2_000_000 // len(piece)))
    assert time.process_time() - started < 10  # about 20 ms
