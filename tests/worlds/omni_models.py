"""Tiny random thinkers of omni models, with their processors, and tones and moving shapes for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from roll.media import AudioClip, MediaStore, VideoClip
from roll.models.multimodal import MediaProcessor
from roll.types import MEDIA_KINDS, IntArray, MediaSpan
from worlds.vision_models import _text, _tokenizer, find_processor, picture, scale_weights

__all__ = ["OMNI_MODELS", "OmniWorld", "moving_shape", "tone", "write_full_omni_model", "write_omni_model"]

OMNI_MODELS = ("qwen2.5-omni", "qwen3-omni")
PREFIX = {"image": "vision", "audio": "audio", "video": "vision"}
SPECIAL = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{%- elif part['type'] == 'video' -%}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{%- elif part['type'] == 'audio' -%}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def _build(name: str, heads: int) -> tuple[Any, Any]:
    """Return a thinker and its processor."""
    # `size` replaces the processors' minimum of 100,352 pixels for a frame, which a video processor's own cannot.
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    tokenizer = _tokenizer(list(SPECIAL.values()), "", **SPECIAL)
    tokenizer.init_kwargs["size"] = size
    tokenizer.chat_template = TEMPLATE
    find = tokenizer.convert_tokens_to_ids
    tokens = {f"{kind}_token_id": find(SPECIAL[f"{kind}_token"]) for kind in ("image", "audio", "video")}
    for side, key in (("bos", "start"), ("eos", "end")):
        tokens |= {f"{part}_{key}_token_id": find(SPECIAL[f"{part}_{side}_token"]) for part in ("vision", "audio")}
    width = 64 // heads // 2
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [width // 2, width // 4, width // 4]}
    tower = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8}
    tower |= {"out_hidden_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2}
    audio = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    audio |= {"num_mel_bins": 16, "output_dim": 64, "max_source_positions": 200}
    if name == "qwen3-omni":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 64 // heads}
        text = _text(heads, rope_parameters={**rope, "mrope_interleaved": True}, **experts)
        del text["bos_token_id"]
        tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        tower |= {"image_size": 64, "apply_vit_abs_pos_embed": True}  # of published files; vLLM reads them
        audio |= {"n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 8}
        config: Any = hf.Qwen3OmniMoeThinkerConfig(
            text_config=text, vision_config=tower, audio_config=audio, position_id_per_seconds=13, **tokens
        )
        model: Any = hf.Qwen3OmniMoeThinkerForConditionalGeneration(config)
    else:
        tower |= {"window_size": 32, "fullatt_block_indexes": [1]}
        config = hf.Qwen2_5OmniThinkerConfig(
            text_config=_text(heads, rope_parameters=rope),
            vision_config=tower,
            audio_config={**audio, "n_window": 10},
            **tokens,
        )
        model = hf.Qwen2_5OmniThinkerForConditionalGeneration(config)
    images = hf.Qwen2VLImageProcessor(patch_size=8, temporal_patch_size=2, merge_size=2, size=size)
    videos = hf.Qwen2VLVideoProcessor(patch_size=8, temporal_patch_size=2, merge_size=2, size=size)
    sound = hf.WhisperFeatureExtractor(feature_size=16, sampling_rate=16000, hop_length=160, n_fft=400, chunk_length=4)
    kind = hf.Qwen3OmniMoeProcessor if name == "qwen3-omni" else hf.Qwen2_5OmniProcessor
    return model, kind(images, videos, sound, tokenizer, chat_template=TEMPLATE)


def write_omni_model(directory: Path, name: str, *, heads: int = 4, seed: int = 0) -> Path:
    """Write a thinker with its processor."""
    torch.manual_seed(seed)
    model, processor = _build(name, heads)
    scale_weights(model)
    model.eval().save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def tone(pitch: float, duration_s: float = 0.4, rate: int = 16000) -> AudioClip:
    """Return a sine of a pitch in Hz, fading in and out."""
    time = np.arange(int(duration_s * rate)) / rate
    volume = np.minimum(1, 20 * np.minimum(time, duration_s - time))
    return AudioClip(samples=(0.5 * volume * np.sin(2 * np.pi * pitch * time)).astype(np.float32), rate=rate)


def moving_shape(direction: str, *, num_frames: int = 6, size: int = 32, fps: float = 2.0, seed: int = 0) -> VideoClip:
    """Return a video of a square that moves `left`, `right`, `up` or `down` over noise."""
    frames = np.random.default_rng(seed).integers(0, 60, (num_frames, size, size, 3), dtype=np.uint8)
    for number, frame in enumerate(frames):
        far = round((size - 10) * number / max(1, num_frames - 1))
        along = far if direction in ("right", "down") else size - 10 - far
        row, column = (along, size // 2 - 5) if direction in ("up", "down") else (size // 2 - 5, along)
        frame[row : row + 10, column : column + 10] = (250, 200, 60)
    return VideoClip(frames=frames, fps=fps)


@dataclass(frozen=True)
class OmniWorld:
    """A model's directory, and a store with images, audio and videos of different lengths."""

    model: Path
    store: MediaStore
    digests: dict[str, tuple[str, ...]]

    @classmethod
    def create(cls, model: Path, media_dir: Path) -> OmniWorld:
        """Fill a store with media."""
        store = MediaStore(media_dir)
        # The third video has a fractional time between its frames; the second has more frames than the model sees.
        videos = [moving_shape("left"), moving_shape("up", num_frames=9, fps=8.0), moving_shape("down", fps=1.7)]
        clips = [tone(440), tone(880, 1.3), tone(220, 0.15)]
        digests = {
            "image": tuple(store.add_image(picture(i, *size)) for i, size in enumerate(((40, 56), (30, 30)))),
            "audio": tuple(map(store.add_clip, clips)),
            "video": tuple(map(store.add_clip, videos)),
        }
        return cls(model, store, digests)

    @property
    def processor(self) -> MediaProcessor:
        """The model's processor."""
        return find_processor(self.model)

    def prompt(self, text: str) -> tuple[IntArray, tuple[MediaSpan, ...]]:
        """Return tokens and spans of a text in which `{audio 1}` stands for the audio with number 1."""
        processor, tokenizer = self.processor, self.processor._processor.tokenizer
        digests: list[str] = []
        for kind, known in self.digests.items():
            for number in range(len(known)):
                first, last = (SPECIAL[f"{PREFIX[kind]}_{side}_token"] for side in ("bos", "eos"))
                text = text.replace(f"{{{kind} {number}}}", f"{first}\x00{kind} {number}\x00{last}")
        pieces = text.split("\x00")
        for place in range(1, len(pieces), 2):
            kind, number = pieces[place].split()
            digests.append(self.digests[kind][int(number)])
            pieces[place] = SPECIAL[f"{kind}_token"]
        ids = np.array(tokenizer("".join(pieces), add_special_tokens=False)["input_ids"], np.int32)
        processed = {digest: processor.process(self.store.get(digest)) for digest in digests}
        return processor.expand(ids, digests, processed)

    def reference_logprobs(
        self, reference: Any, token_ids: IntArray, media: Sequence[MediaSpan], banned: Sequence[int] = ()
    ) -> torch.Tensor:
        """Return log-probs [L - 1] of a sequence by a model of transformers alone, from its processor's own batch.

        Tokens of `banned` have no probability.
        """
        processor, ids = self.processor._processor, torch.from_numpy(token_ids.astype(np.int64))[None]
        contents: dict[str, list[Any]] = {
            kind: [self.store.get(span.digest) for span in media if span.kind == kind] for kind in MEDIA_KINDS
        }
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if contents["image"]:
            text = SPECIAL["image_token"] * len(contents["image"])
            arguments |= self._call(processor, text, images=contents["image"])
        if contents["audio"]:
            # One by one: padded together, the last frame of a shorter clip would see silence after it.
            clips = [self._call(processor, SPECIAL["audio_token"], audio=[c.samples]) for c in contents["audio"]]
            arguments |= {name: _pad([clip[name] for clip in clips]) for name in clips[0]}
        if contents["video"]:
            videos = [self._call_for_video(processor, video) for video in contents["video"]]
            arguments |= {name: torch.cat([one[name] for one in videos]) for name in videos[0]}
        logits = reference(**arguments).logits[0, :-1]
        logits[:, list(banned)] = -torch.inf
        return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]

    def _call_for_video(self, processor: Any, video: VideoClip) -> dict[str, Any]:
        """Return a video's arguments, with the frames that 2 frames a second choose."""
        count = len(video.frames)
        wanted = min(max(count / video.fps * 2, 4), count) // 2 * 2
        chosen = np.arange(0, count, count / wanted).astype(int)
        fps = video.fps * len(chosen) / count
        return self._call(processor, SPECIAL["video_token"], videos=[video.frames[chosen]], fps=fps)

    def _call(self, processor: Any, text: str, **media: Any) -> dict[str, Any]:
        output = processor(text=[text], return_tensors="pt", add_special_tokens=False, **media)
        return {name: value for name, value in output.items() if name not in ("input_ids", "attention_mask")}


def _pad(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors [1, …, length] of different lengths."""
    longest = max(part.shape[-1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, longest - part.shape[-1])) for part in parts])


def write_full_omni_model(directory: Path, thinker: Path, *, prefix: str = "thinker.") -> Path:
    """Write a checkpoint as it is published: the thinker's weights and configuration among those of speech."""
    shutil.copytree(thinker, directory)
    config = json.loads((directory / "config.json").read_text())
    name = config["model_type"].removesuffix("_thinker")
    speech = "token2wav" if name == "qwen2_5_omni" else "code2wav"
    kind = "Qwen2_5Omni" if name == "qwen2_5_omni" else "Qwen3OmniMoe"
    full = {"architectures": [f"{kind}ForConditionalGeneration"], "model_type": name, "enable_audio_output": True}
    (directory / "config.json").write_text(json.dumps({**full, "dtype": "float32", "thinker_config": config}))
    weights = {f"{prefix}{key}": weight for key, weight in load_file(directory / "model.safetensors").items()}
    weights |= {"talker.model.norm.weight": torch.arange(8.0), f"{speech}.scale": torch.full((3,), 2.0)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
