"""Images of sandboxes: a root file system made of layers, which sandboxes share and each may change for itself.

registry, OCI layout, `docker save`, directory ──► layers, unpacked once (`cache`) ──► overlay in each sandbox
"""

from __future__ import annotations

from roll_sandbox.images.cache import CachedImage, Hold, ImageCache, Source
from roll_sandbox.images.image import Image
from roll_sandbox.images.names import Reference, parse_reference

__all__ = ["CachedImage", "Hold", "Image", "ImageCache", "Reference", "Source", "parse_reference"]
