"""Images of sandboxes: a root file system, made of layers, that many sandboxes share and each may change for itself.

registry, OCI layout, `docker save`, directory ──► layers, unpacked once (`cache`) ──► overlay in each sandbox
"""

from __future__ import annotations

from roll.sandbox.images.cache import CachedImage, Hold, ImageCache, Source
from roll.sandbox.images.image import Image
from roll.sandbox.images.names import Reference, reference_of

__all__ = ["CachedImage", "Hold", "Image", "ImageCache", "Reference", "Source", "reference_of"]
