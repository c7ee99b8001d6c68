"""Processed media from the run's media store, cached by each process."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from roll.errors import ModelError
from roll.media import AudioClip, MediaContent, MediaStore, VideoClip
from roll.models.multimodal.processor import MediaProcessor, ProcessedMedia, has_media_config
from roll.models.resolve import resolve_model
from roll.types import MediaKind

__all__ = ["BLANK_DIGESTS", "MediaInputs", "open_media"]

logger = logging.getLogger(__name__)

CACHE_BYTES = 512 * 2**20
"""Maximum total size of the processed media that a process caches."""
MAX_CACHED_TOKENS = 100_000
"""Maximum number of media whose tokens a process caches; they take about 1 KB each."""

BLANK_DIGESTS: Mapping[MediaKind, str] = {"image": "00", "audio": "01", "video": "02"}
"""Digests of the results of `MediaInputs.get_blank`; no medium of a store has them."""
_BLANK_KINDS: Mapping[str, MediaKind] = {digest: kind for kind, digest in BLANK_DIGESTS.items()}

_open_inputs: WeakValueDictionary[tuple[str, Path, bool], MediaInputs] = WeakValueDictionary()
_open_lock = threading.Lock()


def open_media(model: str | Path, directory: Path | None, *, trust_remote_code: bool = False) -> MediaInputs | None:
    """Open the media of a run for a model; return `None` for a model that reads only text.

    Args:
        model: A model in any form that `resolve_model` accepts.
        directory: The run's media store; `None` keeps media in memory.
        trust_remote_code: Whether the model's repository may run Python code.
    """
    if not has_media_config(model):
        return None
    if directory is None:
        return _load_inputs(model, None, trust_remote_code)
    # The controller, a trainer and an embedded engine share one object, so that a process decodes each medium once.
    key = str(resolve_model(model, allow_quantized=True)), directory.absolute(), trust_remote_code
    with _open_lock:
        if (found := _open_inputs.get(key)) is None and (found := _load_inputs(model, directory, trust_remote_code)):
            _open_inputs[key] = found
    return found


def _load_inputs(model: str | Path, directory: Path | None, trust_remote_code: bool) -> MediaInputs | None:
    try:
        processor = MediaProcessor(model, trust_remote_code=trust_remote_code)
    except ModelError as error:  # the language model can still be trained on text
        logger.warning("%s Images, audio and video are not supported.", error)
        return None
    store = MediaStore(directory, kinds=processor.kinds, audio_rate=processor.audio_rate)
    return MediaInputs(store, processor)


class MediaInputs:
    """Processed media by digest, with an LRU cache in memory. Several threads may use it at the same time.

    Args:
        store: The store of the run's media.
        processor: The model's processor.
        cache_bytes: Maximum total size of the cached media.
    """

    def __init__(self, store: MediaStore, processor: MediaProcessor, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.store = store
        self.processor = processor
        self._cache: OrderedDict[str, ProcessedMedia] = OrderedDict()
        self._cached_bytes, self._cache_bytes = 0, cache_bytes
        self._tokens: OrderedDict[str, ProcessedMedia] = OrderedDict()
        self._blanks: dict[MediaKind, ProcessedMedia] = {}
        self._lock = threading.RLock()
        self.num_processed = 0
        """Number of decoded and processed media, including media that were evicted from the cache."""

    def get(self, digest: str) -> ProcessedMedia:
        """Return a processed medium.

        Raises:
            DataError: The medium is not in the store, or the processor rejects it.
        """
        if digest in _BLANK_KINDS:
            return self.get_blank(_BLANK_KINDS[digest])
        # The lock is held while a medium is processed: threads that need the same one wait, and fast tokenizers
        # must not be used by two threads at once.
        with self._lock:
            if digest in self._cache:
                self._cache.move_to_end(digest)
                return self._cache[digest]
            found = self.processor.process(self.store.get(digest))
            self.num_processed += 1
            self._cache[digest] = found
            self._cached_bytes += found.num_bytes
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                _, dropped = self._cache.popitem(last=False)
                self._cached_bytes -= dropped.num_bytes
        return found

    def get_without_inputs(self, digest: str) -> ProcessedMedia:
        """Return a processed medium with empty `inputs`. These results are small, so many are cached.

        Raises:
            DataError: See `get`.
        """
        found = self._tokens.get(digest)  # without the lock: the event loop must not wait while a medium is processed
        if found is None:
            with self._lock:
                found = self._tokens[digest] = replace(self.get(digest), inputs={})
                if len(self._tokens) > MAX_CACHED_TOKENS:
                    self._tokens.popitem(last=False)
        return found

    def has_tokens(self, digest: str) -> bool:
        """Return whether a medium's tokens are cached; if so, `get_without_inputs` need not process the medium."""
        return digest in self._tokens

    def get_blank(self, kind: MediaKind) -> ProcessedMedia:
        """Return a small blank medium, for checks of a model and for ranks without media that must run a sharded tower.

        In training, the features of the blank medium are multiplied by 0 and replace no embeddings. The medium is not
        stored.
        """
        with self._lock:
            if kind not in self._blanks:
                self._blanks[kind] = self.processor.process(_build_blank(kind, self.store.audio_rate))
        return self._blanks[kind]


def _build_blank(kind: MediaKind, audio_rate: int) -> MediaContent:
    from PIL import Image

    image = Image.linear_gradient("L").resize((56, 56)).convert("RGB")
    if kind == "image":
        return image
    if kind == "video":
        frames = [image, image.rotate(90), image.rotate(180), image.rotate(270)]
        return VideoClip(frames=np.stack([np.asarray(frame) for frame in frames]), fps=2.0)
    time = np.arange(audio_rate // 2) / audio_rate
    return AudioClip(samples=np.sin(2 * np.pi * (300 + 400 * time) * time).astype(np.float32), rate=audio_rate)
