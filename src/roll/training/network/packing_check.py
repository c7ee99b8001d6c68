"""Check that packed rows give the same results as separate sequences, by running the model.

    three short sequences, two of them with a common prefix
        ─ each alone, by the model's own attention  ─► log-probs ┐
        ─ packed ─► log-probs ┴ equal? if not, which part differs

Therefore an unsupported architecture is rejected before training, based on its outputs and not on its name. The
sequences are shorter than sliding windows, and a configuration is checked only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.errors import ModelError
from roll.models import find_mixers, get_decoder, set_attention
from roll.training.attention.mixers import run_mixers_by_path
from roll.training.attention.packed import ATTENTION_NAME
from roll.training.attention.plan import build_plan
from roll.training.packing.layout import PackedLayout, build_layout
from roll.training.packing.micro_batches import pack
from roll.types import TrainingSample

__all__ = ["check_packing", "check_stages", "make_packable"]

_passed_checks: set[tuple[str, str, torch.dtype]] = set()

Logits = Callable[[Any, PackedLayout], tuple[Tensor, Tensor]]
"""A function from a model and a row to final hidden states [M, H] and logits [M, V] at its predictions."""


def make_packable(model: Any) -> None:
    """Prepare a freshly loaded model for packed rows. Call it once, before adding adapters.

    Recurrent layers start with an empty state for every sequence. Routers run without training noise, so that log-probs
    match those of the sampling policy.
    """
    for module in model.modules():
        for name in ("jitter_noise", "input_jitter_noise"):
            if hasattr(module, name):
                setattr(module, name, 0.0)
        if type(module).__name__.endswith(("Router", "Gate")):
            module.eval()
            # `train()` of the whole model would switch the noise on again.
            module.train = lambda mode=True, module=module: module
    if not hasattr(model, "get_decoder") or _is_on_meta(model):
        return
    layout = _pack_into_layout([_generate_tokens(0, 8)], share=False)
    plan = build_plan(layout, model.device, model.dtype)
    ids, positions = (torch.from_numpy(x).to(model.device)[None] for x in (layout.token_ids, layout.position_ids))

    def run() -> None:
        get_decoder(model)(input_ids=ids, position_ids=positions, use_cache=False, roll_plan=plan)

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
        run_mixers_by_path(model, mixers.values())


def _is_on_meta(model: Any) -> bool:
    """Return whether the model's weights are on the meta device, so that the model cannot run.

    The embeddings are checked, because layers may get their weights only while they run.
    """
    if hasattr(model, "get_input_embeddings"):
        return model.get_input_embeddings().weight.is_meta
    return any(parameter.is_meta for parameter in model.parameters())


def check_packing(model: Any, compute_logits: Logits) -> None:
    """Check that a few short sequences give the same results in a packed row as in separate rows.

    Args:
        model: A prepared model with the attention `roll_packed`.
        compute_logits: The trainer's function that computes hidden states and logits.

    Raises:
        ModelError: The results differ, or the model does not run with packed sequences.
    """
    key = type(model).__name__, model.config.to_json_string(use_diff=False), model.dtype
    if key in _passed_checks or _is_on_meta(model):
        return
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            reason = _find_difference(model, compute_logits)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"it does not run with packed sequences ({type(error).__name__}: {error})"
    finally:
        set_attention(model, ATTENTION_NAME)
        model.train(was_training)
    if reason:
        raise ModelError(f"{type(model).__name__} cannot be trained: {reason}")
    _passed_checks.add(key)


@torch.no_grad()
def check_stages(decoder: Any, starts: Iterable[int]) -> None:
    """Check that a decoder can be split before each layer in `starts`: only hidden states may pass from layer to layer.

    For each of these layers, the decoder runs on a second sequence, but the layer's input is replaced by its input for
    the first sequence. The output must then equal the output for the first sequence.

    Raises:
        ModelError: The outputs differ.
    """
    layout = _pack_into_layout([_generate_tokens(0, 8)], share=False)
    parameter = next(decoder.parameters())

    plan = build_plan(layout, parameter.device, parameter.dtype)
    positions = torch.from_numpy(layout.position_ids).to(parameter.device)[None]

    def run(seed: int, start: int, layer_input: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the decoder on the sequence of `seed`, with `layer_input` (if given) as the input of layer `start`.

        Return the original input of that layer, and the hidden states after the decoder.
        """
        seen: list[Tensor] = []

        def before(layer: Any, args: Any) -> Any:
            seen.append(args[0])
            return None if layer_input is None else (layer_input, *args[1:])

        def after(layer: Any, args: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                raise ModelError(
                    f"{type(decoder).__name__} cannot be split into pipeline stages: its layers return more than "
                    "hidden states; set training.parallel.pp to 1"
                )

        layer = decoder.layers[start]
        hooks = [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
        ids = torch.from_numpy(_generate_tokens(seed, 8)[: layout.num_tokens]).to(parameter.device)[None]
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
                f"{type(decoder).__name__} cannot be split into pipeline stages: layer {start} or a later layer "
                "requires more than hidden states from earlier layers; set training.parallel.pp to 1"
            )
    decoder.train(was_training)


def _find_difference(model: Any, compute_logits: Logits) -> str:
    """Describe the first difference between packed and separate sequences; return an empty string if there is none."""
    one, other = _generate_tokens(0, 9), _generate_tokens(1, 7)
    branch = np.concatenate([one[:6], _generate_tokens(2, 4)])
    alone = {len(sequence): sequence for sequence in (one, other, branch)}
    set_attention(model, "eager")
    expected: dict[int, tuple[Tensor, Tensor]] = {}
    for length, sequence in alone.items():
        ids = torch.from_numpy(sequence).to(model.device)[None]
        hidden = get_decoder(model)(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        expected[length] = hidden, model(input_ids=ids, use_cache=False).logits[0, :-1]
    if not all(bool(torch.isfinite(part).all()) for parts in expected.values() for part in parts):
        return (
            "its logits are not finite: look for NaN or infinity in its weights, and for wrong sizes in its config.json"
        )
    set_attention(model, ATTENTION_NAME)
    # A wrong mask or position changes hidden states far more than bfloat16 rounding does.
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.2

    def has_different_logprobs(sequences: list[np.ndarray], share: bool, part: int) -> bool:
        layout = _pack_into_layout(sequences, share=share)
        computed = compute_logits(model, layout)[part]
        for span in layout.spans:
            packed = computed[torch.from_numpy(span.prediction_index)].float()
            wanted = expected[len(sequences[span.index])][part].float()
            apart = (packed - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            if not float(apart.median()) <= tolerance:  # rounding may change the experts of a few tokens
                return True
        return False

    if has_different_logprobs([one], False, 0):
        return (
            "its attention, or a module next to it, needs features that the trainer's packed attention does not support"
        )
    if has_different_logprobs([one], False, 1):
        return "its logits are changed after the vocabulary projection in a way that the trainer does not support"
    if has_different_logprobs([other, one], False, 1):
        return "a packed sequence depends on the one before it, through a state or positions counted along the row"
    if has_different_logprobs([other, one, branch], True, 1):
        return "sequences that share a prefix get different log-probs than separate sequences"
    return ""


def _generate_tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 250, length)


def _pack_into_layout(sequences: list[np.ndarray], *, share: bool) -> PackedLayout:
    samples = [
        TrainingSample(
            sample_id=str(i),
            unit=0,
            prefix_length=6 if len(sequence) > 6 else 1,
            token_ids=sequence.astype(np.int32),
            loss_mask=np.arange(len(sequence)) > 0,
            advantages=np.zeros(len(sequence), dtype=np.float32),
        )
        for i, sequence in enumerate(sequences)
    ]
    ((blocks,),) = pack(samples, max_tokens=1000, share_prefix=share, every_token=True)
    return build_layout(blocks, every_token=True)
