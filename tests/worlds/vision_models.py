"""Tiny random vision-language models of seven families, with their processors and a byte tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from roll.media import MediaStore
from roll.models.multimodal import MediaProcessor
from roll.types import IntArray, MediaSpan

__all__ = [
    "SIZES",
    "VISION_MODELS",
    "VisionWorld",
    "find_processor",
    "picture",
    "scale_weights",
    "write_vision_model",
]

SIZES = ((40, 56), (30, 30), (20, 64), (56, 40))
"""Heights and widths of the images in tests."""
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}IMAGE{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def _tokenizer(special: Sequence[str], image: str, **names: str) -> Any:
    """Return a tokenizer of 256 bytes, three special tokens of chats, and those of a family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    chat = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(token, special=True) for token in [*chat, *special]])
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=512,
        **({"extra_special_tokens": names} if names else {}),
    )
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image)
    return tokenizer


def _text(heads: int, **settings: Any) -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 512,
        "vocab_size": 280,
        "pad_token_id": 256,
        "bos_token_id": 257,
        "eos_token_id": 258,
        "tie_word_embeddings": False,
        **settings,
    }


_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_PATCHES = {"image_size": 32, "patch_size": 8}


def _smolvlm(heads: int, name: str = "SmolVLM") -> tuple[Any, Any]:
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer = _tokenizer(["<fake_token_around_image>", "<image>", "<global-img>", *tiles], "<image>")
    config = getattr(hf, f"{name}Config")(
        text_config=_text(heads, model_type="llama"),
        vision_config={**_TOWER, **_PATCHES},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=256,
    )
    images = getattr(hf, f"{name}ImageProcessor")(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    videos = (hf.SmolVLMVideoProcessor(),) if name == "SmolVLM" else ()
    processor = getattr(hf, f"{name}Processor")(images, tokenizer, *videos, image_seq_len=4)
    return getattr(hf, f"{name}ForConditionalGeneration")(config), processor


def _llava(heads: int) -> tuple[Any, Any]:
    tokenizer = _tokenizer(["<image>"], "<image>")
    tower = {"model_type": "clip_vision_model", "projection_dim": 32, **_TOWER, **_PATCHES, "num_hidden_layers": 3}
    config = hf.LlavaConfig(
        text_config=_text(heads, model_type="llama"),
        vision_config=tower,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
    )
    images = hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = hf.LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return hf.LlavaForConditionalGeneration(config), processor


def _gemma3(heads: int) -> tuple[Any, Any]:
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer(list(names.values()), "<start_of_image>", **names)
    tokenizer.add_tokens(["\n" * number for number in (1, 2, 3, 4)])  # vLLM looks them up in Gemma's vocabulary
    first, last, feature = tokenizer.convert_tokens_to_ids(list(names.values()))
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    config = hf.Gemma3Config(
        text_config=_text(heads, head_dim=64 // heads, sliding_window=16, layer_types=layers),
        vision_config={**_TOWER, **_PATCHES},
        mm_tokens_per_image=4,
        image_token_id=feature,
        boi_token_id=first,
        eoi_token_id=last,
    )
    images = hf.Gemma3ImageProcessor(size={"height": 32, "width": 32})
    return hf.Gemma3ForConditionalGeneration(config), hf.Gemma3Processor(images, tokenizer, image_seq_length=4)


def _internvl(heads: int) -> tuple[Any, Any]:
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = _tokenizer(list(names.values()), "<IMG_CONTEXT>", **names)
    config = hf.InternVLConfig(
        text_config=_text(heads, model_type="qwen2"),
        vision_config={**_TOWER, **_PATCHES},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    images = hf.GotOcr2ImageProcessor(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=3
    )
    processor = hf.InternVLProcessor(images, tokenizer, hf.InternVLVideoProcessor(), image_seq_length=4)
    return hf.InternVLForConditionalGeneration(config), processor


def _qwen(heads: int, *, third: bool) -> tuple[Any, Any]:
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer(special, "<|vision_start|><|image_pad|><|vision_end|>")
    keys = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    tokens = dict(zip(keys, tokenizer.convert_tokens_to_ids(special), strict=True))
    width = 32 // heads
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [width // 2, width // 4, width // 4]}
    tower = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8}
    tower |= {"out_hidden_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2}
    name = "Qwen3VL" if third else "Qwen2_5_VL"
    if third:
        text = _text(heads, head_dim=64 // heads, rope_parameters={**rope, "mrope_interleaved": True})
        tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    else:
        text = _text(heads, rope_parameters=rope)
        tower |= {"window_size": 32, "fullatt_block_indexes": [1]}
    config = getattr(hf, f"{name}Config")(text_config=text, vision_config=tower, tie_word_embeddings=False, **tokens)
    images = hf.Qwen2VLImageProcessor(
        patch_size=8, temporal_patch_size=2, merge_size=2, min_pixels=16 * 16, max_pixels=64 * 64
    )
    videos = hf.Qwen3VLVideoProcessor() if third else hf.Qwen2VLVideoProcessor()
    return getattr(hf, f"{name}ForConditionalGeneration")(config), getattr(hf, f"{name}Processor")(
        images, tokenizer, videos
    )


VISION_MODELS: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "smolvlm": _smolvlm,
    "idefics3": lambda heads: _smolvlm(heads, "Idefics3"),
    "llava": _llava,
    "internvl": _internvl,
    "qwen2.5-vl": lambda heads: _qwen(heads, third=False),
    "qwen3-vl": lambda heads: _qwen(heads, third=True),
    "gemma3": _gemma3,
}


def write_vision_model(directory: Path, name: str, *, heads: int = 4, seed: int = 0) -> Path:
    """Write a model with its processor; with 2 heads, vLLM's CPU kernels support it.

    Weights are scaled up, so that a wrong or missing image changes log-probs by tenths.
    """
    torch.manual_seed(seed)
    model, processor = VISION_MODELS[name](heads)
    scale_weights(model)
    model.eval().save_pretrained(directory)
    if name in ("llava", "gemma3"):
        _restore_published_names(directory / "model.safetensors")
    processor.save_pretrained(directory)
    return directory


def scale_weights(model: Any) -> None:
    """Draw a model's matrices with variance 1 / inputs, so that a wrong medium changes log-probs by tenths."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)


def _restore_published_names(file: Path) -> None:
    """Rename a tower's weights as published checkpoints do: transformers 5 writes names that vLLM does not know."""
    weights = load_file(file)
    renamed = {key.replace("vision_tower.", "vision_tower.vision_model."): weight for key, weight in weights.items()}
    save_file(renamed, file, metadata={"format": "pt"})


def picture(seed: int, height: int, width: int) -> Image.Image:
    """Return an image of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


@dataclass(frozen=True)
class VisionWorld:
    """A model's directory and a store with the images of `SIZES`."""

    model: Path
    store: MediaStore
    digests: tuple[str, ...]

    @classmethod
    def create(cls, model: Path, media_dir: Path) -> VisionWorld:
        """Fill a store with images."""
        store = MediaStore(media_dir)
        return cls(model, store, tuple(store.add_image(picture(i, *size)) for i, size in enumerate(SIZES)))

    @property
    def processor(self) -> MediaProcessor:
        """The model's processor."""
        return find_processor(self.model)

    def prompt(self, text: str, *images: int) -> tuple[IntArray, tuple[MediaSpan, ...]]:
        """Return tokens and spans of a text with `{}` for each of the images, numbered as in `SIZES`."""
        processor = self.processor
        tokenizer = processor._processor.tokenizer
        mark = tokenizer.chat_template.partition("'image' -%}")[2].partition("{%-")[0]
        ids = np.array(tokenizer(text.replace("{}", mark), add_special_tokens=False)["input_ids"], np.int32)
        chosen = [self.digests[image] for image in images]
        processed = {digest: processor.process(self.store.get(digest)) for digest in chosen}
        return processor.expand(ids, chosen, processed)

    def reference_logprobs(
        self, reference: Any, token_ids: IntArray, media: Sequence[MediaSpan], *, sampled: bool = False
    ) -> torch.Tensor:
        """Return log-probs [L - 1] of a sequence by a model of transformers alone, from its processor's own batch.

        With `sampled`, those of the distribution that engines sample from, without tokens that stand for images.
        """
        processor, ids = self.processor, torch.from_numpy(token_ids.astype(np.int64))[None]
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if media:
            images = [self.store.get(span.digest) for span in media]
            text = " ".join([processor.placeholders["image"]] * len(images))
            output = processor._processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
            kinds = torch.zeros_like(ids)
            for span in media:
                kinds[0, span.start : span.end] = (
                    ids[0, span.start : span.end] == processor.feature_ids["image"]
                ).long()
            token_type_arguments = {"token_type_ids", "mm_token_type_ids"} & output.keys()
            arguments |= {name: value for name, value in output.items() if name not in arguments}
            arguments |= dict.fromkeys(token_type_arguments, kinds)
        logits = reference(**arguments).logits[0, :-1]
        if sampled:
            logits[:, list(processor.replaced_tokens)] = -torch.inf
        return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


@lru_cache(maxsize=16)
def find_processor(model: Path) -> MediaProcessor:
    """Return the processor of a model, loaded once."""
    return MediaProcessor(model)
