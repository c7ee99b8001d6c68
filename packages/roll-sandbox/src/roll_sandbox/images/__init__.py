"""Images for sandboxes: root file systems made of layers. Sandboxes share the layers; changes stay in one sandbox.

registry, OCI layout, `docker save`, directory ──► layers, unpacked once (`cache`) ──► overlay in each sandbox
"""

from __future__ import annotations

from roll_sandbox.images.cache import CachedImage, ImageCache, ImageLock, ImageSource
from roll_sandbox.images.image import Image
from roll_sandbox.images.names import ImageReference, parse_reference

__all__ = ["CachedImage", "Image", "ImageCache", "ImageLock", "ImageReference", "ImageSource", "parse_reference"]
