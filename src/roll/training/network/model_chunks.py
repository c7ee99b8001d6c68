"""A decoder that computes only some of its layers, with the model's own code.

    first part      tokens, embedded ─► own layers ─────────────► hidden states to the next part
    later parts     hidden states of the previous part ─► own layers ─► … to the next part
    last part       … ─► own layers ─► last norm

Layers that are not computed are replaced by modules without weights, which pass hidden states through. The one before a
part's first layer returns the received hidden states, and the one after its last layer stores those for the next part.
Modules of other ranks are replaced permanently. Modules of this rank that the active part does not need are replaced
only during a call. So all of a rank's layers keep their names, and code that divides, shards, saves or counts weights
finds them. A layer that is recomputed for its gradient is called directly, whichever part is active then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from roll.training.parallel.pipeline import PassThrough, Stage
from roll.training.parallel.tokens import TokenShare

__all__ = ["keep_model_chunks"]


@dataclass(slots=True)
class _BoundaryStates:
    """The hidden states that enter and leave a part during a micro-batch's forward pass."""

    received: Tensor | None = None
    passed: Tensor | None = None


_Place: TypeAlias = tuple[nn.Module, str]
"""A module, and the name of one of its direct children."""
_View: TypeAlias = Mapping[_Place, nn.Module | None]
"""The modules at some places."""


def keep_model_chunks(
    root: nn.Module,
    decoder: Any,
    projection: Any,
    heads: Iterable[nn.Module],
    stage: Stage,
    spans: Sequence[range],
    share: TokenShare,
    dtype: torch.dtype,
) -> None:
    """Keep only this rank's parts of a model, in place, and make its decoder compute the active part.

    Args:
        root: The module that contains the whole model.
        decoder: The decoder whose `layers` are divided.
        projection: The projection to the vocabulary, or `None`.
        heads: Other modules of the last part.
        stage: The stage of this rank.
        spans: The layers of each part of the model.
        share: This rank's share of the tokens.
        dtype: The dtype of the hidden states between parts.
    """
    hand, embeddings, layers = _BoundaryStates(), decoder.get_input_embeddings(), decoder.layers
    given = _embedding_stand_in(
        embeddings, hand, stage, is_tied=projection is not None and projection.weight is embeddings.weight
    )
    after = [m for m in decoder.children() if m not in (layers, embeddings) and _has_weights(m)]
    views: list[_View] = []
    for part in stage.chunks:
        instead: list[tuple[nn.Module, nn.Module]] = [(layers, _select_layers(layers, spans[part.number], hand))]
        if not part.is_first:
            instead.append((embeddings, given))
        if not part.is_last:
            instead += [(module, PassThrough(module)) for module in after]
        views.append({place: new for module, new in instead for place in _find_places(decoder, module)})
    if not stage.is_last:
        for module in (*after, *heads, *([] if projection is None else [projection])):
            _replace(root, module, PassThrough(module))
    if not stage.is_first:
        _replace(root, embeddings, given)
    for i, layer in enumerate(layers):
        if not any(i in spans[part.number] for part in stage.chunks):
            layers[i] = PassThrough(layer)
    width = decoder.config.get_text_config().hidden_size
    decoder.forward = _chunk_forward(decoder.forward, stage, views, hand, share, width, dtype)


def _embedding_stand_in(embeddings: nn.Module, hand: _BoundaryStates, stage: Stage, *, is_tied: bool) -> PassThrough:
    """Return a stand-in for embeddings that are not computed here: it returns the received hidden states."""
    stand_in = PassThrough(embeddings)
    if is_tied and stage.is_last:
        stand_in.register_parameter("weight", embeddings.weight)  # type: ignore[arg-type]
    else:
        stand_in.weight = torch.empty(0, device=stage.device)  # some decoders read its device
    stand_in.forward = lambda *unused: hand.received.detach()  # type: ignore[union-attr]
    return stand_in


def _select_layers(layers: nn.ModuleList, own: range, hand: _BoundaryStates) -> nn.ModuleList:
    """Return a part's own layers, with pass-through modules at the positions of all others."""
    chosen = nn.ModuleList(layer if i in own else PassThrough(layer) for i, layer in enumerate(layers))
    if own.start > 0:
        chosen[own.start - 1].forward = lambda *unused, **other: hand.received
    if own.stop < len(layers):
        chosen[own.stop].forward = _storing_forward(hand)
    return chosen


def _storing_forward(hand: _BoundaryStates) -> Callable[..., Tensor]:
    def forward(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hand.passed = states
        return states

    return forward


def _chunk_forward(
    plain: Callable[..., Any],
    stage: Stage,
    views: Sequence[_View],
    hand: _BoundaryStates,
    share: TokenShare,
    width: int,
    dtype: torch.dtype,
) -> Callable[..., Any]:
    """Return a decoder's `forward` that starts from the previous part's hidden states and sends its own to the next
    part.
    """

    def forward(*, input_ids: Tensor, **kwargs: Any) -> Any:
        if not stage.active_chunk.is_first:
            rows = input_ids.shape[1] // (share.tp.size() if share.tp else 1)
            hand.received = stage.recv_states((1, rows, width), dtype)
        try:
            with _with_modules(views[stage.active_index]):
                output = plain(input_ids=input_ids, **kwargs)
            received, passed = hand.received, hand.passed
        finally:
            hand.received = hand.passed = None
        if passed is not None:
            stage.send_states(passed)
            output.last_hidden_state = passed
        if torch.is_grad_enabled():
            stage.save_for_backward(received, passed)
        return output

    return forward


@contextlib.contextmanager
def _with_modules(view: _View) -> Iterator[None]:
    before = {(parent, name): parent._modules[name] for parent, name in view}
    try:
        _set_modules(view)
        yield
    finally:
        _set_modules(before)


def _set_modules(view: _View) -> None:
    for (parent, name), module in view.items():
        parent._modules[name] = module


def _find_places(root: nn.Module, module: nn.Module) -> list[_Place]:
    """Return all places of a module below `root`."""
    return [(parent, name) for parent in root.modules() for name, child in parent._modules.items() if child is module]


def _replace(root: nn.Module, module: nn.Module, new: nn.Module) -> None:
    _set_modules(dict.fromkeys(_find_places(root, module), new))


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
