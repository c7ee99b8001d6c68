"""Checks, by running a model, that packed rows give the same results as separate texts.

    four short texts, two of them with a common beginning
        ─ each alone, by the model's own attention  ─► log-probs ┐
        ─ packed                                    ─► log-probs ┴ equal? or what differs

So an unsupported architecture is rejected before training, by its behavior rather than by its name. The texts are
shorter than sliding windows, and a configuration is checked only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.errors import ModelError
from roll.models import decoder_of, find_mixers
from roll.training.attention.mixers import mix_by_path
from roll.training.attention.packed import ATTENTION, AttentionPlan
from roll.training.packing.layout import PackedLayout, build_layout
from roll.training.packing.micro_batches import pack
from roll.types import TrainingSample

__all__ = ["check_packing", "check_stages", "make_packable"]

_passed: set[tuple[str, str, torch.dtype]] = set()

Logits = Callable[[Any, PackedLayout], tuple[Tensor, Tensor]]
"""A function from a model and a row to final hidden states [M, H] and logits [M, V] at its predictions."""


def make_packable(model: Any) -> None:
    """Prepare a freshly loaded model for packed rows. Call it once, before adapters.

    Recurrent layers start with an empty state for every text. Routers run without their training noise: log-probs must
    be those of the policy that sampled.
    """
    for module in model.modules():
        for name in ("jitter_noise", "input_jitter_noise"):
            if hasattr(module, name):
                setattr(module, name, 0.0)
        if type(module).__name__.endswith(("Router", "Gate")):
            module.eval()
            module.train = lambda mode=True, module=module: module
    if not hasattr(model, "get_decoder") or _is_without_data(model):
        return
    layout = _layout([_text(0, 8)], share=False)
    plan = AttentionPlan(layout, model.device, model.dtype)
    ids, positions = (torch.from_numpy(x).to(model.device)[None] for x in (layout.token_ids, layout.position_ids))

    def run() -> None:
        decoder_of(model)(input_ids=ids, position_ids=positions, use_cache=False, roll_plan=plan)

    try:
        mixers = find_mixers(model, run, lambda: plan.num_calls)
    except ModelError:
        raise
    except Exception as error:  # unsupported models fail in their own ways
        raise ModelError(
            f"{type(model).__name__} cannot be trained: it does not run with the trainer's packed attention "
            f"({type(error).__name__}: {error})"
        ) from error
    if mixers:
        mix_by_path(model, mixers.values())


def _is_without_data(model: Any) -> bool:
    """Return whether the model has no weights to try it with.

    Where layers get their weights only while they run, the embeddings have theirs all the time, so they decide.
    """
    if hasattr(model, "get_input_embeddings"):
        return model.get_input_embeddings().weight.is_meta
    return any(parameter.is_meta for parameter in model.parameters())


def check_packing(model: Any, logits: Logits) -> None:
    """Compare packed with separate computation of a few short texts.

    Args:
        model: A prepared model with the attention `roll_packed`.
        logits: The trainer's function that computes hidden states and logits.

    Raises:
        ModelError: packed texts give other results than separate ones.
    """
    key = type(model).__name__, model.config.to_json_string(use_diff=False), model.dtype
    if key in _passed or _is_without_data(model):
        return
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            reason = _difference(model, logits)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"it does not run with packed texts ({type(error).__name__}: {error})"
    finally:
        model.set_attn_implementation(ATTENTION)
        model.train(was_training)
    if reason:
        raise ModelError(f"{type(model).__name__} cannot be trained: {reason}")
    _passed.add(key)


@torch.no_grad()
def check_stages(decoder: Any, starts: Iterable[int]) -> None:
    """Check that a decoder can be cut before each of some layers: only hidden states may pass from layer to layer.

    From the cut on, one text is computed with the hidden states of another. The output must be that of the other text.

    Raises:
        ModelError: the outputs differ.
    """
    layout = _layout([_text(0, 8)], share=False)
    parameter = next(decoder.parameters())

    plan = AttentionPlan(layout, parameter.device, parameter.dtype)
    positions = torch.from_numpy(layout.position_ids).to(parameter.device)[None]

    def run(seed: int, start: int, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the hidden states at the input of layer `start` and those after the decoder; `given` replaces the
        former.
        """
        seen: list[Tensor] = []

        def before(layer: Any, args: Any) -> Any:
            seen.append(args[0])
            return None if given is None else (given, *args[1:])

        def after(layer: Any, args: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                raise ModelError(
                    f"{type(decoder).__name__} cannot be split into pipeline stages: its layers return more than "
                    "hidden states; set training.parallel.pp to 1"
                )

        layer = decoder.layers[start]
        hooks = [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
        ids = torch.from_numpy(_text(seed, 8)[: layout.num_tokens]).to(parameter.device)[None]
        try:
            output = decoder(input_ids=ids, position_ids=positions, use_cache=False, roll_plan=plan)
        finally:
            for hook in hooks:
                hook.remove()
        return seen[0], output.last_hidden_state

    was_training = decoder.training
    decoder.eval()
    for start in starts:
        states, expected = run(0, start, None)
        if not torch.equal(run(1, start, states)[1], expected):
            raise ModelError(
                f"{type(decoder).__name__} cannot be split into pipeline stages: layer {start} or a later one needs "
                "more of the layers before it than hidden states; set training.parallel.pp to 1"
            )
    decoder.train(was_training)


def _difference(model: Any, logits: Logits) -> str:
    """Return a description of the first difference found; empty if there is no difference."""
    one, other = _text(0, 9), _text(1, 7)
    branch = np.concatenate([one[:6], _text(2, 4)])
    alone = {len(text): text for text in (one, other, branch)}
    model.set_attn_implementation("eager")
    expected: dict[int, tuple[Tensor, Tensor]] = {}
    for length, text in alone.items():
        ids = torch.from_numpy(text).to(model.device)[None]
        hidden = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        expected[length] = hidden, model(input_ids=ids, use_cache=False).logits[0, :-1]
    if not all(bool(torch.isfinite(part).all()) for parts in expected.values() for part in parts):
        return "its logits are not finite: look for NaN and infinity in its weights, and for sizes in its config.json"
    model.set_attn_implementation(ATTENTION)
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.2

    def differs(texts: list[np.ndarray], share: bool, part: int) -> bool:
        layout = _layout(texts, share=share)
        found = logits(model, layout)[part]
        for span in layout.spans:
            own = found[torch.from_numpy(span.prediction_index)].float()
            wanted = expected[len(texts[span.index])][part].float()
            apart = (own - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            if not float(apart.median()) <= tolerance:  # rounding may change the experts of a few tokens
                return True
        return False

    if differs([one], False, 0):
        return (
            "its attention, or a module next to it, needs features that the trainer's packed attention does not support"
        )
    if differs([one], False, 1):
        return "its logits are changed after the vocabulary projection in a way that the trainer does not know"
    if differs([other, one], False, 1):
        return "something passes from one text of a packed row to the next: a state, or positions counted along the row"
    if differs([other, one, branch], True, 1):
        return "texts that share a prefix do not get the log-probs that they have alone"
    return ""


def _text(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 250, length)


def _layout(texts: list[np.ndarray], *, share: bool) -> PackedLayout:
    samples = [
        TrainingSample(
            sample_id=str(i),
            unit=0,
            prefix_length=6 if len(text) > 6 else 1,
            token_ids=text.astype(np.int32),
            loss_mask=np.arange(len(text)) > 0,
            advantages=np.zeros(len(text), dtype=np.float32),
        )
        for i, text in enumerate(texts)
    ]
    ((blocks,),) = pack(samples, max_tokens=1000, share_prefix=share, every_token=True)
    return build_layout(blocks, every_token=True)
