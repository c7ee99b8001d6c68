"""Checks that ROLL computes the same hidden states for a sequence with media as the model's original forward pass, by
running both.

    text, a small image, text (and audio and video, if the model reads them)
        ─ the model's original forward pass with the processor's output  ─► hidden states ┐
        ─ features inserted by span, attention of a trainer or an engine ─► hidden states ┴ equal?

In some model families (Gemma 3), the tokens of an image attend to each other in both directions. The check detects this
behavior, so ROLL needs no list of such families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from roll.errors import ModelError
from roll.models.loading import set_attention
from roll.models.multimodal.inputs import BLANK_DIGESTS, MediaInputs
from roll.models.multimodal.model_media import ModelMedia
from roll.types import IntArray, MediaSpan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HiddenStates", "check_media"]

HiddenStates: TypeAlias = "Callable[[IntArray, Sequence[MediaSpan]], Tensor]"
"""A function that takes tokens [L] and their media spans, and returns hidden states [L - 1, H] after the last norm."""

_cached_results: dict[tuple[str, str, str, str], bool] = {}
"""Cached results: whether image tokens attend in both directions, by the model's class, configuration, dtype and
attention."""


def check_media(model: Any, media: ModelMedia, attention: str, run: HiddenStates) -> None:
    """Check a model's hidden states for a sequence with each type of media, and set `media.is_bidirectional`.

    Args:
        model: The model, with the attention `attention`.
        media: The media of the model.
        attention: The name of the model's attention, which is restored after the check.
        run: Computes the hidden states to check; see `HiddenStates`.

    Raises:
        ModelError: The hidden states differ from those of the model's original forward pass.
    """
    import torch

    if next(model.parameters()).is_meta:
        return
    key = type(model).__name__, model.config.to_json_string(use_diff=False), str(model.dtype), attention
    if key not in _cached_results:
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                _cached_results[key] = _detect_bidirectional(model, media, attention, run)
        except (TypeError, ValueError, AttributeError, RuntimeError, KeyError, IndexError) as error:
            raise ModelError(
                f"{type(model).__name__} cannot be used with media: a check failed with {type(error).__name__}: {error}"
            ) from error
        finally:
            set_attention(model, attention)
            model.train(was_training)
    media.is_bidirectional = _cached_results[key]


def _detect_bidirectional(model: Any, media: ModelMedia, attention: str, run: HiddenStates) -> bool:
    import torch

    tokens, spans, arguments = _build_example(media.inputs)
    set_attention(model, "eager")
    own = model(**{name: value.to(model.device) for name, value in arguments.items()}, output_hidden_states=True)
    expected = own.hidden_states[-1][0, :-1].float()
    set_attention(model, attention)
    differences: dict[bool, float] = {}
    for bidirectional in (False, True):
        media.is_bidirectional = bidirectional
        found = run(tokens, spans).float()
        ratios = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        if model.dtype in (torch.float32, torch.float64):
            tolerance, differences[bidirectional] = 1e-3, float(ratios.max())
        else:
            # Rounding alone changed one token of a fine-tuned SmolVLM by 0.22, and the others by 0.02; attention in the
            # wrong directions changed all tokens from the image on, by 0.16 on average.
            tolerance, differences[bidirectional] = 0.1, float(ratios.mean())
        if differences[bidirectional] <= tolerance / 2:
            return bidirectional
    best = min(differences, key=differences.__getitem__)
    if differences[best] > tolerance:
        raise ModelError(
            f"{type(model).__name__} cannot be used with media: its hidden states differ from those of the model's own "
            f"forward pass by {differences[best]:.2g} of their norm"
        )
    return best


def _build_example(inputs: MediaInputs) -> tuple[IntArray, tuple[MediaSpan, ...], dict[str, Tensor]]:
    """Return tokens with one medium of each type, their spans, and the arguments of the model's original forward
    pass."""
    import torch

    parts, spans, arguments, names = [np.arange(10, 14, dtype=np.int32)], [], {}, set()
    for number, kind in enumerate(inputs.processor.kinds):
        processed, around = inputs.get_blank(kind), inputs.processor.get_delimiters(kind)
        before, after = ([], []) if around is None else ([around[0]], [around[1]])
        start = sum(map(len, parts)) + len(before)
        end = start + len(processed.token_ids)
        text = np.arange(20 + 10 * number, 26 + 10 * number, dtype=np.int32)
        parts += [np.array(before, np.int32), processed.token_ids, np.array(after, np.int32), text]
        spans.append(MediaSpan(kind=kind, digest=BLANK_DIGESTS[kind], start=start, end=end, grid=processed.grid))
        arguments |= processed.inputs
        names |= {*processed.token_type_arguments}
        if processed.seconds_per_grid is not None:
            arguments["video_second_per_grid"] = torch.tensor([processed.seconds_per_grid])
    tokens = np.concatenate(parts)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    kinds = torch.zeros_like(ids)
    for span in spans:
        kinds[0, span.start : span.end] = (
            ids[0, span.start : span.end] == inputs.processor.feature_ids[span.kind]
        ).long()
    arguments |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | dict.fromkeys(names, kinds)
    return tokens, tuple(spans), arguments
