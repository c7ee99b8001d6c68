"""Replaces token embeddings with features of media, inside the model's original forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from roll.models.multimodal.features import MediaFeatures

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MediaEmbedding"]


class MediaEmbedding:
    """Replaces rows of the output of a decoder's embedding layer while `replace` is active.

    The replacement uses forward hooks, not the argument `inputs_embeds`, because the embedding layer must run: with
    tensor parallelism it returns only this rank's tokens, and FSDP gathers its weights.

    Args:
        decoder: The decoder of a model of `transformers`.
    """

    def __init__(self, decoder: Any) -> None:
        self._active: tuple[Tensor, MediaFeatures, int, Sequence[MediaFeatures]] | None = None
        decoder.get_input_embeddings().register_forward_hook(self._replace_embeddings)
        decoder.register_forward_pre_hook(self._add_arguments, with_kwargs=True)

    @contextmanager
    def replace(
        self, rows: Tensor, features: MediaFeatures, num_tokens: int, unused: Sequence[MediaFeatures] = ()
    ) -> Iterator[None]:
        """Replace the embeddings of some tokens.

        Args:
            rows: Indices [m] of the tokens to replace in the layer's output [1, n, H], ascending; may be empty.
            features: The features [m, H]; if `rows` is empty, any number of features, which are not used.
            num_tokens: n, the number of tokens that the decoder computes on this rank.
            unused: Features that replace no embeddings. They stay in the autograd graph, so that their towers get
                gradients of 0 instead of none.
        """
        self._active = rows, features, num_tokens, unused
        try:
            yield
        finally:
            self._active = None

    def _replace_embeddings(self, module: Any, args: Any, output: Tensor) -> Tensor | None:
        if self._active is None:
            return None
        rows, features, _, unused = self._active
        kept = [*unused, features] if not len(rows) else unused  # they keep their towers in the autograd graph
        if kept:
            parts = [part.sum() for own in kept for part in (own.embeds, *own.deepstack)]
            output = output + 0.0 * sum(parts, start=output.new_zeros(())).to(output.dtype)
        return output if not len(rows) else output.index_copy(1, rows, features.embeds.to(output.dtype)[None])

    def _add_arguments(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Add the features for later layers (Qwen3-VL's deepstack) to the arguments of the decoder."""
        if self._active is None or not self._active[1].deepstack:
            return None
        rows, features, num_tokens, _ = self._active
        mask = rows.new_zeros(1, num_tokens).bool()
        mask[0, rows] = True
        embeds = [part if len(rows) else part[:0] for part in features.deepstack]
        return args, kwargs | {"deepstack_visual_embeds": embeds, "visual_pos_masks": mask}
