"""Rows of conversations with images anywhere become training samples, or are reported by row."""

from __future__ import annotations

import json
from typing import Any

import pytest
from worlds.vision_models import VisionWorld, picture, write_vision_model

from roll.config.data import FileData
from roll.config.examples import FileExamples
from roll.data import build_data
from roll.data import source as source_module
from roll.data.examples import ExampleData, build_examples
from roll.errors import DataError
from roll.models import load_tokenizer
from roll.models.multimodal import open_media
from roll.types import TrainingSample, iter_texts

NUM_IMAGES = 40


@pytest.fixture(scope="module", name="world")
def _world(tmp_path_factory: pytest.TempPathFactory) -> VisionWorld:
    directory = tmp_path_factory.mktemp("vision")
    world = VisionWorld.create(write_vision_model(directory / "model", "llava"), directory / "media")
    for number in range(NUM_IMAGES):
        picture(number, 24, 24).save(directory / f"{number}.png")
    return world


def write(world: VisionWorld, rows: list[dict[str, Any]]) -> str:
    path = world.model.parent / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(world: VisionWorld, row: dict[str, Any], kind: str = "supervised", **settings: Any) -> ExampleData:
    config = FileExamples.model_validate({"source": "file", "path": write(world, [row]), "held_out": 0, **settings})
    media = open_media(world.model, world.store.directory)
    return build_examples([config], kind, load_tokenizer(world.model), 0, media=media)  # type: ignore[arg-type]


def build(world: VisionWorld, row: dict[str, Any], kind: str = "supervised", **settings: Any) -> Any:
    examples = read(world, row, kind, **settings)
    samples = examples.build_samples(examples.train.draw(1)[0])
    assert not isinstance(samples, str), samples
    return samples


def show(world: VisionWorld, sample: TrainingSample) -> str:
    """Return the sample as text: `[n]` for the image n, and the trained tokens in `{}`."""
    tokenizer = load_tokenizer(world.model)
    digests = [world.store.add_image(picture(number, 24, 24)) for number in range(NUM_IMAGES)]
    text, place = "", 0
    for span in [*sample.media, None]:
        end = len(sample) if span is None else span.start
        for token, trained in zip(sample.token_ids[place:end], sample.loss_mask[place:end], strict=True):
            text += f"{{{tokenizer.decode([token])}}}" if trained else tokenizer.decode([token])
        if span is not None:
            assert not sample.loss_mask[span.start : span.end].any()
            text, place = f"{text}[{digests.index(span.digest)}]", span.end
    return text.replace("}{", "").replace("<|im_start|>", "<").replace("<|im_end|>", ">")


def user(*content: Any) -> dict[str, Any]:
    parts = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "path": f"{p}.png"} for p in content
    ]
    return {"role": "user", "content": parts}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_conversations_with_images_in_every_question(world: VisionWorld) -> None:
    messages = [user(3, "a"), assistant("b"), user("c", 5, "d", 3), assistant("e"), user(7), assistant("f")]
    (sample,) = build(world, {"messages": messages})
    assert show(world, sample) == (
        "<user\n[3]a>\n<assistant\n{b>}\n<user\nc[5]d[3]>\n<assistant\n{e>}\n<user\n[7]>\n<assistant\n{f>}\n"
    )


def test_conversations_with_images_in_results_of_tools(world: VisionWorld) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    messages = [
        user("a"),
        {"role": "assistant", "content": "let me", "tool_calls": [call]},
        {"role": "tool", "content": user(4)["content"]},
        assistant("b"),
    ]
    with pytest.raises(DataError, match="leaves out the call to tool 'look'"):  # the template of this model
        read(world, {"messages": messages})
    del messages[1]["tool_calls"]
    (sample,) = build(world, {"messages": messages})
    assert show(world, sample).endswith("<tool\n[4]>\n<assistant\n{b>}\n")


def test_conversations_with_images_in_a_prompt_template(world: VisionWorld) -> None:
    row = {"prompt": [user(2, "Which color?")], "completion": [assistant("red")]}
    (sample,) = build(world, row, prompt_template="Answer in one word. {prompt} Now:")
    assert show(world, sample) == "<user\nAnswer in one word. [2]Which color? Now:>\n<assistant\n{red>}\n"


def test_conversations_with_images_next_to_their_rendered_text(world: VisionWorld) -> None:
    """Some data sets have a column with the rendered conversation."""
    row = {"messages": [user(2, "Which color?"), assistant("red")], "text": "user: Which color? assistant: red"}
    (sample,) = build(world, row)
    assert show(world, sample) == "<user\n[2]Which color?>\n<assistant\n{red>}\n"


def test_conversations_with_images_in_answers_are_bad_rows(world: VisionWorld) -> None:
    row = {"messages": [user("Draw it."), {"role": "assistant", "content": user("So:", 2)["content"]}]}
    with pytest.raises(DataError, match=r"rows\.jsonl', line 1: the assistant message 2 has an image"):
        read(world, row)


def test_pairs_of_equal_texts_with_other_images_have_other_prompts(world: VisionWorld) -> None:
    def side(image: int) -> list[dict[str, Any]]:
        return [assistant("look"), user(image), assistant("b")]

    row = {"prompt": [user(1, "a")], "chosen": side(2), "rejected": side(3)}
    with pytest.raises(DataError, match=r"line 1.*this user message: '\[image [0-9a-f]{12}\]'. Provide two answers"):
        read(world, row, "pair")


def test_pairs_of_prompts_with_other_images_are_bad_rows(world: VisionWorld) -> None:
    row = {"chosen": [user(1, "a"), assistant("b")], "rejected": [user(2, "a"), assistant("c")]}
    with pytest.raises(DataError, match=r"line 1.*Provide two answers to the same prompt"):
        read(world, row, "pair")


@pytest.mark.parametrize("kind", ["prompts", "examples"])
def test_held_out_rows_of_equal_texts_are_told_apart_by_their_images(
    world: VisionWorld, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the images, all rows would be one question, and all of them on one side."""
    media = open_media(world.model, world.store.directory)
    rows = [{"prompt": [user(number, "What?")], "completion": [assistant("x")]} for number in range(NUM_IMAGES)]
    rows += rows  # every question occurs twice
    path = write(world, [{"prompt": row["prompt"], "answer": "x"} if kind == "prompts" else row for row in rows])
    entry = {"source": "file", "path": path, "held_out": 0.25}

    def split() -> tuple[set[str], set[str], str]:
        if kind == "prompts":
            data = build_data(
                [FileData.model_validate(entry | {"reward": "exact"})], load_tokenizer(world.model), 0, media=media
            )
            held = [data.held_out[index].messages for index in range(len(data.held_out))]
            drawn = [draw.prompt.messages for draw in data.train.draw(2 * NUM_IMAGES - len(held))]
        else:
            examples = build_examples(
                [FileExamples.model_validate(entry)], "supervised", load_tokenizer(world.model), 0, media=media
            )
            held = [examples.held_out[index].conversations[0].messages for index in range(len(examples.held_out))]
            drawn = [d.example.conversations[0].messages for d in examples.train.draw(2 * NUM_IMAGES - len(held))]
            data = examples
        sides = [{message.media[0].digest for messages in side for message in messages[:1]} for side in (drawn, held)]
        return sides[0], sides[1], data.held_out_fingerprints["file"]

    training, held_out, fingerprint = split()
    assert len(training) + len(held_out) == NUM_IMAGES and not training & held_out
    assert 4 <= len(held_out) <= 16
    assert split() == (training, held_out, fingerprint)

    def ignore_media(content: Any) -> str:
        return "".join(iter_texts(content))

    for module in (source_module, "roll.data.examples.reader", "roll.data.prompts"):
        name = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{name}.get_content_key", ignore_media)
    training, held_out, other = split()
    assert not (training and held_out) and other != fingerprint
