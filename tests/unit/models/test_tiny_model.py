"""The tiny model: same bytes every time, loadable, with a tokenizer that loses nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.tiny_model import write_tiny_model

from roll.models import load_causal_lm, load_tokenizer


def test_model_tiny_model_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = write_tiny_model(tmp_path / "a", seed=3), write_tiny_model(tmp_path / "b", seed=3)
    names = sorted(file.name for file in first.iterdir())
    assert names == sorted(file.name for file in second.iterdir())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_model_tiny_model_another_seed_gives_other_weights(tmp_path: Path) -> None:
    first, second = write_tiny_model(tmp_path / "a", seed=3), write_tiny_model(tmp_path / "b", seed=4)
    assert (first / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()


def test_model_tiny_model_tied_embeddings_are_one_tensor_and_untied_two(tmp_path: Path) -> None:
    tied = load_causal_lm(write_tiny_model(tmp_path / "tied"), "float32")
    untied = load_causal_lm(write_tiny_model(tmp_path / "untied", tied=False), "float32")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert not torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)


def test_model_tiny_model_every_weight_in_the_file_is_used_and_none_is_invented(tiny_model: Path) -> None:
    from safetensors.torch import load_file

    model = load_causal_lm(tiny_model, "float32")
    stored, live = load_file(tiny_model / "model.safetensors"), model.state_dict()
    assert set(live) - set(stored) == {"lm_head.weight"}
    assert all(torch.equal(live[name], tensor) for name, tensor in stored.items())


def test_model_tiny_model_next_token_distributions_are_neither_flat_nor_peaked(tiny_model: Path) -> None:
    model = load_causal_lm(tiny_model, "float32")
    probabilities = model(torch.arange(4, 104)[None]).logits.softmax(-1)
    entropy = -(probabilities * probabilities.log()).sum(-1)
    assert 3.0 < entropy.mean().item() < 5.3  # a flat one over 260 tokens has 5.56


def test_model_tiny_model_chat_template_writes_turns_and_a_generation_prompt(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    messages = [{"role": "user", "content": "1+2?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == 1 + len("user\n1+2?") + 1 + 1 + 1 + len("assistant\n")
    assert ids.count(1) == 2 and ids.count(2) == 1


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=100, deadline=None)
def test_model_tiny_model_text_survives_the_tokenizer(tiny_tokenizer: object, text: str) -> None:
    ids = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    assert tiny_tokenizer.decode(ids) == text  # type: ignore[attr-defined]
    if "<|" not in text:
        assert len(ids) == len(text.encode())
