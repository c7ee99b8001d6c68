"""A vision tower of 4 layers × 128 and its projector, pretrained in plain torch without the language model.

    train_…   the tower classifies what images show
    align_…   the projector maps image tokens to the embeddings of the words that describe them, in the language model

The second phase is what makes the fine-tuning short. With a random projector, features are several times as large as
embeddings of text, and thirty steps of fine-tuning taught the language model only the colors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _screen_data import NUM_ROWS, draw_labeled_screens
from _vision_data import COLORS, COUNTS, SHAPES, SIZE, draw_scene
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from roll.envs.worlds.screen import COLORS as SCREEN_COLORS
from roll.envs.worlds.screen import SHAPES as SCREEN_SHAPES
from roll.models import load_causal_lm, load_tokenizer

LANGUAGE_MODEL = "smollm2-135m-instruct"
TOWER: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 8,
}
"""The configuration of the tower, in the keys of `SmolVLMVisionConfig`."""
WIDTH = 576
"""The hidden size of the language model."""
NUM_IMAGES = 8000
"""Number of images that tower and projector are trained on."""


def build_encoder(scale_factor: int, seed: int) -> Any:
    """Build a tower (`vision_model`) and a projector (`connector`) with random weights."""
    import transformers as hf

    torch.manual_seed(seed)
    text = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": WIDTH, "intermediate_size": 8}
    text |= {"vocab_size": 8, "num_attention_heads": 1}
    model = hf.SmolVLMModel(hf.SmolVLMConfig(vision_config=TOWER, text_config=text, scale_factor=scale_factor))
    nn.init.normal_(model.connector.modality_projection.proj.weight, std=0.003)  # features as large as embeddings
    return nn.ModuleDict({"vision_model": model.vision_model, "connector": model.connector})


def train_tower(path: Path, seconds: float, seed: int = 0) -> dict[str, float]:
    """Train a tower to classify color, shape and count from its mean state; return the accuracies on new images.

    Args:
        path: The file of the tower's weights, which is written.
        seconds: CPU time.
        seed: Seed of the weights and of the order of images.
    """
    tower = build_encoder(1, seed)["vision_model"]
    heads = nn.ModuleDict({name: nn.Linear(TOWER["hidden_size"], len(values)) for name, values in _CLASSES.items()})

    def logits(pixels: Tensor) -> dict[str, Tensor]:
        states = tower(pixel_values=normalize(pixels)).last_hidden_state.mean(1)
        return {name: head(states) for name, head in heads.items()}

    accuracies = _fit_classes([tower, heads], logits, seconds, seed)
    save_file(tower.state_dict(), path)
    return accuracies


def align_tower(path: Path, tower: Path, scale_factor: int, seconds: float, seed: int = 0) -> dict[str, float]:
    """Train tower and projector so that an image's mean feature has the largest products with the right words.

    Args:
        path: The file of the weights of tower and projector, which is written.
        tower: The file of `train_tower`.
        scale_factor: See `build_vision_model`.
        seconds: CPU time.
        seed: Seed of the weights and of the order of images.

    Returns:
        The accuracies of the words with the largest products, on new images.
    """
    encoder = build_encoder(scale_factor, seed)
    encoder["vision_model"].load_state_dict(load_file(tower))
    words = {name: _embed_words([str(value) for value in values]) for name, values in _CLASSES.items()}

    def logits(pixels: Tensor) -> dict[str, Tensor]:
        features = encode(encoder, pixels).mean(1)
        return {name: features @ embeddings.T for name, embeddings in words.items()}

    accuracies = _fit_classes([encoder], logits, seconds, seed)
    save_file(encoder.state_dict(), path)
    return accuracies


def train_screen_tower(path: Path, seconds: float, seed: int = 0) -> dict[str, float]:
    """Train a tower to tell the widget at each patch of a screen; return the accuracies on new screens.

    Args:
        path: The file of the tower's weights, which is written.
        seconds: CPU time.
        seed: Seed of the weights and of the order of screens.
    """
    tower = build_encoder(1, seed)["vision_model"]
    num_colors, num_shapes = len(SCREEN_COLORS), len(SCREEN_SHAPES)
    head = nn.Linear(TOWER["hidden_size"], num_colors + 1 + num_shapes + 1)

    def logits(pixels: Tensor) -> tuple[Tensor, Tensor]:
        found = head(tower(pixel_values=normalize(pixels)).last_hidden_state)
        return found[..., : num_colors + 1], found[..., num_colors + 1 :]

    images, colors, shapes = map(torch.from_numpy, draw_labeled_screens(_TRAIN, TOWER["patch_size"])[:3])

    def loss(rng: np.random.Generator) -> Tensor:
        chosen = torch.from_numpy(rng.integers(0, NUM_IMAGES, 32))
        color, shape = logits(images[chosen])
        return nn.functional.cross_entropy(color.flatten(0, 1), colors[chosen].flatten()) + (
            nn.functional.cross_entropy(shape.flatten(0, 1), shapes[chosen].flatten())
        )

    fit([tower, head], loss, seconds, seed)
    save_file(tower.state_dict(), path)
    images, colors, shapes = map(torch.from_numpy, draw_labeled_screens(range(256), TOWER["patch_size"])[:3])
    with torch.no_grad():
        color, shape = logits(images)
    covered = colors < num_colors
    return {
        "color": float((color.argmax(-1) == colors)[covered].float().mean()),
        "shape": float((shape.argmax(-1) == shapes)[covered].float().mean()),
        "background": float((color.argmax(-1) == colors)[~covered].float().mean()),
    }


def align_screen_tower(path: Path, tower: Path, scale_factor: int, seconds: float, seed: int = 0) -> dict[str, float]:
    """Train tower and projector so that the image tokens are the embeddings of a caption of the screen.

    The language model then reads a screen as it reads a text of four lines, ` red circle0\\n blue square1\\n…`. A row
    of the screen has four tokens. Each is one word of its line, wherever in the row the widget is: the layers of the
    tower attend to the whole screen.

    Args:
        path: The file of the weights of tower and projector, which is written.
        tower: The file of `train_screen_tower`.
        scale_factor: See `build_vision_model`.
        seconds: CPU time.
        seed: Seed of the weights and of the order of screens.

    Returns:
        The share of tokens of new screens whose nearest word is the right one, and the mean distance from the right
        embedding as a fraction of its norm.
    """
    encoder = build_encoder(scale_factor, seed)
    encoder["vision_model"].load_state_dict(load_file(tower))
    words = [f" {word}" for word in (*SCREEN_COLORS, *SCREEN_SHAPES)]
    words += [*map(str, range(NUM_ROWS)), "\n"]
    embeddings = _embed_words(words)

    def load(seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return pixels, and the index of the word of each token."""
        screens = draw_labeled_screens(seeds, TOWER["patch_size"])
        right = [[words.index(word) for word in caption] for caption in screens.captions]
        return torch.from_numpy(screens.pixels), torch.tensor(right)

    images, right = load(_TRAIN)

    def loss(rng: np.random.Generator) -> Tensor:
        chosen = torch.from_numpy(rng.integers(0, NUM_IMAGES, 32))
        features = encode(encoder, images[chosen])
        distances = torch.cdist(features.flatten(0, 1), embeddings).square()
        label = right[chosen].flatten()
        # The distance alone begins with long steps towards the mean of all words.
        return nn.functional.cross_entropy(-distances, label) + distances.gather(1, label[:, None]).mean()

    fit([encoder], loss, seconds, seed)
    save_file(encoder.state_dict(), path)
    images, right = load(range(256))
    with torch.no_grad():
        distances = torch.cdist(encode(encoder, images).flatten(0, 1), embeddings)
    label = right.flatten()
    own = distances.gather(1, label[:, None])[:, 0] / embeddings[label].norm(dim=-1)
    return {"words": float((distances.argmin(-1) == label).float().mean()), "distance": float(own.mean())}


def encode(encoder: Any, pixels: Tensor) -> Tensor:
    """Return the features [images, tokens, WIDTH] of pixels [images, 3, height, width] from 0 to 255."""
    return encoder["connector"](encoder["vision_model"](pixel_values=normalize(pixels)).last_hidden_state)


def normalize(pixels: Tensor) -> Tensor:
    """Return pixels 0 … 255 as SmolVLM's processor scales them, -1 … 1."""
    return pixels.float() / 127.5 - 1.0


def fit(modules: list[Any], loss: Callable[[np.random.Generator], Tensor], seconds: float, seed: int) -> None:
    """Minimize a loss for some seconds of CPU time, with a learning rate that rises and then falls linearly."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)
    rng = np.random.default_rng(seed)
    began = time.process_time()
    for module in modules:
        module.train()
    while (spent := time.process_time() - began) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, 20 * spent / seconds, 2 * (1 - spent / seconds) + 0.02)
        value = loss(rng)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    for module in modules:
        module.eval()


_TRAIN = range(10**6, 10**6 + NUM_IMAGES)
_CLASSES: dict[str, list[Any]] = {"color": list(COLORS), "shape": list(SHAPES), "count": list(COUNTS)}


def _fit_classes(
    modules: list[Any], logits: Callable[[Tensor], dict[str, Tensor]], seconds: float, seed: int
) -> dict[str, float]:
    """Fit modules to the classes of scenes; return the accuracies on new images."""
    images, labels = _load_scenes(_TRAIN)

    def loss(rng: np.random.Generator) -> Tensor:
        chosen = torch.from_numpy(rng.integers(0, NUM_IMAGES, 64))
        pixels = images[chosen].roll(tuple(int(v) for v in rng.integers(-3, 4, 2)), (2, 3))  # shapes stay whole mostly
        if rng.random() < 0.5:
            pixels = pixels.flip(3)
        found = logits(pixels)
        return torch.stack([nn.functional.cross_entropy(found[name], labels[name][chosen]) for name in found]).sum()

    fit(modules, loss, seconds, seed)
    images, labels = _load_scenes(range(512))
    with torch.no_grad():
        found = logits(images)
    return {name: float((found[name].argmax(-1) == labels[name]).float().mean()) for name in found}


def _load_scenes(seeds: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    drawn = [draw_scene(int(s), noise=float(s % 3) * 12) for s in seeds]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image, _ in drawn])).permute(0, 3, 1, 2)
    labels = {
        name: torch.tensor([values.index(getattr(scene, name)) for _, scene in drawn])
        for name, values in _CLASSES.items()
    }
    return pixels, labels


def _embed_words(words: Sequence[str]) -> Tensor:
    """Return the language model's embeddings [words, WIDTH] of the first token of each word."""
    tokenizer = load_tokenizer(LANGUAGE_MODEL)
    model: Any = load_causal_lm(LANGUAGE_MODEL, "float32")
    chosen = [tokenizer(word)["input_ids"][0] for word in words]
    return model.get_input_embeddings().weight.detach()[chosen].clone()
