"""A reward model scores a whole text: the same packed, exported and loaded by transformers, whatever ends a text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_helpers import make_spec
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)
from worlds.tiny_model import write_tiny_model

from roll.algorithms.losses import BradleyTerryLoss
from roll.config.model import LoRAConfig
from roll.config.rewards import RewardModelReward
from roll.data.chat import ChatRenderer
from roll.data.examples import SampleBuilder
from roll.errors import ModelError
from roll.models import choose_pad_token, load_tokenizer
from roll.rewards.reward_model import score_batch
from roll.training import TorchBackend, TrainerSpec
from roll.types import Conversation, Example, ExampleDraw, Message, TrainingBatch

ANSWERS = (("yes please", "no"), ("of course, thank you", "what?"), ("a", "bb bb bb"))
LORA = LoRAConfig(rank=4)


def spec_of(path: Path, lora: LoRAConfig | None = None, **settings: Any) -> TrainerSpec:
    spec = dataclasses.replace(make_spec(path, **settings), role="reward_model")
    return dataclasses.replace(spec, model=spec.model.model_copy(update={"lora": lora, "dtype": "float32"}))


def conversation(question: str, answer: str) -> Conversation:
    messages = (Message(role="user", content=question), Message(role="assistant", content=answer))
    return Conversation(messages=messages, num_prompt_messages=1)


def batch_of(path: Path) -> TrainingBatch:
    builder = SampleBuilder(renderer=ChatRenderer(load_tokenizer(path)), score_at_end=True)
    samples = []
    for number, sides in enumerate(ANSWERS):
        asked = f"question {number}"
        example = Example(
            uid=str(number), domain="pairs", conversations=tuple(conversation(asked, side) for side in sides)
        )
        draw = ExampleDraw(draw_id=number, example=example, position=-1)
        samples += builder.build_samples(draw)[0]
    return TrainingBatch(samples=tuple(samples))


def scores(backend: TorchBackend, batch: TrainingBatch) -> list[float]:
    values = backend.forward(batch, ("values",))["values"]
    return [float(v[s.loss_mask].item()) for v, s in zip(values, batch.samples, strict=True)]


def by_transformers(path: Path, texts: list[list[int]]) -> list[float]:
    """All texts padded, as one batch."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    pad, longest = model.config.pad_token_id, max(map(len, texts))
    ids = torch.tensor([[*text, *[pad] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=mask).logits[:, 0].tolist()


def trained(path: Path, lora: LoRAConfig | None = None, **settings: Any) -> tuple[TorchBackend, TrainingBatch]:
    backend, batch = TorchBackend(spec_of(path, lora, **settings)), batch_of(path)
    for _ in range(3):
        backend.train_step(batch, BradleyTerryLoss())
    return backend, batch


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "lora"])
def test_reward_model_what_is_exported_scores_the_text_alone_as_the_trainer_does_packed(
    tmp_path: Path, tied: bool, lora: LoRAConfig | None
) -> None:
    path = write_tiny_model(tmp_path / "model", tied=tied)
    backend, batch = trained(path, lora, learning_rate=1e-2)
    packed = scores(backend, batch)
    assert np.std(packed) > 0.01
    backend.export(tmp_path / "exported")
    texts = [sample.token_ids[:-1].tolist() for sample in batch.samples]  # without the dummy
    np.testing.assert_allclose(by_transformers(tmp_path / "exported", texts), packed, atol=1e-4)
    settings = RewardModelReward(type="reward_model", path=str(tmp_path / "exported"), device="cpu", dtype="float32")
    asked = [([Message(role="user", content=f"question {i}")], side) for i, s in enumerate(ANSWERS) for side in s]
    np.testing.assert_allclose(score_batch(settings.model_dump_json(), asked), packed, atol=1e-4)
    again = TorchBackend(spec_of(tmp_path / "exported"))
    np.testing.assert_allclose(scores(again, batch), packed, atol=1e-4)


def test_reward_model_adapters_are_exported_for_peft_with_the_head_that_scores(tmp_path: Path) -> None:
    from peft import PeftModel

    path = write_tiny_model(tmp_path / "base")
    backend, batch = trained(path, LORA, learning_rate=1e-2)
    backend.export(tmp_path / "model")
    base = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.inference_mode():
        found = [float(adapted(torch.tensor([s.token_ids[:-1].tolist()])).logits[0, 0]) for s in batch.samples]
    packed = scores(backend, batch)
    assert np.std(packed) > 0.01
    np.testing.assert_allclose(found, packed, atol=1e-4)


def test_reward_model_a_text_that_ends_with_the_token_that_pads_keeps_its_score(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model")
    tokenizer = load_tokenizer(path)
    tokenizer.pad_token = tokenizer.eos_token  # as many models have it
    tokenizer.save_pretrained(path)
    assert choose_pad_token(tokenizer) == tokenizer.bos_token
    backend, batch = trained(path, learning_rate=1e-2)
    backend.export(tmp_path / "exported")
    texts = [sample.token_ids[:-2].tolist() for sample in batch.samples]  # without "\n": the turn's end is the last
    ended = tuple(
        dataclasses.replace(s, token_ids=np.append(s.token_ids[:-2], s.token_ids[-1:]), loss_mask=s.loss_mask[1:])
        for s in batch.samples
    )
    packed = scores(backend, TrainingBatch(samples=ended))
    assert {text[-1] for text in texts} == {tokenizer.eos_token_id}
    np.testing.assert_allclose(by_transformers(tmp_path / "exported", texts), packed, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").pad_token == tokenizer.bos_token


@pytest.mark.parametrize("settings", [{"share_prefix": False}, {"max_tokens_per_micro_batch": 40}], ids=str)
def test_reward_model_every_layout_trains_the_same_scores(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = write_tiny_model(tmp_path / "model")
    usual, batch = trained(path, learning_rate=1e-3)
    other, _ = trained(path, learning_rate=1e-3, **settings)
    np.testing.assert_allclose(scores(other, batch), scores(usual, batch), atol=1e-4)


def test_reward_model_scores_begin_at_0_and_a_model_that_cannot_score_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model")
    assert scores(TorchBackend(spec_of(path)), batch_of(path)) == [0.0] * 6
    small = {"vocab_size": 260, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    BertForSequenceClassification(BertConfig(**small, intermediate_size=8)).save_pretrained(path)
    with pytest.raises(ModelError, match="cannot"):
        TorchBackend(spec_of(path))
