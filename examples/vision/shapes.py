"""A tiny vision-language model and images of shapes: everything runs on a laptop, and nothing is downloaded.

    python examples/vision/shapes.py data             # writes data/shapes: 400 images, their questions, and the model
    roll train examples/vision/shapes-sft.yaml        # learns the words for colors from half a minute of SFT
    roll train examples/vision/shapes-grpo.yaml       # learns to name the color of the shape, from a reward

The model has random weights, the classes of SmolVLM and a tokenizer of bytes, so it reads any question and any image.
Your own images need only a file like `data/shapes/shapes.jsonl`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

COLORS = ("red", "green", "blue", "black")
SIZE = 64
IMAGE_TOKENS = ("<fake_token_around_image>", "<image>", "<global-img>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML; the processor replaces `<image>` by the tokens of an image."""


def names_color(text: str, answer: str, metadata: dict[str, Any]) -> float:
    """Return 1 for the color of the shape, 0.1 for another color, and 0 for any other answer."""
    word = text.strip()
    return 1.0 if word == answer else 0.1 * (word in COLORS)


def write_images(directory: Path, count: int = 400) -> None:
    """Write images of one shape each, and `shapes.jsonl` with a question about each image."""
    from PIL import Image, ImageDraw

    rng = random.Random(0)
    (directory / "images").mkdir(parents=True, exist_ok=True)
    with (directory / "shapes.jsonl").open("w") as rows:
        for number in range(count):
            color, shape = rng.choice(COLORS), rng.choice(("circle", "square"))
            image = Image.new("RGB", (SIZE, SIZE), "white")
            x, y, width = rng.randint(2, 30), rng.randint(2, 30), rng.randint(20, 32)
            draw = ImageDraw.Draw(image)
            (draw.ellipse if shape == "circle" else draw.rectangle)([x, y, x + width, y + width], fill=color)
            path = f"images/{number:03}.png"
            image.save(directory / path)
            question = f"<image>What color is the {shape}?"
            rows.write(json.dumps({"images": [path], "question": question, "answer": color}) + "\n")


def write_model(directory: Path) -> None:
    """Write a vision-language model with 0.7 million random weights, and its processor."""
    import torch
    import transformers as hf

    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    config = hf.SmolVLMConfig(
        text_config={
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": SIZE,
            "patch_size": 16,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,  # 2 x 2 patches become one token, so an image has 2 x 2 tokens
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    hf.SmolVLMForConditionalGeneration(config).save_pretrained(directory)
    images = hf.SmolVLMImageProcessor(
        size={"longest_edge": SIZE}, max_image_size={"longest_edge": SIZE}, do_image_splitting=False
    )
    hf.SmolVLMProcessor(images, tokenizer, hf.SmolVLMVideoProcessor(), image_seq_len=4).save_pretrained(directory)


def build_tokenizer() -> Any:
    """Return a tokenizer whose tokens are the 256 bytes, and the special tokens of chats and images."""
    import transformers as hf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *IMAGE_TOKENS)
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=512
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


if __name__ == "__main__":
    target = Path(sys.argv[1]) / "shapes"
    write_images(target)
    write_model(target / "model")
    print(f"wrote {target}/shapes.jsonl, {target}/images and {target}/model")
