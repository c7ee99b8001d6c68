"""Media in a row of tokens: features of the towers replace the embeddings of the feature tokens.

    images ─ tower, projector ─► features ─► embeddings of the feature tokens ─► decoder layers

Feature tokens are detected only inside media spans. A token with the same ID in text is treated as text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.errors import DataError, ModelError
from roll.models.mixers import get_decoder
from roll.models.multimodal.embedding import MediaEmbedding
from roll.models.multimodal.features import (
    MediaFeatures,
    batch_media,
    encode_media,
    get_feature_token_ids,
    join_features,
)
from roll.models.multimodal.inputs import MediaInputs
from roll.models.multimodal.positions import compute_mrope_positions
from roll.types import FloatArray, IntArray, MediaKind, MediaSpan

__all__ = ["ModelMedia"]


class ModelMedia:
    """Inserts media into the sequences of one loaded model.

    Args:
        model: A model with a vision tower.
        inputs: The processed media.
    """

    def __init__(self, model: Any, inputs: MediaInputs) -> None:
        self.inputs = inputs
        self.is_bidirectional = False
        """True if tokens of an image also attend to later tokens of the same image; set by `check_media`."""
        self._model = model
        ids = get_feature_token_ids(model)
        self._feature_ids = {kind: ids[kind] for kind in inputs.processor.kinds if kind in ids}
        self._embedding = MediaEmbedding(get_decoder(model))

    @property
    def kinds(self) -> Collection[MediaKind]:
        """The types of media that the model reads."""
        return self._feature_ids.keys()

    def check(self, token_ids: NDArray[np.integer[Any]], media: Sequence[MediaSpan], label: str) -> None:
        """Check that every medium can be read, and that its span has the tokens that the processor creates for it.

        Args:
            token_ids: Tokens [L] of a sequence.
            media: The spans of media in the sequence.
            label: Name of the sequence in error messages, such as its request.

        Raises:
            DataError: A medium cannot be read, or the tokens of its span are invalid.
        """
        for span in media:
            expected = self.inputs.get_without_inputs(span.digest).token_ids
            if not np.array_equal(expected, token_ids[span.start : span.end]):
                raise DataError(
                    f"{label} has {span.kind} {span.digest[:12]} at tokens {span.start} to {span.end}, but these "
                    f"differ from the {len(expected)} tokens that the model's processor creates for the {span.kind}: "
                    f"the sequence was rendered for another model, or was cut inside the {span.kind}."
                )

    def compute_positions(
        self, token_ids: NDArray[np.integer[Any]], media: Sequence[MediaSpan]
    ) -> IntArray | FloatArray | None:
        """Return M-RoPE positions [3, L] of a sequence; `None` if the model's positions are token indices."""
        return compute_mrope_positions(self._model, self.inputs, token_ids, media)

    def find_bidirectional_images(
        self, token_ids: NDArray[np.integer[Any]], media: Sequence[MediaSpan]
    ) -> NDArray[np.int64] | None:
        """Return the image number of each token in a row, shape [N]; numbers begin at 1, and other tokens get 0.

        Crops are numbered like separate images. The result is `None` if attention is causal or the row has no images.
        """
        if not self.is_bidirectional or not media:
            return None
        images = np.zeros(len(token_ids), np.int64)
        number = 0
        for span in (span for span in media if span.kind == "image"):
            own = self._find_feature_tokens(token_ids, span)
            breaks = np.diff(own, prepend=own[:1] - 2) > 1  # the crops of an image are separate blocks
            images[own] = number + np.cumsum(breaks)
            number = int(images[own].max(initial=number))
        return images

    @contextmanager
    def insert_features(
        self,
        token_ids: NDArray[np.integer[Any]],
        media: Sequence[MediaSpan],
        device: Any,
        dtype: Any,
        local_positions: NDArray[np.int64] | None = None,
        *,
        synchronize_counts: Callable[[Sequence[int]], Sequence[int]] | None = None,
    ) -> Iterator[None]:
        """Insert the features of a row's media into the decoder's forward passes within this context.

        Args:
            token_ids: Tokens [N] of the row.
            media: Spans of media in the row; a medium with several spans is encoded once.
            device: The device of the model.
            dtype: The dtype that the model computes in.
            local_positions: Indices of the tokens that this rank embeds; `None` for all.
            synchronize_counts: A function that returns the maximum over all ranks of the number of runs of each tower,
                given this rank's numbers in the order of `kinds`; `None` if the towers are not sharded. Ranks that
                shard a tower must run it equally often, so a rank with fewer runs also runs the tower on a small blank
                medium, whose features are multiplied by 0.

        Raises:
            ModelError: The number of a medium's features differs from the number of feature tokens in its span.
        """
        import torch

        from roll.models.transfers import move_to_device, to_tensor

        encoded, unused = self._run_towers(
            {span.digest: span.kind for span in media}, synchronize_counts, device, dtype
        )
        rows, found = self._locate_features(token_ids, media, encoded, unused)
        entry = np.full(len(token_ids), -1)
        local_positions = np.arange(len(token_ids)) if local_positions is None else local_positions
        entry[local_positions] = np.arange(len(local_positions))
        mine = np.flatnonzero(entry[rows] >= 0)
        index, chosen = move_to_device((to_tensor(entry[rows][mine]), to_tensor(mine)), torch.device(device))
        own = found.map(lambda part: part.index_select(0, chosen)) if 0 < len(mine) < len(rows) else found
        with self._embedding.replace(index, own, len(local_positions), unused):
            yield

    @contextmanager
    def insert_last_features(
        self, slots: Sequence[int], media: Sequence[MediaSpan], num_tokens: int, device: Any, dtype: Any
    ) -> Iterator[None]:
        """Insert features for single tokens within this context; each token must be the last feature token of a medium.

        Args:
            slots: Indices of the tokens in the row.
            media: The span of each token's medium.
            num_tokens: The number of tokens that the decoder computes.
            device: The device of the model.
            dtype: The dtype that the model computes in.
        """
        import torch

        encoded = encode_media(self._model, [self.inputs.get(span.digest) for span in media], device, dtype)
        last = [own.map(lambda part: part[-1:]) for own in encoded]
        with self._embedding.replace(torch.tensor(slots, device=device), join_features(last), num_tokens):
            yield

    def ends_with_feature(self, token_ids: NDArray[np.integer[Any]], media: Sequence[MediaSpan]) -> bool:
        """Return whether the last token of a sequence is a feature token."""
        if not media or media[-1].end != len(token_ids):
            return False
        return int(token_ids[-1]) == self._feature_ids[media[-1].kind]

    def _run_towers(
        self,
        digests: Mapping[str, MediaKind],
        synchronize_counts: Callable[[Sequence[int]], Sequence[int]] | None,
        *device_and_dtype: Any,
    ) -> tuple[dict[str, MediaFeatures], list[MediaFeatures]]:
        """Return the features of media by digest, and the features of the blank media in additional tower runs.

        Args:
            digests: The types of the media by digest.
            synchronize_counts: See `insert_features`.
            device_and_dtype: The device and the dtype of the towers.
        """
        by_kind = {kind: [digest for digest, own in digests.items() if own == kind] for kind in self.kinds}
        processed = {kind: [self.inputs.get(digest) for digest in own] for kind, own in by_kind.items()}
        runs = [len(batch_media(own)) for own in processed.values()]
        encoded: dict[str, MediaFeatures] = {}
        unused: list[MediaFeatures] = []
        # The kinds in order, each with its further runs: the ranks then run the blocks of the towers in the same order.
        for kind, own, most in zip(
            self.kinds, runs, runs if synchronize_counts is None else synchronize_counts(runs), strict=True
        ):
            features = encode_media(self._model, processed[kind], *device_and_dtype)
            encoded |= dict(zip(by_kind[kind], features, strict=True))
            for _ in range(most - own):
                unused += encode_media(self._model, [self.inputs.get_blank(kind)], *device_and_dtype)
        return encoded, unused

    def _find_feature_tokens(self, token_ids: NDArray[np.integer[Any]], span: MediaSpan) -> NDArray[np.int64]:
        return span.start + np.flatnonzero(token_ids[span.start : span.end] == self._feature_ids[span.kind])

    def _locate_features(
        self,
        token_ids: NDArray[np.integer[Any]],
        media: Sequence[MediaSpan],
        features: dict[str, MediaFeatures],
        unused: Sequence[MediaFeatures],
    ) -> tuple[NDArray[np.int64], MediaFeatures]:
        """Return the indices [m] of the row's feature tokens, ascending, and their features [m, H]."""
        if not media:
            return np.zeros(0, np.int64), unused[0]
        rows: list[NDArray[np.int64]] = []
        for span in media:
            rows.append(self._find_feature_tokens(token_ids, span))
            num_features = len(features[span.digest].embeds)
            if len(rows[-1]) != num_features:
                raise ModelError(
                    f"{span.kind} {span.digest[:12]} has {num_features} features, but its span has {len(rows[-1])} "
                    f"feature tokens: the sequence was rendered for another model, or was cut inside the {span.kind}"
                )
        return np.concatenate(rows), join_features([features[span.digest] for span in media])
