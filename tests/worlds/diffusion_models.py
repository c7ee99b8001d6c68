"""Small diffusion models for tests: one of our own, and pipeline directories of diffusers with random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roll.config.diffusion import DiffusionModelConfig, DiffusionTrainingConfig
from roll.diffusion.models import Conditions, DiffusionModel
from roll.training import TrainerSpec


class SmallDenoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3, 8)
        self.blocks = nn.ModuleList([nn.Linear(8 + 1 + 4, 16), nn.Linear(16, 4)])

    def forward(self, latents: Tensor, sigma: Tensor, word: Tensor) -> Tensor:
        hidden = torch.cat([latents.flatten(1), sigma[:, None].to(latents), self.words(word)], dim=1)
        return self.blocks[1](torch.tanh(self.blocks[0](hidden))).reshape(latents.shape)


class SmallModel(DiffusionModel):
    """Images of 2 x 2 gray pixels; the prompt is its number of letters."""

    latent_shape = (1, 2, 2)

    def __init__(self) -> None:
        self.denoiser = SmallDenoiser()

    def encode_prompts(self, prompts: Sequence[str]) -> Conditions:
        return {"word": torch.tensor([len(prompt) for prompt in prompts], device=self.device)}

    def predict(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        return self.denoiser(latents, sigma, conditions["word"])

    def encode_images(self, images: Any) -> Tensor:
        return torch.from_numpy(np.array(images))[..., :1].movedim(-1, 1).float() / 127.5 - 1


def reward_of_brightness(images: Tensor, prompts: list[str]) -> Tensor:
    """A differentiable reward: the mean of all pixels but those at the border of [0, 1]."""
    return images.mean(dim=tuple(range(1, images.ndim)))


def make_spec(path: str = "", *, lora: Any = None, holds_reference: bool = True, **settings: Any) -> TrainerSpec:
    """Return the spec of a trainer on the CPU."""
    names = ("height", "width", "num_frames", "max_prompt_tokens")
    sizes = {name: settings.pop(name) for name in names if name in settings}
    path = path or f"{Path(__file__)}:SmallModel"
    training = DiffusionTrainingConfig(num_steps=10, learning_rate=0.01, num_threads=1, **settings)
    return TrainerSpec(
        model_path=path,
        model=DiffusionModelConfig(path=path, lora=lora, **sizes),
        training=training,
        holds_reference=holds_reference,
        device="cpu",
    )


VOCABULARY = ["<|startoftext|>", "<|endoftext|>", *"abcdefghij", *(f"{letter}</w>" for letter in "abcdefghij")]


def write_clip(directory: Path, *, projects: bool) -> tuple[Any, Any]:
    """Return a text encoder of CLIP with random weights, and a tokenizer of ten letters."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(VOCABULARY)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(directory / "vocab.json"), str(directory / "merges.txt"), model_max_length=8)
    config = CLIPTextConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        projection_dim=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return (CLIPTextModelWithProjection if projects else CLIPTextModel)(config), tokenizer


def write_t5(vocabulary: int = 32) -> tuple[Any, Any]:
    """Return an encoder of T5 with random weights, and a tokenizer of ten letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{letter: 3 + i for i, letter in enumerate("abcdefghij")}}
    base = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    base.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    config = T5Config(vocab_size=vocabulary, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return T5EncoderModel(config), tokenizer


def write_pipeline(family: str, directory: Path) -> Path:
    """Write a pipeline directory with random weights: `sd3`, `flux` or `wan`."""
    torch.manual_seed(0)
    build = {"sd3": _build_sd3, "flux": _build_flux, "wan": _build_wan}[family]
    build(directory).save_pretrained(directory / family)
    return directory / family


def _build_vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1,
        scaling_factor=1.5,
    )


def _build_sd3(directory: Path) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    (one, first), (two, second) = (write_clip(directory / f"clip{i}", projects=True) for i in (1, 2))
    denoiser = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
    )
    return StableDiffusion3Pipeline(
        transformer=denoiser,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_build_vae(),
        text_encoder=one,
        tokenizer=first,
        text_encoder_2=two,
        tokenizer_2=second,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def _build_flux(directory: Path) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    one, first = write_clip(directory / "clip", projects=False)
    two, second = write_t5()
    denoiser = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(2, 2, 4),
    )
    return FluxPipeline(
        transformer=denoiser,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_build_vae(),
        text_encoder=one,
        tokenizer=first,
        text_encoder_2=two,
        tokenizer_2=second,
    )


def _build_wan(directory: Path) -> Any:
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    encoder, tokenizer = write_t5()
    denoiser = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=16,
        freq_dim=16,
        ffn_dim=16,
        num_layers=2,
        rope_max_seq_len=16,
    )
    vae = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return WanPipeline(
        transformer=denoiser,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
    )
