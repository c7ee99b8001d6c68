"""Finds decoder modules that mix tokens without calling the registered attention.

Linear attention, state-space layers and short convolutions carry their own state from token to token. They are detected
by their behavior: such a child of a decoder layer does not call attention, but its outputs for later tokens change if
the first token changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["find_mixers", "get_decoder", "get_hidden_states"]

_cached_mixers: dict[tuple[str, str], tuple[str, ...]] = {}
"""Cached results of `find_mixers`, by class and configuration of the model."""


def get_decoder(model: Any) -> Any:
    """Return the backbone of an HF causal language model."""
    decoder = model.get_decoder()
    return model.model if decoder is model and hasattr(model, "model") else decoder


def find_mixers(model: Any, run: Callable[[], Any], count_calls: Callable[[], int]) -> dict[str, nn.Module]:
    """Return the modules of a model that mix tokens without attention, by name.

    Args:
        model: An HF causal language model, in evaluation mode.
        run: A function that runs one forward pass over a few tokens.
        count_calls: A function that returns how many times the registered attention has been called.
    """
    key = type(model).__name__, model.config.to_json_string(use_diff=False)
    if key not in _cached_mixers:
        _cached_mixers[key] = _find_mixer_names(model, run, count_calls)
    return {name: model.get_submodule(name) for name in _cached_mixers[key]}


def _find_mixer_names(model: Any, run: Callable[[], Any], count_calls: Callable[[], int]) -> tuple[str, ...]:
    import torch

    layers = getattr(get_decoder(model), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        return ()
    names = {module: name for name, module in model.named_modules()}
    seen: dict[nn.Module, tuple[Any, Any, int]] = {}
    silent: dict[nn.Module, tuple[Any, Any, Any]] = {}

    def store_input(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen[module] = args, kwargs, count_calls()

    def check_output(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # A child that calls attention needs no further check: packed attention keeps sequences apart.
        if seen[module][2] == count_calls():
            silent[module] = args, kwargs, output

    children = [child for layer in layers for child in layer.children()]
    hooks = [c.register_forward_pre_hook(store_input, with_kwargs=True) for c in children]
    hooks += [c.register_forward_hook(check_output, with_kwargs=True) for c in children]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        return tuple(names[m] for m in children if m in silent and _is_mixing(m, *silent[m]))


def _is_mixing(module: Any, args: Any, kwargs: Any, output: Any) -> bool:
    """Return whether changing the first token changes a module's outputs for later tokens."""
    import torch

    hidden = get_hidden_states(args, kwargs)
    out = output[0] if isinstance(output, tuple) else output
    if hidden is None or hidden.ndim != 3 or not isinstance(out, torch.Tensor) or out.shape[:2] != hidden.shape[:2]:
        return False
    other = hidden.clone()
    # Only the first token differs, so later outputs change only if the module carries a state from token to token.
    other[:, 0] = other[:, 0].flip(-1) * 2 + 1
    if args:
        args = (other, *args[1:])
    else:
        kwargs = kwargs | {"hidden_states": other}
    changed, expected = (
        (x[0] if isinstance(x, tuple) else x)[:, 1:].float() for x in (module(*args, **kwargs), output)
    )
    largest = float(expected.abs().max())
    return math.isfinite(largest) and not torch.allclose(changed, expected, rtol=1e-3, atol=1e-3 * largest)


def get_hidden_states(args: Any, kwargs: Any) -> Any:
    """Return a module's input hidden states: the first argument, or `hidden_states`; `None` if both are missing."""
    return args[0] if args else kwargs.get("hidden_states")
