"""A real small vision-language model: SmolLM2-135M with a tower of 4 layers × 128, in the classes of SmolVLM.

The tower is trained first (`_vision_tower`); language model and projector then learn to read it with the pipeline
`sft`. The result is loaded by transformers, by vLLM and by ROLL.
"""

from __future__ import annotations

from pathlib import Path

import torch
from _vision_data import SIZE
from _vision_tower import LANGUAGE_MODEL, TOWER
from safetensors.torch import load_file

from roll.models import load_causal_lm, load_tokenizer

IMAGE_TOKENS = ("<fake_token_around_image>", "<image>", "<global-img>", "<row_1_col_1>")
VOCABULARY = 49280
"""The 49,152 tokens of SmolLM2 and those of images, rounded up."""
TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}<|im_start|>{%- endif -%}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}<image>{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}<|im_end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>{%- endif -%}"
)
"""A chat template with one token per turn. ChatML has eight, a third of a prompt of these benchmarks."""


def build_vision_model(directory: Path, encoder: Path, *, scale_factor: int) -> None:
    """Write the model with its processor.

    Args:
        directory: The directory to write.
        encoder: The file of the weights of tower and projector.
        scale_factor: Patches in a row, and in a column, that become one token: an image of 8 × 8 patches has 16 tokens
            with 2, and 4 tokens with 4.
    """
    import transformers as hf

    tokenizer = load_tokenizer(LANGUAGE_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS)})
    tokenizer.chat_template = TEMPLATE
    text = load_causal_lm(LANGUAGE_MODEL, "float32")
    text.resize_token_embeddings(VOCABULARY)
    config = hf.SmolVLMConfig(
        text_config={**text.config.to_dict(), "vocab_size": VOCABULARY},
        vision_config=TOWER,
        image_token_id=int(tokenizer.convert_tokens_to_ids("<image>")),  # type: ignore[arg-type]
        scale_factor=scale_factor,
        pad_token_id=text.config.pad_token_id,
        tie_word_embeddings=True,
    )
    model = hf.SmolVLMForConditionalGeneration(config)
    model.model.text_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    missing, unexpected = model.model.load_state_dict(load_file(encoder), strict=False)
    assert not unexpected and all(name.startswith("text_model.") for name in missing), (missing, unexpected)
    images = hf.SmolVLMImageProcessor(
        size={"longest_edge": SIZE}, max_image_size={"longest_edge": SIZE}, do_image_splitting=False
    )
    num_tokens = (SIZE // TOWER["patch_size"] // scale_factor) ** 2
    processor = hf.SmolVLMProcessor(images, tokenizer, hf.SmolVLMVideoProcessor(), image_seq_len=num_tokens)
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
