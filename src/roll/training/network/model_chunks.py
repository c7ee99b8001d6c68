"""Model chunks of a pipeline stage: a decoder that computes only some of its layers, with the model's own code.

    first chunk     tokens, embedded ─► own layers ─────────────► hidden states to the next chunk
    later chunks    hidden states of the previous chunk ─► own layers ─► … to the next chunk
    last chunk      … ─► own layers ─► last norm

Layers that are not computed are replaced by modules without weights, which pass hidden states through. The module
before a chunk's first layer returns the received hidden states, and the module after its last layer stores the hidden
states for the next chunk. Modules of other ranks are replaced permanently. Modules of this rank that the active chunk
does not need are replaced only during a call. So all layers of a rank keep their names, and code that shards, saves or
counts weights finds them. A layer that is recomputed for its gradient is called directly, regardless of the active
chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from roll.training.parallel.pipeline import PassThrough, Stage
from roll.training.parallel.tokens import TokenShard

__all__ = ["keep_model_chunks"]


@dataclass(slots=True)
class _BoundaryStates:
    """The hidden states that enter and leave a chunk during a micro-batch's forward pass."""

    received: Tensor | None = None
    sent: Tensor | None = None


_ChildSlot: TypeAlias = tuple[nn.Module, str]
"""A module, and the name of one of its direct children."""
_Replacements: TypeAlias = Mapping[_ChildSlot, nn.Module | None]
"""The modules that replace others, by slot."""


def keep_model_chunks(
    root: nn.Module,
    decoder: Any,
    projection: Any,
    heads: Iterable[nn.Module],
    stage: Stage,
    spans: Sequence[range],
    token_shard: TokenShard,
    dtype: torch.dtype,
) -> None:
    """Keep only this rank's chunks of a model, in place, and make its decoder compute the active chunk.

    Args:
        root: The module that contains the whole model.
        decoder: The decoder whose `layers` are split into chunks.
        projection: The projection to the vocabulary, or `None`.
        heads: Other modules of the last chunk.
        stage: The stage of this rank.
        spans: The layers of each chunk of the model.
        token_shard: This rank's share of the tokens.
        dtype: The dtype of the hidden states between chunks.
    """
    boundary, embeddings, layers = _BoundaryStates(), decoder.get_input_embeddings(), decoder.layers
    given = _build_embedding_stand_in(
        embeddings, boundary, stage, is_tied=projection is not None and projection.weight is embeddings.weight
    )
    # Modules without weights, such as rotary embeddings, run in every chunk.
    after = [m for m in decoder.children() if m not in (layers, embeddings) and _has_weights(m)]
    views: list[_Replacements] = []
    for chunk in stage.chunks:
        instead: list[tuple[nn.Module, nn.Module]] = [(layers, _select_layers(layers, spans[chunk.number], boundary))]
        if not chunk.is_first:
            instead.append((embeddings, given))
        if not chunk.is_last:
            instead += [(module, PassThrough(module)) for module in after]
        views.append({slot: new for module, new in instead for slot in _find_child_slots(decoder, module)})
    if not stage.is_last:
        for module in (*after, *heads, *([] if projection is None else [projection])):
            _replace(root, module, PassThrough(module))
    if not stage.is_first:
        _replace(root, embeddings, given)
    for i, layer in enumerate(layers):
        if not any(i in spans[chunk.number] for chunk in stage.chunks):
            layers[i] = PassThrough(layer)
    width = decoder.config.get_text_config().hidden_size
    decoder.forward = _build_chunk_forward(decoder.forward, stage, views, boundary, token_shard, width, dtype)


def _build_embedding_stand_in(
    embeddings: nn.Module, boundary: _BoundaryStates, stage: Stage, *, is_tied: bool
) -> PassThrough:
    """Return the module that replaces the embeddings in later chunks and returns the received hidden states."""
    stand_in = PassThrough(embeddings)
    if is_tied and stage.is_last:
        # The projection of the last stage uses the tied weight, which keeps its name as an embedding.
        stand_in.register_parameter("weight", embeddings.weight)  # type: ignore[arg-type]
    else:
        stand_in.weight = torch.empty(0, device=stage.device)  # some decoders read its device
    # Detached: the module before the first layer returns the same states with their gradient.
    stand_in.forward = lambda *unused: boundary.received.detach()  # type: ignore[union-attr]
    return stand_in


def _select_layers(layers: nn.ModuleList, layer_range: range, boundary: _BoundaryStates) -> nn.ModuleList:
    """Return the layers with every layer outside `layer_range` replaced by a pass-through module, so that a decoder
    runs one chunk.

    The module before `layer_range` returns the received hidden states; the module after `layer_range` stores the hidden
    states for the next chunk.
    """
    chosen = nn.ModuleList(layer if i in layer_range else PassThrough(layer) for i, layer in enumerate(layers))
    if layer_range.start > 0:
        chosen[layer_range.start - 1].forward = lambda *unused, **other: boundary.received
    if layer_range.stop < len(layers):
        chosen[layer_range.stop].forward = _build_storing_forward(boundary)
    return chosen


def _build_storing_forward(boundary: _BoundaryStates) -> Callable[..., Tensor]:
    def forward(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        boundary.sent = states
        return states

    return forward


def _build_chunk_forward(
    original_forward: Callable[..., Any],
    stage: Stage,
    views: Sequence[_Replacements],
    boundary: _BoundaryStates,
    token_shard: TokenShard,
    width: int,
    dtype: torch.dtype,
) -> Callable[..., Any]:
    """Return a decoder's `forward` that receives the hidden states of the previous chunk and sends its output to the
    next chunk.
    """

    def forward(*, input_ids: Tensor, **kwargs: Any) -> Any:
        if not stage.active_chunk.is_first:
            # Between layers each tp rank has its own tokens (sequence parallel).
            rows = input_ids.shape[1] // (token_shard.tp.size() if token_shard.tp else 1)
            boundary.received = stage.recv_states((1, rows, width), dtype)
        try:
            with _swap_modules(views[stage.active_index]):
                output = original_forward(input_ids=input_ids, **kwargs)
            received, sent = boundary.received, boundary.sent
        finally:
            boundary.received = boundary.sent = None
        if sent is not None:
            stage.send_states(sent)
            output.last_hidden_state = sent
        if torch.is_grad_enabled():
            stage.save_for_backward(received, sent)
        return output

    return forward


@contextlib.contextmanager
def _swap_modules(view: _Replacements) -> Iterator[None]:
    before = {(parent, name): parent._modules[name] for parent, name in view}
    try:
        _set_modules(view)
        yield
    finally:
        _set_modules(before)


def _set_modules(view: _Replacements) -> None:
    for (parent, name), module in view.items():
        parent._modules[name] = module


def _find_child_slots(root: nn.Module, module: nn.Module) -> list[_ChildSlot]:
    """Return all child slots in the module tree of `root` that contain `module`."""
    return [(parent, name) for parent in root.modules() for name, child in parent._modules.items() if child is module]


def _replace(root: nn.Module, module: nn.Module, new: nn.Module) -> None:
    _set_modules(dict.fromkeys(_find_child_slots(root, module), new))


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
